"""Linear layer of operands in E4M3: y = x weight^T + bias, in bfloat16.

Backward: dx (+)= dy weight,  dweight (+)= dy^T x. Each product reads two operands with the inner
dimension adjacent (`fp8_quantise`): forward x and weight, dx dy and weight_transpose, dweight
dy_transpose and x_transpose. The op that casts dy computes the gradient of the bias, before the
cast.

Products are summed in float32, then multiplied by both scales, and rounded to the result's dtype.
Single products are exact in float32. On a GPU, if a bfloat16 gradient is added to, the product is
rounded before the sum is.

Shapes: T = packed tokens (rows), P = padded rows, K = inputs, N = outputs. K and N are multiples
of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .casting import ALIGNMENT, E4M3, check_scale, padded
from .checks import check_rows, check_tensor
from .numerics import store_gradient
from .registry import Written, define

_GRADIENTS = (torch.bfloat16, torch.float32)


class Fp8LinearFwd(NamedTuple):
    """y [T, N] = x weight^T + bias, bfloat16.

    x: [T, K], weight: [N, K], both E4M3. x_scale, weight_scale: as scale in `fp8_quantise`, and on
    16-byte boundaries on a GPU. bias: bfloat16 [N] or None.
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def check(self, op: str) -> None:
        x, x_scale, weight, weight_scale, bias = self
        check_operand(op, "x", x, ("T", "K"), x)
        check_operand(op, "weight", weight, ("N", x.shape[1]), x)
        _check_width(op, weight.shape[0])
        check_scale(op, "x_scale", x_scale, x)
        check_scale(op, "weight_scale", weight_scale, x)
        if bias is not None:
            check_tensor(op, "bias", bias, weight.shape[:1], (torch.bfloat16,), x)

    def shape(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], self.weight.shape[0]), dtype=torch.bfloat16)

    def reference(self) -> Tensor:
        x, x_scale, weight, weight_scale, bias = self
        y = product(x, x_scale, weight, weight_scale)
        return (y if bias is None else y.add_(bias)).bfloat16()


fp8_linear_fwd = define("fp8_linear_fwd", Fp8LinearFwd)


class Fp8LinearBwd(NamedTuple):
    """dx [T, K], bfloat16; EMPTY (numel 0) unless need_dx.

    dy: [T, N], dy_transpose: [N, P], x_transpose: [K, P], weight_transpose: [K, N], all E4M3.
    Columns of dy_transpose and x_transpose past T must be zero. dy_scale, x_scale, weight_scale:
    as in `fp8_linear_fwd`. dweight: [N, K], bfloat16 or float32, or None; overwritten or, with
    accumulate, added to. onto: bfloat16 [T, K], another gradient of x: dx is added to it and not
    returned (need_dx must be False).
    Raises ValueError on a wrong shape, dtype, device or layout, and on a CPU on a wrong scale.
    """

    dy: Tensor
    dy_transpose: Tensor
    dy_scale: Tensor
    x_transpose: Tensor
    x_scale: Tensor
    weight_transpose: Tensor
    weight_scale: Tensor
    dweight: Written | None
    onto: Written | None
    accumulate: bool
    need_dx: bool

    def check(self, op: str) -> None:
        dy, dy_transpose, dy_scale, x_transpose, x_scale, weight_transpose, weight_scale = self[:7]
        dweight, onto, _, need_dx = self[7:]
        check_operand(op, "dy", dy, ("T", "N"), dy)
        rows, outputs = dy.shape
        check_operand(op, "dy_transpose", dy_transpose, (outputs, padded(rows)), dy)
        check_operand(op, "x_transpose", x_transpose, ("K", padded(rows)), dy)
        inputs = x_transpose.shape[0]
        _check_width(op, inputs)
        check_operand(op, "weight_transpose", weight_transpose, (inputs, outputs), dy)
        scales = {"dy_scale": dy_scale, "x_scale": x_scale, "weight_scale": weight_scale}
        for name, scale in scales.items():
            check_scale(op, name, scale, dy)
        if dweight is not None:
            check_tensor(op, "dweight", dweight, (outputs, inputs), _GRADIENTS, dy)
            check_rows(op, "dweight", dweight)
        if onto is not None:
            check_tensor(op, "onto", onto, (rows, inputs), (torch.bfloat16,), dy)
            check_rows(op, "onto", onto)
            if need_dx:
                raise ValueError(f"{op}: dx is either returned or added to onto, not both")

    def shape(self) -> Tensor:
        size = (self.dy.shape[0], self.x_transpose.shape[0]) if self.need_dx else 0
        return self.dy.new_empty(size, dtype=torch.bfloat16)

    def reference(self) -> Tensor:
        dy, dy_transpose, dy_scale, x_transpose, x_scale, weight_transpose, weight_scale = self[:7]
        dweight, onto, accumulate, need_dx = self[7:]
        if dweight is not None:
            of_weight = product(dy_transpose, dy_scale, x_transpose, x_scale)
            store_gradient(dweight, of_weight, accumulate)
        if not need_dx and onto is None:
            return dy.new_empty(0, dtype=torch.bfloat16)
        dx = product(dy, dy_scale, weight_transpose, weight_scale)
        if onto is None:
            return dx.bfloat16()
        store_gradient(onto, dx, True)
        return dy.new_empty(0, dtype=torch.bfloat16)


fp8_linear_bwd = define("fp8_linear_bwd", Fp8LinearBwd)


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a b^T in float32."""
    return (a.float() @ b.float().t()).mul_(a_scale * b_scale)


def check_operand(
    op: str, name: str, x: Tensor, shape: tuple[int | str, ...], like: Tensor
) -> None:
    """Raise ValueError unless x is an operand in E4M3 of this shape; see `checks.check_tensor`."""
    check_tensor(op, name, x, shape, (E4M3,), like)
    check_rows(op, name, x)
    _check_width(op, x.shape[1])


def _check_width(op: str, width: int) -> None:
    if width % ALIGNMENT:
        raise ValueError(f"{op}: fp8 needs widths that are multiples of {ALIGNMENT}, got {width}")
