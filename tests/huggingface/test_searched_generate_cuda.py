"""``generate`` of accelerated models on a GPU, as CUDA graphs."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.accelerated import transformers
from test_searched_generate import assert_same, build, sources
from test_seq2seq import WORDS
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import PAIRS, mask_of

SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 1, "max_new_tokens": 9},
    {"num_beams": 4, "max_new_tokens": 14, "early_stopping": True},
    {"num_beams": 4, "max_new_tokens": 12, "forced_eos_token_id": None, "length_penalty": 2.0},
    {
        "num_beams": 2, "max_new_tokens": 9, "forced_bos_token_id": 7, "suppress_tokens": [8, 9],
        "no_repeat_ngram_size": 2, "num_return_sequences": 2, "early_stopping": "never",
    },
    {"num_beams": 1, "max_new_tokens": 7, "forced_eos_token_id": None, "bad_words_ids": [[9]]},
    {
        "num_beams": 4, "max_new_tokens": 9, "min_new_tokens": 3, "bad_words_ids": [[1]],
        "renormalize_logits": True,
    },
]  # fmt: skip


def on_gpu(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in batch.items()}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def assert_captured_words(
    plain: Any, batch_of: Callable[[], dict[str, Any]], searches: list[dict[str, Any]]
) -> None:
    """The words are those of the plain model, with graphs and after a change of the weights."""
    ours = lightseq.accelerate(copy.deepcopy(plain))
    for _ in range(2):
        batches = [on_gpu(batch_of()) for _ in range(3)]
        for batch in [*batches, *batches]:
            for options in searches:
                expected, found = (model.generate(**batch, **options) for model in (plain, ours))
                assert_same(found, expected)
                assert found.device == expected.device
        with torch.no_grad():
            for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
                theirs += 0.2 * torch.randn_like(theirs)
                mine.copy_(theirs)
    assert not lightseq.report(ours).fallbacks
    assert len(ours._lightseq.decoder.steps._graphs._graphs) > 5


@pytest.mark.parametrize("family", PAIRS)
def test_captured_words(family: str) -> None:
    """Each search several times, so that its steps are captured, with other weights in between."""
    source = random.Random(f"{family}")
    torch.manual_seed(1)
    plain = build(family, source).cuda()
    assert_captured_words(plain, lambda: sources(source, plain), SEARCHES)


@pytest.mark.parametrize("beam", [1, 2, 5, 16])
def test_large_batches(beam: int) -> None:
    """The number of rows falls while sentences end."""
    torch.manual_seed(2)
    plain = build("Bart", random.Random(3), max_position_embeddings=64).cuda()
    ours = lightseq.accelerate(copy.deepcopy(plain))
    mask = mask_of([random.Random(4).randint(1, 40) for _ in range(70)]).cuda()
    batch = {"input_ids": torch.randint(3, WORDS, mask.shape).cuda(), "attention_mask": mask}
    for ends in (2, None):
        options = {"num_beams": beam, "max_new_tokens": 40, "forced_eos_token_id": ends}
        for _ in range(3):
            assert_same(ours.generate(**batch, **options), plain.generate(**batch, **options))
    assert not lightseq.report(ours).fallbacks


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast", "both"])
@pytest.mark.parametrize("family", ["Bart", "M2M100"])
def test_16_bits(family: str, kind: str) -> None:
    """Scores are near those of float32; the dtype of a search may change."""
    torch.manual_seed(5)
    exact = build(family, random.Random(6)).cuda()
    batch = on_gpu(sources(random.Random(7), exact))
    options = {"num_beams": 4, "max_new_tokens": 6, "return_dict_in_generate": True}
    options["output_scores"] = True
    expected = exact.generate(**batch, **options)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kind, torch.float32)
    ours = lightseq.accelerate(copy.deepcopy(exact).to(dtype))
    for turn in range(4):
        is_cast = kind == "autocast" or (kind == "both" and turn % 2 == 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autocast("cuda", torch.bfloat16, enabled=is_cast):
                found = ours.generate(**batch, **options)
        torch.testing.assert_close(
            found.sequences_scores, expected.sequences_scores, rtol=0.05, atol=0.05
        )
    assert not lightseq.report(ours).fallbacks


def test_inference_mode_streams_and_moves() -> None:
    torch.manual_seed(8)
    plain = build("Pegasus", random.Random(9)).cuda()
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = on_gpu(sources(random.Random(10), plain))
    options = {"num_beams": 2, "max_new_tokens": 9}
    expected = plain.generate(**batch, **options)
    with torch.inference_mode():
        assert_same(ours.generate(**batch, **options), expected)
    for _ in range(4):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            assert_same(ours.generate(**batch, **options), expected)
    moved = ours.cpu().cuda()
    for _ in range(3):
        assert_same(moved.generate(**batch, **options), expected)
    # Inputs on the CPU: transformers moves what the layers read.
    on_cpu = {name: x.cpu() for name, x in batch.items()}
    assert_same(ours.cpu().generate(**on_cpu, **options), expected.cpu())
