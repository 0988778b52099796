"""The counter from which all dropout masks of a pass are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_rng(device: torch.device | str = "cpu") -> Tensor:
    """Counter of one forward and backward pass: int64 [2] (seed, micro-batch 0) on ``device``.

    The seed is drawn from torch's CPU generator, so ``torch.manual_seed`` determines it. fairseq
    seeds that generator before every update, so a resumed run draws the same masks.
    Every mask of the pass is a function of these two numbers (see ``ops.philox``); backward
    recomputes the masks instead of storing them. Pass this tensor itself, not copies of it, to all
    layers of the pass: layers recognise by the tensor object which other layers belong to the same
    pass. For layers on another device, draw a separate tensor for that device.
    """
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    return torch.cat([seed, torch.zeros(1, dtype=torch.int64)]).to(device)
