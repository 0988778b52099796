"""The rng from which all dropout masks of a pass are computed, and dropout by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.second_derivatives import once_differentiable


def draw_rng(device: torch.device | str = "cpu") -> Tensor:
    """The rng of one forward and backward pass: int64 [2] (seed, micro-batch 0) on ``device``.

    The seed is drawn from torch's CPU generator, so ``torch.manual_seed`` determines it. fairseq
    seeds that generator before every update, so a resumed run draws the same masks.
    Every mask of the pass is a function of these two numbers (see ``ops.philox``); backward
    recomputes the masks instead of storing them. Pass this tensor itself, not copies of it, to all
    layers of the pass: layers recognise by the tensor object which other layers belong to the same
    pass. For layers on another device, draw a separate tensor for that device.
    """
    seed = torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64)
    return torch.cat([seed, torch.zeros(1, dtype=torch.int64)]).to(device)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
        ctx.save_for_backward(x, rng)
        ctx.p, ctx.site = p, site
        return ops.bias_activation_dropout_fwd(x, None, "identity", p, rng, site)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, rng = ctx.saved_tensors
        dx = ops.bias_activation_dropout_bwd(
            dy.contiguous(), x, None, "identity", p=ctx.p, rng=rng, site=ctx.site,
            dbias=None, accumulate=False,
        )  # fmt: skip
        return dx, None, None, None


def dropout(x: Tensor, p: float, rng: Tensor, site: int) -> Tensor:
    """Dropout of x [T, C] at the rate ``p``, differentiable; rng and site: see ``ops.philox``."""
    return x if p == 0.0 else _Dropout.apply(x, p, rng, site)
