"""The kernel compared with sets of n-grams and with the reference."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.blocked_tokens import Hypotheses
from helpers.ops_testing import poison_cache

from lightseq_fairseq import ops

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def check(given, dtype, classes, size, always, temperature=1.0, renormalizes=False, spare=0):
    rows = len(given.texts)
    generator = torch.Generator("cuda").manual_seed(classes)
    logits = 4 * torch.randn(rows, classes + spare, generator=generator, device="cuda")
    logits = logits.to(dtype)[:, :classes]
    scores = -10 * torch.rand(rows, generator=generator, device="cuda")
    none = torch.tensor(always, dtype=torch.int32, device="cuda")
    results = []
    for call in (ops.block_repeats, ops.block_repeats, ops.REFERENCES["block_repeats"]):
        mine = torch.empty(rows, classes + spare, dtype=dtype, device="cuda")[:, :classes]
        mine.copy_(logits)
        poison_cache()
        found = call(mine, scores, none, *given.tensors, size, temperature, renormalizes)
        results.append((mine, found))
    (mine, found), again, (theirs, wanted) = results
    blocked = given.blocked(size, always, classes).cuda()
    assert torch.equal(mine, logits.masked_fill(blocked, -torch.inf))
    assert torch.equal(mine, theirs) and torch.equal(mine, again[0])
    assert torch.equal(found, again[1])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [7, 1000, 50_257])
@pytest.mark.parametrize("size", [0, 2, 3, 6])
def test_blocks_what_repeats(size, classes, dtype):
    given = Hypotheses(random.Random(size), 9, positions=60, words=5, device="cuda")
    check(given, dtype, classes, size, [])
    check(given, dtype, classes, size, [1, 3, classes - 1], temperature=0.6, spare=7)
    check(given, dtype, classes, size, [2], renormalizes=True)


@pytest.mark.parametrize("words", [1, 40])
def test_more_n_grams_than_threads(words):
    given = Hypotheses(random.Random(words), 5, positions=3000, words=words, device="cuda")
    check(given, torch.bfloat16, 301, 2, [])


def test_many_rows():
    given = Hypotheses(random.Random(3), 700, positions=20, words=6, device="cuda")
    check(given, torch.bfloat16, 32_003, 3, [0])


def test_extreme_logits():
    given = Hypotheses(random.Random(1), 4, positions=9, words=3, device="cuda")
    always = torch.tensor([5], dtype=torch.int32, device="cuda")
    logits = torch.zeros(4, 100, device="cuda")
    logits[0, 5] = 60.0  # nearly all of the probability
    logits[1] = -torch.inf
    logits[1, 5] = 0.0
    logits[2, 9] = torch.nan
    found = ops.block_repeats(
        logits, torch.zeros(4, device="cuda"), always, *given.tensors, 0, 1.0, False
    )
    assert found[0].item() == pytest.approx(-60 + torch.tensor(99.0).log().item(), abs=1e-4)
    assert found[1:3].tolist() == [-torch.inf] * 2
    assert found[3].item() == pytest.approx(torch.tensor(0.99).log().item(), abs=1e-6)
