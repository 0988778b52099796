"""Adam over one flat buffer, with unscaling, clipping and overflow skip (fairseq: optim/adam.py).

g     = grad * multiplier * min(1, max_norm / (norm * multiplier + clip_eps))
m, v  = beta1 m + (1 - beta1) g,  beta2 v + (1 - beta2) g^2
param = (1 - lr * weight_decay) param - size * m / (sqrt(v) + eps)
size  = lr * sqrt(1 - beta2^step) / (1 - beta1^step)

Kingma & Ba 2015 with fairseq's order of operations (eps is added to sqrt(v) before bias
correction; torch adds it after, which is eps * sqrt(1 - beta2^step) in its place) and decoupled
weight decay (Loshchilov & Hutter 2019). If norm * multiplier is not
finite, the update is skipped; the CUDA kernel decides this on the device, without a host sync.

With a bfloat16 copy of the weights, the float32 master weights can be stored as that copy plus 16
more bits (`split_floats`). An update then moves 26 bytes per parameter instead of 28.

Shapes: N = elements of the flat buffers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import WeightCast
from .checks import FLOATS, check_contiguous, check_tensor
from .fp8_weights import QUAD, Fp8Weights
from .numerics import work_dtype
from .registry import Written, define

# Elements per block on a CPU, chosen so that the five operands' blocks fit the last-level cache.
_CPU_BLOCK = 1 << 18
# Elements per float32 partial norm; the partial norms are combined in float64.
_NORM_ROW = 1 << 9


class AdamNorm(NamedTuple):
    """L2 norm of grad [N], contiguous: 0-dim float32 (float64 for float64). NaN propagates."""

    grad: Tensor

    def check(self, op: str) -> None:
        check_contiguous(op, "grad", self.grad, ("N",), FLOATS)

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
    """Update param, exp_avg, exp_avg_sq, step and, if given, param_low, all in place.

    param, exp_avg, exp_avg_sq: [N], float32 or float64. grad: [N], any float dtype.
    param_low: 16-bit [N] or None; receives the new param, rounded. If it is bfloat16, param may be
    int16 (the second part of split float32 master weights, see `split_floats`).
    step: int64 0-dim, incremented first. lr, multiplier (1 / (loss scale * sample size)), norm
    (of grad as given, from `adam_norm`): 0-dim float.
    max_norm: clips norm * multiplier; 0 disables clipping. clip_eps: fairseq uses 1e-6 for float32
    and bfloat16, and 0 for float16. beta1, beta2: in [0, 1).
    cast: then also does `fp8_weights` of the new param_low, without reading it again. It needs an
    int16 param and a bfloat16 grad, and its tiles cover all N parameters.
    If norm * multiplier is not finite, nothing is updated; the cast is that of the old weights.
    On a CPU, tiles that leave out a parameter raise ValueError.
    eps_after_correction: eps is added after bias correction, as in ``torch.optim.AdamW``.
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
    cast: WeightCast | None = None
    eps_after_correction: bool = False

    def check(self, op: str) -> None:
        param, exp_avg, exp_avg_sq, grad, param_low, step, lr, multiplier, norm = self[:9]
        check_contiguous(op, "param", param, ("N",), (torch.float32, torch.float64, torch.int16))
        is_split = param.dtype == torch.int16
        work = torch.float32 if is_split else param.dtype
        for name, state in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            check_contiguous(op, name, state, param.shape, (work,), param)
        if is_split and (param_low is None or param_low.dtype != torch.bfloat16):
            raise ValueError(f"{op}: an int16 param needs a bfloat16 param_low")
        check_contiguous(op, "grad", grad, param.shape, FLOATS, param)
        if param_low is not None:
            halves = (torch.float16, torch.bfloat16)
            check_contiguous(op, "param_low", param_low, param.shape, halves, param)
        check_tensor(op, "step", step, (), (torch.int64,), param)
        for name, scalar in (("lr", lr), ("multiplier", multiplier), ("norm", norm)):
            check_tensor(op, name, scalar, (), (torch.float32, torch.float64), param)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{op}: {name} must be at least 0 and below 1, got {beta}")
        if self.cast is None:
            return
        check_tensor(op, "param", param, ("N",), (torch.int16,))
        check_tensor(op, "grad", grad, param.shape, (torch.bfloat16,))
        assert param_low is not None  # as param is int16
        Fp8Weights(param_low, self.cast).check(op)
        tiles, quads = self.cast.tiles, len(param) // QUAD
        if tiles.device.type == "cpu" and (covered := (tiles[:, 2] * tiles[:, 3]).sum()) != quads:
            raise ValueError(f"{op}: the tiles cover {QUAD * covered} of {QUAD * quads} parameters")

    def reference(self) -> None:
        self._update()
        if self.cast is not None and self.param_low is not None:
            Fp8Weights(self.param_low, self.cast).reference()

    def _update(self) -> None:
        param, exp_avg, exp_avg_sq, grad, param_low, step, lr, multiplier, norm = self[:9]
        max_norm, clip_eps, beta1, beta2, eps, weight_decay = self[9:15]
        total = float(norm.double() * multiplier)
        if not math.isfinite(total):
            return
        step.add_(1)
        factor, rate, count = float(multiplier), float(lr), int(step)
        if 0 < max_norm < total + clip_eps:
            factor *= max_norm / (total + clip_eps)
        correction = math.sqrt(1 - beta2**count)
        size = rate * correction / (1 - beta1**count)
        if self.eps_after_correction:
            eps *= correction

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
                # Round the decay separately, as fairseq does. A fused operation would make
                # LayerNorm weights, all near 1, drift from fairseq's by one ulp per update, always
                # in the same direction.
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
    """Split float32 x [N] into a bfloat16 and an int16 part; `join_floats` joins them again.

    Writes x, rounded, to high (bfloat16 [N]). Returns int16 [N]: the bits of x minus those of high.
    The split is exact, except where x lies half-way between two bfloat16 and the difference would
    be 2^15: there the joined value differs from x in the last bit.
    """
    high.copy_(x)
    difference = x.view(torch.int32) - (high.view(torch.int16).int() << 16)
    return difference.clamp_(max=2**15 - 1).short()


def join_floats(high: Tensor, remainders: Tensor) -> Tensor:
    """Inverse of `split_floats`: float32 [N] from its bfloat16 and int16 parts."""
    return (high.view(torch.int16).int() << 16).add_(remainders).view(torch.float32)
