"""Cases of ops/adam.py: the norm and the update of a whole model.

The baselines do not check for overflow; ours does, as in training.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lightseq_fairseq import ops

from .case import Case, Make, Run, Sizes, without_autograd

BETAS, EPS, DECAY, MAX_NORM, CLIP_EPS, RATE = (0.9, 0.98), 1e-8, 0.01, 1.0, 1e-6, 1e-3


def adam(sizes: Sizes, make: Make) -> Iterator[Case]:
    count = sizes.parameters
    size = f"N{count // 1_000_000}M"
    grad = make.rows(count)
    norm_of = torch.no_grad()(lambda: (torch.linalg.vector_norm(grad, dtype=torch.float32),))
    yield Case(
        f"adam_norm/{size}",
        grad.nbytes,
        {
            "ours": without_autograd(lambda: (ops.adam_norm(grad),)),
            "eager": lambda: norm_of,
            "compile": lambda: torch.compile(norm_of),
        },
    )

    start = torch.randn(count, device=make.device)
    lr, multiplier = (torch.tensor(x, device=make.device) for x in (RATE, 1.0))
    (norm,) = norm_of()
    is_low, is_split = make.dtype != torch.float32, make.dtype == torch.bfloat16

    def state() -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return new param, exp_avg, exp_avg_sq, param_low and step; each system has its own."""
        low = start.to(make.dtype) if is_low else None
        step = torch.zeros((), dtype=torch.int64, device=make.device)
        return start.clone(), torch.zeros_like(start), torch.zeros_like(start), low, step

    def ours() -> Run:
        param, exp_avg, exp_avg_sq, low, step = state()
        kept = ops.split_floats(param, low) if is_split else param
        buffers = (kept, exp_avg, exp_avg_sq, grad, low, step, lr, multiplier, norm)

        def run() -> list[Tensor]:
            ops.adam_step(*buffers, MAX_NORM, CLIP_EPS, *BETAS, EPS, DECAY)
            return [kept, exp_avg, exp_avg_sq]

        return torch.no_grad()(run)

    def factor() -> Tensor:
        return multiplier * (MAX_NORM / (norm * multiplier + CLIP_EPS)).clamp(max=1.0)

    def formula(
        param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, low: Tensor | None, step: Tensor
    ) -> list[Tensor]:
        step += 1
        g = grad.float() * factor()
        exp_avg.lerp_(g, 1 - BETAS[0])
        exp_avg_sq.lerp_(g.square(), 1 - BETAS[1])
        size = lr * (1 - BETAS[1] ** step).sqrt() / (1 - BETAS[0] ** step)
        param.sub_(param * (lr * DECAY)).sub_(exp_avg / (exp_avg_sq.sqrt() + EPS) * size)
        if low is not None:
            low.copy_(param)
        return [param, exp_avg, exp_avg_sq]

    def bound(function: Callable[..., list[Tensor]]) -> Run:
        buffers = state()
        return torch.no_grad()(lambda: function(*buffers))

    def optimizer_run(optimizer: Callable[..., torch.optim.Optimizer], **options: bool) -> Run:
        param, _, _, low, _ = state()
        param.requires_grad_().grad = torch.empty_like(param)
        update = optimizer([param], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **options)

        def run() -> list[Tensor]:
            # factor() as [1], not 0-dim: torch then multiplies in float32, in one pass.
            torch.mul(grad, factor().view(1), out=param.grad)
            update.step()
            if low is not None:
                low.copy_(param)
            moments = update.state[param]
            return [param, moments["exp_avg"], moments["exp_avg_sq"]]

        return torch.no_grad()(run)

    systems: dict[str, Callable[[], Run]] = {
        "ours": ours,
        "eager": lambda: bound(formula),
        "compile": lambda: bound(torch.compile(formula)),
        "library": lambda: optimizer_run(torch.optim.AdamW, fused=True),
    }
    if make.device != "cpu" and importlib.util.find_spec("apex"):
        from apex.optimizers import FusedAdam

        systems["apex"] = lambda: optimizer_run(FusedAdam, adam_w_mode=True)
    copies = 0 if is_split else grad.itemsize if is_low else 0
    yield Case(f"adam_step/{size}", grad.nbytes + count * (6 * 4 + copies), systems)
