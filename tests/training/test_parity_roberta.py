"""Every update of RoBERTa equals fairseq's, in pre-training and in fine-tuning."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
from helpers.parity import CLASSES, LS, MASKED, NATIVE, Systems, command_line, compare, train

NORMS = pytest.mark.parametrize(
    "norm", [{}, {"arch": "roberta_prenorm"}], ids=["post-norm", "pre-norm"]
)
SENTENCES = {**MASKED, "sample_break_mode": "complete"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_text(tmp_path_factory.mktemp("text"), lines=90)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_classes(tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_classes(tmp_path_factory.mktemp("numbers"), numbers=2)


def check(
    data: Path, updates: int, systems: Systems = LS, **flags: Any
) -> tuple[list[parity.Update], list[parity.Update]]:
    native = train(command_line(data, NATIVE, **flags), updates)
    ours = train(command_line(data, systems, **flags), updates)
    compare(ours, native)
    return ours, native


def assert_captured(ours: list[parity.Update], native: list[parity.Update]) -> None:
    assert all(len(update.sample_sizes) == 1 for update in ours)
    assert any(len(set(update.sample_sizes)) == 2 for update in native)


@NORMS
@pytest.mark.parametrize("untied", [None, True], ids=["tied", "untied"])
def test_fifty_updates_of_pre_training(text: Path, norm: dict[str, Any], untied: Any) -> None:
    flags = {**SENTENCES, **norm, "untie_weights_roberta": untied}
    ours, native = check(text, 50, **flags)
    assert_captured(ours, native)
    assert native[-1].logged["loss"] < 0.95 * native[0].logged["loss"]
    clipped = sum(update.norm > parity.FLAGS["clip-norm"] for update in native)
    assert clipped > 0


@pytest.mark.parametrize("words", [50_265, 250_002], ids=["roberta", "xlm-r"])
def test_large_vocabularies(text: Path, tmp_path: Path, words: int) -> None:
    data = tmp_path / "text"
    shutil.copytree(text, data)
    known = len((data / "dict.txt").read_text().splitlines())
    with (data / "dict.txt").open("a") as dictionary:
        specials = 5  # four of every dictionary, and the mask
        dictionary.writelines(f"more{i} 1\n" for i in range(words - specials - known))
    _, native = check(data, 3, **SENTENCES)
    assert native[0].logged["loss"] > 0.9 * math.log2(words)


@NORMS
def test_fifty_updates_of_fine_tuning(classes: Path, norm: dict[str, Any]) -> None:
    ours, native = check(classes, 50, **{**CLASSES, **norm, "lr": 1e-2})
    assert_captured(ours, native)
    assert native[-1].output["ncorrect"] > native[0].output["ncorrect"]
    # In float32 and float64 Adam leaves alone what has no gradient.
    name = "encoder.lm_head.dense.weight"
    assert native[0].parameters[name].equal(native[-1].parameters[name])


def test_numbers_instead_of_classes(numbers: Path) -> None:
    flags = {**CLASSES, "num_classes": 2, "regression_target": True}
    assert_captured(*check(numbers, 20, **flags))


VARIANTS: dict[str, dict[str, Any]] = {
    "blocks": {"sample_break_mode": "none"},
    "relu": {"activation_fn": "relu"},
    "gelu_accurate": {"activation_fn": "gelu_accurate"},
    "no-clipping": {"clip_norm": 0.0},
    "few-masked": {"mask_prob": 0.02, "max_tokens": 24},
    "layers-to-keep": {"encoder_layers_to_keep": "0"},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_variants(text: Path, flags: dict[str, Any]) -> None:
    ours, _ = check(text, 6, **{**SENTENCES, **flags})
    assert all(len(update.sample_sizes) == 1 for update in ours)


@pytest.mark.parametrize(
    "systems", [LS._replace(optimizer="native"), NATIVE._replace(criterion="ls")],
    ids=["our-model-and-criterion", "our-criterion"],
)  # fmt: skip
def test_fairseqs_own_step(text: Path, classes: Path, systems: Systems) -> None:
    for data, flags in ((text, SENTENCES), (classes, CLASSES)):
        check(data, 6, systems, **flags)


def test_layer_drop(text: Path, classes: Path) -> None:
    for data, flags in ((text, SENTENCES), (classes, CLASSES)):
        check(data, 6, **{**flags, "encoder_layerdrop": 0.5})


PRECISIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "fp16": ({"fp16": True, "fp16_no_flatten_grads": True}, True),
    "bf16": ({"bf16": True}, True),
    "memory-efficient-bf16": ({"memory_efficient_bf16": True}, False),
}


@pytest.mark.parametrize(("flags", "decays"), PRECISIONS.values(), ids=PRECISIONS)
def test_what_has_no_gradient_decays_in_16_bits(
    classes: Path, flags: dict[str, Any], decays: bool
) -> None:
    name = "encoder.lm_head.dense.weight"
    with parity.mixed_precision_in_float64():
        _, native = check(classes, 10, **CLASSES, **flags)
    assert native[0].parameters[name].equal(native[-1].parameters[name]) != decays
