"""Scales follow from the history by the formula, with exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from helpers.ops_testing import spaced
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.fp8_scales import HISTORY

DONE, SKIPPED = (torch.tensor(x, dtype=torch.float64) for x in (0.0, 1.0))


def table(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """scale, amax and history of ``count`` tensors, without a history."""
    return torch.ones(count), torch.zeros(count), torch.zeros(HISTORY, count)


def right_scale(most: float) -> float:
    """The smallest power of two by which twice ``most`` is at most 448, within the limits."""
    exponent = -60
    while exponent < 60 and 2 * Fraction(most) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return 2.0**exponent


def test_scale_of_the_largest_number():
    """Around every power of two, where rounding would double or halve the scale."""
    ties = 224 * torch.exp2(torch.arange(-70.0, 71.0))
    amaxes = torch.cat([ties.nextafter(ties * 0), ties, ties.nextafter(ties * 2), torch.rand(200)])
    amaxes = torch.cat([amaxes, torch.tensor([torch.finfo(torch.float32).max, 2.0**-149])])
    scale, amax, history = table(len(amaxes))
    amax.copy_(amaxes)
    ops.fp8_scales(scale, amax, history, DONE, False)
    assert scale.tolist() == [right_scale(x) for x in amaxes.tolist()]
    assert torch.equal(history[0], amaxes) and not history[1:].any() and not amax.any()


def test_the_largest_of_sixteen_updates_counts():
    scale, amax, history = table(1)
    amaxes = [448.0, *(7.0 for _ in range(HISTORY))]
    for place, most in enumerate(amaxes):
        amax.fill_(most)
        ops.fp8_scales(scale, amax, history, DONE, False)
        assert scale.item() == right_scale(448.0 if place < HISTORY else 7.0)
    assert history.flatten().tolist() == amaxes[:0:-1]


def test_forget_drops_what_was_before():
    scale, amax, history = table(2)
    history.fill_(448)
    amax.copy_(torch.tensor([7.0, 0.0]))
    scale[1] = 2.0**-12
    ops.fp8_scales(scale, amax, history, DONE, True)
    assert scale.tolist() == [right_scale(7.0), 2.0**-12]  # without an amax it stays
    assert history[0].tolist() == [7, 0] and not history[1:].any()


@pytest.mark.parametrize("forget", [False, True])
def test_a_skipped_update_shifts_no_history(forget):
    scale, amax, history = table(3)
    history.copy_(torch.rand(HISTORY, 3))
    before = history.clone()
    amax.fill_(1e4)
    ops.fp8_scales(scale, amax, history, SKIPPED, forget)
    assert torch.equal(history, before) and scale.tolist() == [1] * 3 and not amax.any()


def test_scales_may_be_apart():
    scale, amax, history = table(3)
    scale = spaced(scale)
    amax.copy_(torch.tensor([7.0, 448.0, 1e4]))
    ops.fp8_scales(scale, amax, history, DONE, False)
    assert scale.tolist() == [right_scale(x) for x in (7.0, 448.0, 1e4)]
