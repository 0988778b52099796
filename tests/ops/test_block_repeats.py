"""Blocked tokens compared with sets of n-grams, and scores with the probabilities of before."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.blocked_tokens import Hypotheses

from lightseq_fairseq import ops

ROWS, WORDS = 6, 11


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 2, 3, 5])
@pytest.mark.parametrize("always", [[], [4], [0, 7, 10]])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_blocks_what_repeats(dtype, size, always, temperature):
    for seed in range(3):
        given = Hypotheses(random.Random(seed), ROWS, positions=20, words=4)
        torch.manual_seed(seed)
        logits, scores = torch.randn(ROWS, WORDS).to(dtype), torch.randn(ROWS)
        before = torch.log_softmax(logits.double() / temperature, 1) + scores[:, None]
        blocked = given.blocked(size, always, WORDS)
        found = ops.block_repeats(
            logits, scores, torch.tensor(always).int(), *given.tensors, size, temperature, False
        )
        assert torch.equal(logits == -torch.inf, blocked)
        after = torch.log_softmax(logits.double() / temperature, 1) + found[:, None]
        torch.testing.assert_close(after[~blocked], before[~blocked], rtol=1e-5, atol=1e-5)


def test_scores_stay_if_the_others_are_renormalised():
    given = Hypotheses(random.Random(1), ROWS, positions=20, words=4)
    logits, scores = torch.randn(ROWS, WORDS), torch.randn(ROWS)
    none = torch.tensor([]).int()
    found = ops.block_repeats(logits, scores, none, *given.tensors, 2, 1.0, True)
    assert torch.equal(found, scores) and found.data_ptr() != scores.data_ptr()
    assert torch.equal(logits == -torch.inf, given.blocked(2, [], WORDS))


def test_rows_without_a_possible_token():
    given = Hypotheses(random.Random(1), 3, positions=20, words=4)
    logits = torch.randn(3, 2)
    logits[1, 0] = torch.nan
    every = torch.tensor([0, 1]).int()
    found = ops.block_repeats(logits[:1], torch.zeros(1), every, *given.of(1), 0, 1.0, False)
    assert found.tolist() == [-torch.inf]
    found = ops.block_repeats(logits, torch.zeros(3), every[:1], *given.tensors, 0, 1.0, False)
    assert found[1] == -torch.inf and found[2].isfinite()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": 1}, "size must be 0 or at least 2, got 1"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
    ],
)
def test_refusals(changed, message):
    given = Hypotheses(random.Random(1), ROWS, positions=20, words=4)
    options = {"size": 2, "temperature": 1.0, "renormalizes": False, **changed}
    with pytest.raises(ValueError, match=f"block_repeats: {message}"):
        ops.block_repeats(
            torch.randn(ROWS, WORDS), torch.zeros(ROWS), torch.tensor([]).int(), *given.tensors,
            **options,
        )  # fmt: skip
