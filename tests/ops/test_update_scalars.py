"""ops.update_scalars decides what fairseq's host decides, in every update."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.update_scalars_cases import SEED, given, start
from torch import Tensor

from lightseq_fairseq import fairseq_compat, ops
from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, Given, State, StopReason
from lightseq_fairseq.step.training_step import SCALER

fairseq_compat.prepare()

from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler  # noqa: E402


def advance(
    state: Tensor, rng: Tensor, count: int, norm: float, window: int = 0, tolerance: float = 0.0,
    threshold: float = 0.0, least: float = 1e-4,
) -> None:  # fmt: skip
    norm_tensor = torch.tensor(norm, dtype=torch.float32)
    ops.update_scalars(
        state, rng, given(count), norm_tensor, SEED, window, tolerance, threshold, least
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("tolerance", [0.0, 0.4])
@pytest.mark.parametrize("threshold", [None, 4.0])
def test_the_loss_scale_moves_as_fairseqs(
    window: int, tolerance: float, threshold: float | None
) -> None:
    generator = torch.Generator().manual_seed(window)
    scaler = DynamicLossScaler(2.0**60, 2.0, window, tolerance, threshold, 1e-4)
    state, rng = start(2.0**60)
    updates = 0
    for step in range(200):
        overflows = bool(torch.rand((), generator=generator) < 0.3)
        norm = math.nan if step % 2 else math.inf
        advance(
            state, rng, updates, norm if overflows else 3.0, window, tolerance, threshold or 0.0
        )
        try:
            scaler.check_overflow(norm if overflows else 3.0)
            scaler.update()
            updates += 1
        except OverflowError:
            pass
        assert state[State.NUM_UPDATES] == updates
        assert bool(state[State.SKIPPED]) == overflows
        assert {p: getattr(scaler, name) for p, name in SCALER.items()} == {
            p: float(state[p]) for p in SCALER
        }
        assert rng.tolist() == [SEED + updates, 0]
    assert 0 < updates < 200


def test_what_adam_reads() -> None:
    state, rng = start(scale=8.0)
    advance(state, rng, 0, norm=40.0, window=100)
    assert state[State.MULTIPLIER] == 1 / 80
    assert state[State.NORM] == 0.5
    assert state[State.RATE] == 0.0
    state, rng = start(scale=8.0)
    advance(state, rng, 0, norm=math.inf, window=100)
    assert not math.isfinite(state[State.MULTIPLIER])


def test_the_rate_is_that_of_the_updates_which_took_place() -> None:
    state, rng = start(scale=2.0**40)
    # The host keeps counting, and does not know of skipped updates.
    for counted, norm in enumerate((1.0, math.inf, 1.0, math.nan, 1.0)):
        rate = 10.0 * float(state[State.NUM_UPDATES])
        advance(state, rng, counted, norm, window=100)
        assert state[State.RATE] == rate
    assert state[State.NUM_UPDATES] == 3


def test_without_a_scale_the_first_nan_stops_everything() -> None:
    state, rng = start()
    advance(state, rng, 0, 1.0)
    advance(state, rng, 1, math.nan)
    assert state[State.STOPPED] == StopReason.NOT_FINITE
    advance(state, rng, 2, 1.0)
    assert state[State.STOPPED] == StopReason.NOT_FINITE
    assert state[State.NUM_UPDATES] == 1
    assert state[State.SKIPPED] == 1
    assert not math.isfinite(state[State.MULTIPLIER])
    assert rng.tolist() == [SEED + 1, 0]


def test_the_least_scale_stops_everything() -> None:
    state, rng = start(scale=4.0)
    advance(state, rng, 0, math.inf, window=10, least=1.0)
    assert state[State.STOPPED] == StopReason.RUNNING
    advance(state, rng, 0, math.inf, window=10, least=1.0)
    assert state[State.STOPPED] == StopReason.LEAST_SCALE
    assert state[State.LOSS_SCALE] == 2.0


def test_places_of_what_the_host_gives() -> None:
    assert len(given(0)) == len(Given) + KNOWN_RATES - 1
