"""The kernel of ops.update_scalars and its reference decide the same, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.update_scalars_cases import SEED, given, start

from lightseq_fairseq import ops
from lightseq_fairseq.ops.update_scalars import State


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("window", "tolerance", "threshold", "least"),
    [(0, 0.0, 0.0, 0.0), (1, 0.0, 0.0, 1e-4), (3, 0.3, 0.0, 1e-4), (3, 0.0, 4.0, 1.0)],
)
def test_same_as_the_reference(
    window: int, tolerance: float, threshold: float, least: float, norm_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(window)
    state, rng = start(64.0)
    on_gpu = state.cuda(), rng.cuda()
    for step in range(60):
        norm = torch.rand((), generator=generator, dtype=norm_dtype) * 100
        if (window > 0 and norm > 70) or step == 50:
            norm.fill_(math.nan if step % 2 else math.inf)
        rules = (SEED, window, tolerance, threshold, least)
        # The host may be ahead of the device by some updates.
        numbers = given(int(state[State.NUM_UPDATES]) + step % 3, sample_size=step + 1.0)
        ops.update_scalars(state, rng, numbers, norm, *rules)
        ops.update_scalars(*on_gpu, numbers.cuda(), norm.cuda(), *rules)
        assert torch.equal(on_gpu[0].cpu().nan_to_num(-1.0), state.nan_to_num(-1.0))
        assert torch.equal(on_gpu[1].cpu(), rng)
    assert state[State.NUM_UPDATES] > 5
