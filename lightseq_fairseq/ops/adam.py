"""Adam over one flat buffer, with unscaling, clipping, overflow skip (fairseq: optim/adam.py).

g     = grad * multiplier * min(1, max_norm / (norm * multiplier + clip_eps))
m, v  = beta1 m + (1 - beta1) g,  beta2 v + (1 - beta2) g^2
param = (1 - lr * weight_decay) param - size * m / (sqrt(v) + eps)
size  = lr * sqrt(1 - beta2^step) / (1 - beta1^step)

Kingma & Ba 2015 with fairseq's order of operations (eps joins sqrt(v) before bias correction) and
decoupled decay (Loshchilov & Hutter 2019). Where norm * multiplier is not finite, nothing changes;
the CUDA kernel decides that without asking the host.

Beside a bfloat16 copy of param, the rest of param takes 16 bits more (`split_floats`): an update
then moves 26 bytes a parameter instead of 28.

N elements of the flat buffers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_tensor
from .numerics import work_dtype
from .registry import Written, define

# Elements updated at a time on a CPU: the blocks of the five operands stay in its last cache.
_CPU_BLOCK = 1 << 18
# Squares are summed in rows of this many, then over the rows in float64: float32 sums stay short.
_NORM_ROW = 1 << 9


class AdamNorm(NamedTuple):
    """L2 norm of grad [N]: 0-dim float32 (float64 for float64). NaN and infinity stay visible.

    Raises ValueError unless grad is a contiguous vector of a float dtype.
    """

    grad: Tensor

    def check(self, op: str) -> None:
        _check_flat(op, "grad", self.grad, ("N",), FLOATS)

    def shape(self) -> Tensor:
        return self.grad.new_empty((), dtype=work_dtype(self.grad))

    def reference(self) -> Tensor:
        grad = self.grad
        whole = len(grad) // _NORM_ROW * _NORM_ROW
        dtype = work_dtype(grad)
        norms = (
            torch.linalg.vector_norm(grad[:whole].view(-1, _NORM_ROW), dim=1, dtype=dtype),
            torch.linalg.vector_norm(grad[whole:], dtype=dtype).view(1),
        )
        return torch.linalg.vector_norm(torch.cat(norms), dtype=torch.float64).to(dtype)


adam_norm = define("adam_norm", AdamNorm)


class AdamStep(NamedTuple):
    """One update in place: param, exp_avg, exp_avg_sq, step and, when given, param_low.

    param, exp_avg, exp_avg_sq: [N], float32 or float64. grad: [N], any float dtype.
    param_low: 16-bit [N] or None, receives the new param rounded. If it is bfloat16, param may be
    int16: what `split_floats` makes of float32.
    step: int64 0-dim, incremented first. lr, multiplier (1 / (loss scale * sample size)), norm
    (of grad as it is, see adam_norm): 0-dim float.
    max_norm: clips norm * multiplier, 0 does not clip. clip_eps: 1e-6 is fairseq's rule for float32
    and bfloat16, 0 its rule for float16. beta1, beta2: in [0, 1).
    Nothing changes where norm * multiplier is not finite.
    Raises ValueError on a wrong shape, dtype, device or layout, and on other betas.
    """

    param: Written
    exp_avg: Written
    exp_avg_sq: Written
    grad: Tensor
    param_low: Written | None
    step: Written
    lr: Tensor
    multiplier: Tensor
    norm: Tensor
    max_norm: float
    clip_eps: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def check(self, op: str) -> None:
        param, exp_avg, exp_avg_sq, grad, param_low, step, lr, multiplier, norm = self[:9]
        _check_flat(op, "param", param, ("N",), (torch.float32, torch.float64, torch.int16))
        is_split = param.dtype == torch.int16
        work = torch.float32 if is_split else param.dtype
        for name, state in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            _check_flat(op, name, state, param.shape, (work,), param)
        if is_split and (param_low is None or param_low.dtype != torch.bfloat16):
            raise ValueError(f"{op}: an int16 param needs a bfloat16 param_low")
        _check_flat(op, "grad", grad, param.shape, FLOATS, param)
        if param_low is not None:
            halves = (torch.float16, torch.bfloat16)
            _check_flat(op, "param_low", param_low, param.shape, halves, param)
        check_tensor(op, "step", step, (), (torch.int64,), param)
        for name, scalar in (("lr", lr), ("multiplier", multiplier), ("norm", norm)):
            check_tensor(op, name, scalar, (), (torch.float32, torch.float64), param)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{op}: {name} must be at least 0 and below 1, got {beta}")

    def reference(self) -> None:
        param, exp_avg, exp_avg_sq, grad, param_low, step, lr, multiplier, norm = self[:9]
        max_norm, clip_eps, beta1, beta2, eps, weight_decay = self[9:]
        total = float(norm.double() * multiplier)
        if not math.isfinite(total):
            return
        step.add_(1)
        factor, rate, count = float(multiplier), float(lr), int(step)
        if 0 < max_norm < total + clip_eps:
            factor *= max_norm / (total + clip_eps)
        size = rate * math.sqrt(1 - beta2**count) / (1 - beta1**count)

        is_split = param.dtype == torch.int16
        block = max(1, len(param) if param.is_cuda else _CPU_BLOCK)
        for start in range(0, len(param), block):
            part = slice(start, start + block)
            p, m, v = param[part], exp_avg[part], exp_avg_sq[part]
            if is_split:
                assert param_low is not None
                p = join_floats(param_low[part], p)
            g = grad[part].to(m.dtype, copy=True).mul_(factor)
            m.lerp_(g, 1 - beta1)
            v.lerp_(g.square_(), 1 - beta2)
            update = torch.sqrt(v, out=g).add_(eps)
            torch.div(m, update, out=update).mul_(size)
            if weight_decay != 0:
                # Rounded by itself, as fairseq does: the LayerNorm weights, all near 1, would
                # otherwise drift from fairseq's by an ulp an update, always to the same side.
                p.add_(p, alpha=-rate * weight_decay)
            p.sub_(update)
            if param_low is None:
                continue
            if is_split:
                param[part] = split_floats(p, param_low[part])
            else:
                param_low[part] = p


adam_step = define("adam_step", AdamStep)


def split_floats(x: Tensor, high: Tensor) -> Tensor:
    """int16 [N]: the difference of the bits of float32 x [N] and of high, bfloat16 [N], which
    becomes x rounded.

    One half-way between two bfloat16, whose difference is 2^15, moves by its last bit.
    """
    high.copy_(x)
    difference = x.view(torch.int32) - (high.view(torch.int16).int() << 16)
    return difference.clamp_(max=2**15 - 1).short()


def join_floats(high: Tensor, rest: Tensor) -> Tensor:
    """Inverse of `split_floats`: float32 [N]."""
    return (high.view(torch.int16).int() << 16).add_(rest).view(torch.float32)


def _check_flat(
    op: str,
    name: str,
    x: Tensor,
    shape: tuple[int | str, ...] | torch.Size,
    dtypes: tuple[torch.dtype, ...],
    like: Tensor | None = None,
) -> None:
    check_tensor(op, name, x, shape, dtypes, like)
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, its stride is {x.stride(0)}")
