"""Attention whose results are cast to E4M3 as they are stored, for the products that read them.

Forward's result is cast after the rounding to bfloat16: it is saved for attention's backward in any
case. Gradients are rounded so, too, but only their values in E4M3 are stored. Transposes are made
by the products' backward (`fp8_transpose`) in less time: sentences begin at any row, so attention's
stores of a transpose would fill sectors only in part.

Shapes: Tq, Tk = packed query and key tokens, H = heads, D = head width; H * D is a multiple of 16.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from .attention import AttentionBwd, AttentionFwd
from .checks import check_tensor
from .fp8_quantise import ALIGNMENT, E4M3, check_statistics, empty_like, quantise
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


class Fp8AttentionBwd(NamedTuple):
    """As `attention_bwd`, but dq [Tq, H, D], dk and dv [Tk, H, D] are overwritten in E4M3.

    Arguments up to site: as in `attention_bwd`, bfloat16. dq, dk, dv: heads are adjacent, rows
    begin at multiples of 16 numbers, as in column slices of a matrix.
    q_scale, q_amax, q_saturated: of dq, as in `fp8_quantise`. k_scale, k_amax, k_saturated: of both
    dk and dv; they may be those of dq.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    scale: float
    p: float
    rng: Tensor
    site: int
    dq: Written
    dk: Written
    dv: Written
    q_scale: Tensor
    q_amax: Written
    q_saturated: Written
    k_scale: Tensor
    k_amax: Written
    k_saturated: Written

    def check(self, op: str) -> None:
        check_tensor(op, "q", self.q, ("Tq", "H", "D"), (torch.bfloat16,))
        AttentionBwd(*self[:15], self.q, self.k, self.v).check(op)
        for name, x, like, of_cast in (
            ("dq", self.dq, self.q, self[18:21]),
            ("dk", self.dk, self.k, self[21:24]),
            ("dv", self.dv, self.k, self[21:24]),
        ):
            check_tensor(op, name, x, like.shape, (E4M3,), like)
            check_statistics(op, like.flatten(1), *of_cast)
            if len(x) and (x.stride()[1:] != (x.shape[2], 1) or x.stride(0) % ALIGNMENT):
                raise ValueError(
                    f"{op}: {name} must have adjacent heads, and rows at multiples of {ALIGNMENT} "
                    f"numbers, but its strides are {x.stride()}"
                )

    def reference(self) -> None:
        near = AttentionBwd(*self[:15], *(torch.empty_like(x) for x in (self.q, self.k, self.v)))
        near.reference()
        for x, exact, of_cast in (
            (self.dq, near.dq, self[18:21]),
            (self.dk, near.dk, self[21:24]),
            (self.dv, near.dv, self[21:24]),
        ):
            values, _ = quantise(exact.flatten(1).float(), *of_cast)
            x.view(torch.uint8).copy_(values.view(torch.uint8).view(x.shape))


fp8_attention_bwd = define("fp8_attention_bwd", Fp8AttentionBwd)
