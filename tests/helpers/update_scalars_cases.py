"""Cases for ops.update_scalars: an initial state, and the host's input."""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, State

SEED = 7


def start(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    state = torch.zeros(len(State), dtype=torch.float64)
    state[State.LOSS_SCALE] = scale
    state[State.LAST_OVERFLOW_ITER] = state[State.LAST_RESCALE_ITER] = -1
    return state, torch.zeros(2, dtype=torch.int64)


def given(count: int, sample_size: float = 10.0) -> Tensor:
    """The host's input; each learning rate is ten times its update count."""
    rates = [10.0 * (count - i) for i in range(KNOWN_RATES)]
    return torch.tensor([count, sample_size, *rates], dtype=torch.float64)
