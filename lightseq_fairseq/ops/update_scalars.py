"""The scalars of a training step, where the optimizer's kernels read them: on the device.

Between the gradient's norm and Adam one thread decides what fairseq's host decides: how the
gradient is scaled, which learning rate counts, whether the update is skipped, what becomes of the
loss scale (``fairseq.optim.dynamic_loss_scaler.DynamicLossScaler``) and of the number of updates,
from which the next step's dropout follows. The host need not know any of it at once.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor
from .registry import Written, define

KNOWN_RATES = 4  # learning rates that an update brings along: how far the host may be ahead


class State(IntEnum):
    """Places in the state, float64 [len(State)]: whole numbers are exact up to 2^53."""

    NUM_UPDATES = 0  # that took place
    LOSS_SCALE = 1
    SCALER_ITER = 2  # fairseq's counters, under its names
    LAST_OVERFLOW_ITER = 3
    LAST_RESCALE_ITER = 4
    OVERFLOWS_SINCE_RESCALE = 5
    STOPPED = 6  # why nothing changes any more: a value of StopReason
    SKIPPED = 7  # whether the last update was
    NORM = 8  # of the gradient of the mean loss, before clipping
    RATE = 9  # learning rate of the update
    MULTIPLIER = 10  # 1 / (loss scale * sample size)
    LOSS = 11  # sums over the update's batches, written by the step itself
    NLL = 12
    CORRECT = 13
    TOTAL = 14  # targets that could be correct


class StopReason(IntEnum):
    """Values of State.STOPPED."""

    RUNNING = 0
    NOT_FINITE = 1  # a gradient that is, without a loss scale that could be lowered
    LEAST_SCALE = 2  # the loss scale has reached its minimum


class Given(IntEnum):
    """Places in what the host gives each update, float64 [len(Given) + KNOWN_RATES - 1]."""

    NUM_UPDATES = 0  # the host's count before this update: at least the device's
    SAMPLE_SIZE = 1
    RATE = 2  # learning rate at that count; then those of the counts before it


class UpdateScalars(NamedTuple):
    """Decide on one update: write what Adam reads into ``state``, and what follows from it.

    state: float64 [len(State)]. rng: int64 [2], becomes (seed + number of updates, 0).
    given: float64, see `Given`. norm: 0-dim float32 or float64, of the gradient as it is.
    scale_window: updates without an overflow after which the loss scale doubles; 0: there is none.
    tolerance, threshold, min_loss_scale: as fairseq's flags; threshold 0 for none.
    Raises ValueError on a wrong shape, dtype or device.
    """

    state: Written
    rng: Written
    given: Tensor
    norm: Tensor
    seed: int
    scale_window: int
    tolerance: float
    threshold: float
    min_loss_scale: float

    def check(self, op: str) -> None:
        state, rng, given, norm = self[:4]
        check_tensor(op, "state", state, (len(State),), (torch.float64,))
        check_tensor(op, "rng", rng, (2,), (torch.int64,), state)
        check_tensor(op, "given", given, (len(Given) + KNOWN_RATES - 1,), (torch.float64,), state)
        check_tensor(op, "norm", norm, (), (torch.float32, torch.float64), state)

    def reference(self) -> None:
        state, rng, given, norm, seed, scale_window, tolerance, threshold, min_loss_scale = self
        s, ahead = state.tolist(), given.tolist()
        count = s[State.NUM_UPDATES]
        multiplier = 1.0 / (s[State.LOSS_SCALE] * ahead[Given.SAMPLE_SIZE])
        total = float(norm) * multiplier
        is_finite = math.isfinite(total) and s[State.STOPPED] == StopReason.RUNNING
        behind = min(max(int(ahead[Given.NUM_UPDATES] - count), 0), KNOWN_RATES - 1)

        s[State.RATE] = ahead[Given.RATE + behind]
        # Adam leaves everything alone where the norm is not finite.
        s[State.MULTIPLIER] = multiplier if is_finite else math.nan
        s[State.NORM], s[State.SKIPPED] = total, not is_finite
        if s[State.STOPPED] == StopReason.RUNNING and not is_finite:
            s[State.STOPPED] = StopReason.NOT_FINITE
            if scale_window > 0:
                s[State.STOPPED] = StopReason.RUNNING
                _overflow(s, tolerance, threshold, min_loss_scale)
        elif is_finite:
            s[State.NUM_UPDATES] = count + 1
            if scale_window > 0:
                if (s[State.SCALER_ITER] - s[State.LAST_OVERFLOW_ITER]) % scale_window == 0:
                    s[State.LOSS_SCALE] *= 2.0
                    s[State.LAST_RESCALE_ITER] = s[State.SCALER_ITER]
                s[State.SCALER_ITER] += 1
        state.copy_(state.new_tensor(s))
        rng.copy_(rng.new_tensor([seed + int(s[State.NUM_UPDATES]), 0]))


update_scalars = define("update_scalars", UpdateScalars)


def _overflow(s: list[float], tolerance: float, threshold: float, least: float) -> None:
    """DynamicLossScaler.check_overflow of a norm that is not finite."""
    since_rescale = s[State.SCALER_ITER] - s[State.LAST_RESCALE_ITER]
    before = s[State.LOSS_SCALE]
    s[State.LAST_OVERFLOW_ITER] = s[State.SCALER_ITER]
    s[State.OVERFLOWS_SINCE_RESCALE] += 1
    if s[State.OVERFLOWS_SINCE_RESCALE] >= tolerance * since_rescale:
        s[State.LOSS_SCALE] = max(before / 2.0, threshold)
        s[State.LAST_RESCALE_ITER] = s[State.SCALER_ITER]
        s[State.OVERFLOWS_SINCE_RESCALE] = 0
    if s[State.LOSS_SCALE] <= least:
        s[State.LOSS_SCALE] = before
        s[State.STOPPED] = StopReason.LEAST_SCALE
    else:
        s[State.SCALER_ITER] += 1
