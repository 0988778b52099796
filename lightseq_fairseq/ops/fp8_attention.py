"""As attention's forward, with the operand of the product that reads its result in E4M3.

The result is cast as it is stored, after the rounding to bfloat16: it is saved for attention's
backward in any case, and backward makes the transpose from it (`fp8_transpose`).

Shapes: Tq = packed query tokens, H = heads, D = head width; H * D is a multiple of 16.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .attention import AttentionFwd
from .checks import check_tensor
from .fp8_quantise import check_statistics, empty_like, quantise
from .registry import Written, define

Attended = tuple[Annotated[Tensor, "out"], Annotated[Tensor, "lse"], Annotated[Tensor, "values"]]


class Fp8AttentionFwd(NamedTuple):
    """(out, lse, values): values [Tq, H * D] are out in E4M3.

    q, k, v: bfloat16. Other arguments up to site and the first two results: as in `attention_fwd`.
    out_scale, amax, saturated: of out, as in `fp8_quantise`.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float
    p: float
    rng: Tensor
    site: int
    out_scale: Tensor
    amax: Written
    saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "q", self.q, ("Tq", "H", "D"), (torch.bfloat16,))
        AttentionFwd(*self[:12]).check(op)
        check_statistics(op, self.q.flatten(1), *self[12:])

    def shape(self) -> Attended:
        out, lse = AttentionFwd(*self[:12]).shape()
        return out, lse, empty_like(out.flatten(1))[0]

    def reference(self) -> Attended:
        out, lse = AttentionFwd(*self[:12]).reference()
        return out, lse, quantise(out.flatten(1).float(), *self[12:])[0]


fp8_attention_fwd = define("fp8_attention_fwd", Fp8AttentionFwd)
