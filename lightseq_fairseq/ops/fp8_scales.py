"""Scales of fp8 tensors, from the largest numbers of the last updates (delayed scaling).

A tensor's scale is the power of two with which a number twice as large as the largest of the
history still fits into E4M3: so a tensor may double from one update to the next.

Shapes: M = tensors.
Source: Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .casting import MOST, MOST_EXPONENT
from .checks import check_contiguous, check_tensor
from .registry import Written, define

HISTORY = 16  # amaxes of a tensor from which its scale follows


class Fp8Scales(NamedTuple):
    """Put the amaxes into the history, compute the scales from it, and set the amaxes to zero.

    scale = 2^ceil(log2(2 a / 448)) with a = the largest amax of the history, and between 2^-60 and
    2^60. If a is 0, the scale stays.

    scale: float32 [M], powers of two, with any stride. amax: float32 [M], finite and not negative,
    see `fp8_quantise`. history: float32 [16, M], the newest amaxes first; the oldest are dropped.
    skipped: float64 0-dim. If it is not 0, the update was skipped: then scale and history stay.
    forget: the earlier history is set to zero, so that scales follow from these amaxes alone.
    """

    scale: Written
    amax: Written
    history: Written
    skipped: Tensor
    forget: bool

    def check(self, op: str) -> None:
        scale, amax, history, skipped, _ = self
        check_tensor(op, "scale", scale, ("M",), (torch.float32,))
        check_contiguous(op, "amax", amax, scale.shape, (torch.float32,), scale)
        check_contiguous(op, "history", history, (HISTORY, *scale.shape), (torch.float32,), scale)
        check_tensor(op, "skipped", skipped, (), (torch.float64,), scale)

    def reference(self) -> None:
        scale, amax, history, skipped, forget = self
        if skipped == 0:
            earlier = history[:-1].clone()
            history[1:] = 0 if forget else earlier
            history[0] = amax
            most = history.amax(0)
            # Exact: in float64 the quotient is a power of two only if a is 224 times one.
            mantissa, exponent = torch.frexp(most.double() / (MOST / 2))
            exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
            exponent = exponent.clamp_(-MOST_EXPONENT, MOST_EXPONENT)
            # From bits, since a device's pow may round.
            powers = ((exponent + 127).int() << 23).view(torch.float32)
            scale.copy_(torch.where(most == 0, scale, powers))
        amax.zero_()


fp8_scales = define("fp8_scales", Fp8Scales)
