"""The scalars of a training step, kept on the device, where the optimizer's kernels read them.

fairseq computes them on the host. Here one GPU thread does, between the gradient norm and Adam: the
scaling of the gradient, the learning rate, whether the update is skipped, the new loss scale
(``fairseq.optim.dynamic_loss_scaler.DynamicLossScaler``) and the number of updates, which seeds the
next step's dropout. The host can read the results later; no step waits for the host.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor
from .registry import Written, define

# Number of learning rates that the host passes with each update: for its own update count and the
# counts just below, since the device may have skipped updates that the host does not know of yet.
KNOWN_RATES = 10


class State(IntEnum):
    """Indices into the state, float64 [len(State)]; integers are exact up to 2^53."""

    NUM_UPDATES = 0  # updates that were not skipped
    LOSS_SCALE = 1
    SCALER_ITER = 2  # fairseq's counters, under its names
    LAST_OVERFLOW_ITER = 3
    LAST_RESCALE_ITER = 4
    OVERFLOWS_SINCE_RESCALE = 5
    STOPPED = 6  # a value of StopReason; unless RUNNING, all further updates are skipped
    SKIPPED = 7  # whether the last update was skipped
    NORM = 8  # norm of the gradient of the mean loss, before clipping
    RATE = 9  # learning rate of the update
    MULTIPLIER = 10  # 1 / (loss scale * sample size); NaN to skip the update
    # The objective's sums over the update's batches, at most four, the loss first. The training
    # step writes them.
    SUM_0 = 11
    SUM_1 = 12
    SUM_2 = 13
    SUM_3 = 14


class StopReason(IntEnum):
    """Values of State.STOPPED."""

    RUNNING = 0
    NOT_FINITE = 1  # the gradient is not finite, and there is no loss scale to lower
    LEAST_SCALE = 2  # the loss scale has reached its minimum


class Given(IntEnum):
    """Indices into the host's input to each update, float64 [len(Given) + KNOWN_RATES - 1]."""

    NUM_UPDATES = 0  # the host's update count before this update; at least the device's count
    SAMPLE_SIZE = 1
    RATE = 2  # learning rate at that count, followed by the rates of the counts just below it


class UpdateScalars(NamedTuple):
    """Decide one update: write Adam's scalars to ``state``; update the loss scale and the counts.

    state: float64 [len(State)]. rng: int64 [2], set to (seed + number of updates, 0).
    given: float64, see `Given`. norm: 0-dim float32 or float64, of the gradient before scaling.
    scale_window: the loss scale doubles after this many updates without overflow; 0: no loss scale.
    tolerance, threshold, min_loss_scale: as fairseq's flags; threshold 0: no threshold.
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
        # adam_step skips the update if norm * multiplier is not finite.
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
    """fairseq's DynamicLossScaler.check_overflow, for a norm that is not finite."""
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
