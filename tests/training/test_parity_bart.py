"""Every update of BART equals fairseq's, on each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
from helpers.parity import LS, NATIVE, Systems, command_line, compare, train

PAIRS: dict[str, Any] = {"arch": "bart_base"}
MBART = {**PAIRS, "arch": "mbart_base", **parity.PRE_NORM}


CLASSES = {**parity.CLASSES, "arch": "bart_base", "add_prev_output_tokens": True,
           "decoder_layers": 2, "decoder_attention_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("pairs"))


def check(
    data: Path, updates: int, systems: Systems = LS, **flags: Any
) -> tuple[list[parity.Update], list[parity.Update]]:
    native = train(command_line(data, NATIVE, **flags), updates)
    ours = train(command_line(data, systems, **flags), updates)
    compare(ours, native)
    return ours, native


LANGUAGES: dict[str, Any] = {"task": "translation_from_pretrained_bart", "langs": "src,tgt,xx_XX"}


@pytest.mark.parametrize(
    "flags", [PAIRS, MBART, {**MBART, **LANGUAGES}, {**PAIRS, **LANGUAGES, "prepend_bos": True}],
    ids=["bart", "mbart", "languages", "prepend-bos"],
)  # fmt: skip
def test_fifty_updates_of_translation(pairs: Path, flags: dict[str, Any]) -> None:
    ours, native = check(pairs, 50, **flags)
    assert all(len(update.sample_sizes) == 1 for update in ours)  # the captured step
    assert any(len(set(update.sample_sizes)) == 2 for update in native)
    assert native[-1].logged["loss"] < 0.95 * native[0].logged["loss"]


NOISED: dict[str, Any] = {
    **PAIRS, "task": "denoising", "criterion": "cross_entropy", "label_smoothing": None,
    "source_lang": None, "target_lang": None, "tokens_per_sample": 16, "num_workers": 1,
    "mask": 0.3, "mask_length": "span-poisson", "poisson_lambda": 3.5, "replace_length": 1,
    "mask_random": 0.1, "permute_sentences": 1, "rotate": 0.2, "insert": 0.1,
}  # fmt: skip
NOISED_LANGUAGES = {
    **NOISED, **MBART, "task": "multilingual_denoising", "add_lang_token": True,
    "multilang_sampling_alpha": 0.7,
}  # fmt: skip


@pytest.mark.parametrize("flags", [NOISED, NOISED_LANGUAGES], ids=["text", "languages"])
def test_fifty_updates_of_denoising(tmp_path: Path, flags: dict[str, Any]) -> None:
    """On the same noise, which is new in each epoch: about eight of them."""
    parity.write_text(tmp_path)
    for seed, language in enumerate(("aa", "bb")):
        parity.write_text(tmp_path / language, lines=40 + 20 * seed, seed=seed)
    ours, native = check(tmp_path, 50, **flags)
    assert all(len(update.sample_sizes) == 1 for update in ours)  # the captured step
    assert any(len(set(update.sample_sizes)) == 2 for update in native)
    assert native[-1].logged["loss"] < 0.95 * native[0].logged["loss"]


@pytest.mark.parametrize("numbers", [0, 2], ids=["classes", "numbers"])
def test_fifty_updates_of_fine_tuning(tmp_path: Path, numbers: int) -> None:
    data = parity.write_classes(tmp_path, numbers=numbers)
    flags = {"num_classes": 2, "regression_target": True} if numbers else {}
    ours, native = check(data, 50, **{**CLASSES, **flags, "lr": 1e-2})
    assert all(len(update.sample_sizes) == 1 for update in ours)  # the captured step
    assert any(len(set(update.sample_sizes)) == 2 for update in native)
    assert native[-1].logged["loss"] < native[0].logged["loss"]
