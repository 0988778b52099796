"""Where the dropout masks of one pass come from."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_rng(device: torch.device | str = "cpu") -> Tensor:
    """Counter of one forward and backward pass: int64 [2] (seed, micro-batch 0) on ``device``.

    The seed is drawn from torch's CPU generator, so ``torch.manual_seed`` decides it. fairseq
    seeds that generator before every update, which makes a resumed run draw the same masks.
    Every mask of the pass follows from these two numbers (see ``ops.philox``); backward
    recomputes them instead of storing them. Give this tensor itself, not copies of it, to all
    layers of the pass, and to those on another device one drawn for that: by it layers know which
    others draw in the same pass.
    """
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    return torch.cat([seed, torch.zeros(1, dtype=torch.int64)]).to(device)
