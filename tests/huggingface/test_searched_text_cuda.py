"""``generate`` of accelerated language models on a GPU, as CUDA graphs."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from helpers.accelerated import transformers
from test_searched_generate import assert_same
from test_searched_generate_cuda import assert_captured_words, on_gpu
from test_searched_text import SAMPLES, WORDS, build, prompts
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import EOS

SEARCHES: list[dict[str, Any]] = [
    {"num_beams": 1, "max_new_tokens": 9},
    {"num_beams": 4, "max_new_tokens": 14, "early_stopping": True},
    {"num_beams": 4, "max_new_tokens": 12, "length_penalty": 2.0, "num_return_sequences": 3},
    {
        "num_beams": 2, "max_new_tokens": 9, "suppress_tokens": [8, 9], "no_repeat_ngram_size": 2,
        "early_stopping": "never", "min_new_tokens": 4,
    },
    {"num_beams": 1, "max_new_tokens": 7, "eos_token_id": None, "bad_words_ids": [[9]]},
    {"num_beams": 4, "max_new_tokens": 9, "forced_eos_token_id": EOS, "renormalize_logits": True},
]  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("seed", range(3))
def test_captured_text(seed: int) -> None:
    """Each search several times, so that its steps are captured, with other weights in between;
    prompts with and without pads."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    plain = build(source).cuda()
    assert_captured_words(plain, lambda: prompts(source, plain), SEARCHES)


def large_batch(most: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, most, (70, 1), generator=torch.Generator().manual_seed(4))
    lengths[0] = most
    mask = (torch.arange(most) >= most - lengths).long()
    return on_gpu({"input_ids": torch.randint(3, WORDS, mask.shape), "attention_mask": mask})


@pytest.mark.parametrize("beam", [1, 2, 5, 16])
def test_large_batches_of_prompts(beam: int) -> None:
    """The number of rows falls while sentences end: their starts move, too."""
    torch.manual_seed(2)
    plain = build(random.Random(3), n_positions=128).cuda()
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = large_batch(60)
    for _ in range(3):
        options = {"num_beams": beam, "max_new_tokens": 40}
        assert_same(ours.generate(**batch, **options), plain.generate(**batch, **options))
    assert not lightseq.report(ours).fallbacks


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast"])
@pytest.mark.parametrize("width", [64, 128])
def test_text_in_16_bits(width: int, kind: str) -> None:
    """Scores are near those of float32: the kernels of 16 bits read only the positions of a
    prompt."""
    torch.manual_seed(5)
    exact = build(random.Random(6), n_embd=2 * width, n_head=2, n_positions=128).cuda()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.mul_(0.7)
    batch = large_batch(60)
    options = {"num_beams": 4, "max_new_tokens": 6, "return_dict_in_generate": True}
    options["output_scores"] = True
    expected = exact.generate(**batch, **options)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kind, torch.float32)
    ours = lightseq.accelerate(copy.deepcopy(exact).to(dtype))
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
                found = ours.generate(**batch, **options)
        torch.testing.assert_close(
            found.sequences_scores, expected.sequences_scores, rtol=0.05, atol=0.1
        )
    assert not lightseq.report(ours).fallbacks


@pytest.mark.parametrize("options", SAMPLES)
def test_captured_samples(options: dict[str, Any]) -> None:
    """The first token, which is captured from the second call on, is distributed as that of
    transformers; a seed repeats it."""
    torch.manual_seed(7)
    plain = build(random.Random(5)).cuda()
    ours = lightseq.accelerate(copy.deepcopy(plain))
    count, batch = 3000, {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 4]]).cuda()}
    options = {"do_sample": True, "max_new_tokens": 2, "num_return_sequences": count, **options}
    expected = plain.generate(**batch, **options)
    for _ in range(3):
        torch.manual_seed(9)
        found = ours.generate(**batch, **options)
        for place in (3, 4):
            mine, theirs = (x[:count, place].bincount(minlength=WORDS) for x in (found, expected))
            assert ((mine - theirs).abs() < 5 * (mine + theirs).clamp_min(1).sqrt()).all()
    torch.manual_seed(9)
    assert torch.equal(ours.generate(**batch, **options), found)
    assert not lightseq.report(ours).fallbacks
