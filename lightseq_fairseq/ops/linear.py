"""Linear layer: y = x weight^T + bias.

Backward: dx (+)= dy weight,  dweight (+)= dy^T x,  dbias (+)= column sum of dy. The GEMMs write
into the caller's buffers directly, also when they accumulate.

In fp8 all operands are `Quantised`, and results are bfloat16. A product reads two operands with the
inner dimension adjacent: forward the values of x and weight, dx the values of dy and the transpose
of weight, dweight the transposes of dy and x. It is summed in float32, then multiplied by both
scales, and rounded to the result's dtype. Single products are exact in float32. On a GPU, if a
bfloat16 gradient is added to, the product is rounded before the sum is.

Shapes: T = packed tokens (rows), P = padded rows, K = inputs, N = outputs. In fp8, K and N are
multiples of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Operand, Quantised
from .casting import E4M3, check_scale, check_width, padded
from .checks import FLOATS, Shape, check_rows, check_tensor
from .numerics import column_sum, store_gradient, work_dtype
from .registry import Written, define


class LinearFwd(NamedTuple):
    """y [T, N] = x weight^T + bias.

    x: [T, K]. weight: [N, K]. bias: [N] or None. All of one dtype; or x and weight are `Quantised`,
    and bias and y are bfloat16.
    """

    x: Operand
    weight: Operand
    bias: Tensor | None

    def check(self, op: str) -> None:
        x, weight, bias = self
        _, outputs = check_forward(op, x, weight)
        if bias is not None:
            check_tensor(op, "bias", bias, (outputs,), (result_dtype(x),), matrix(x))

    def shape(self) -> Tensor:
        return empty_product(self.x, self.weight)

    def reference(self) -> Tensor:
        return product(self.x, self.weight, self.bias).to(result_dtype(self.x))


linear_fwd = define("linear_fwd", LinearFwd)


class LinearBwd(NamedTuple):
    """dx [T, K], EMPTY unless need_dx.

    dy: [T, N]. x, weight: as in forward. dweight: [N, K]. dbias: [N]. onto: [T, K], another
    gradient of x: the GEMM adds dx to it in place, and dx is not returned (need_dx must be False).
    In fp8 all operands are `Quantised`: dy needs its values and its transpose, x and weight need
    their transposes. dweight is bfloat16 or float32, and dbias is None: the op that casts dy sums
    it before.
    """

    dy: Operand
    x: Operand
    weight: Operand
    dweight: Written | None
    dbias: Written | None
    onto: Written | None
    accumulate: bool
    need_dx: bool

    def check(self, op: str) -> None:
        dy, x, weight, dweight, dbias, onto, _, need_dx = self
        rows, inputs, outputs = check_backward(op, dy, x, weight)
        check_dweight(op, dweight, (outputs, inputs), matrix(dy))
        if dbias is not None:
            if isinstance(dy, Quantised):
                raise ValueError(f"{op}: dbias must be None in fp8: the cast of dy sums it")
            check_tensor(op, "dbias", dbias, (outputs,), FLOATS, dy)
        if onto is not None:
            check_rows(op, "onto", onto, (rows, inputs), (result_dtype(x),), matrix(dy))
            if need_dx:
                raise ValueError(f"{op}: dx is either returned or added to onto, not both")

    def shape(self) -> Tensor:
        dx = empty_product(self.dy, self.weight.t())
        return dx if self.need_dx else dx.new_empty(0)

    def reference(self) -> Tensor:
        dy, x, weight, dweight, dbias, onto, accumulate, need_dx = self
        dtype = result_dtype(x)
        if isinstance(dy, Tensor):
            dy = operand(dy)
            if dbias is not None:
                store_gradient(dbias, column_sum(dy), accumulate)
        if dweight is not None:
            store_product(dweight, dy.t(), x.t(), accumulate)
        if onto is not None:
            onto.copy_(product(dy, weight.t(), onto))
        if need_dx:
            return product(dy, weight.t()).to(dtype)
        return matrix(dy).new_empty(0, dtype=dtype)


linear_bwd = define("linear_bwd", LinearBwd)


def matrix(x: Operand) -> Tensor:
    """The operand's numbers, without the scale."""
    if isinstance(x, Tensor):
        return x
    assert x.values is not None
    return x.values


def result_dtype(x: Operand) -> torch.dtype:
    """The dtype of a product with this operand."""
    return x.dtype if isinstance(x, Tensor) else torch.bfloat16


def empty_product(x: Operand, weight: Operand) -> Tensor:
    """Uninitialised x weight^T."""
    shape = len(matrix(x)), len(matrix(weight))
    return matrix(x).new_empty(shape, dtype=result_dtype(x))


def operand(x: Tensor) -> Tensor:
    """x in the GEMM's dtype: 16-bit x becomes float32 on a CPU; GPU GEMMs accumulate in float32."""
    return x if x.is_cuda else x.to(work_dtype(x))


def product(x: Operand, weight: Operand, other: Tensor | None = None) -> Tensor:
    """x weight^T + other, not yet rounded to the result's dtype. other: [N] or [T, N]."""
    if isinstance(x, Tensor):
        rows, columns = operand(x), operand(matrix(weight)).t()
        return rows @ columns if other is None else torch.addmm(operand(other), rows, columns)
    assert isinstance(weight, Quantised)
    y = matrix(x).float() @ matrix(weight).float().t()
    y.mul_(x.scale * weight.scale)
    return y if other is None else y.add_(other)


def store_product(target: Tensor, x: Operand, weight: Operand, accumulate: bool) -> None:
    """Overwrite the caller's gradient with x weight^T, or add it; in place if dtypes allow it."""
    if isinstance(x, Quantised) or target.dtype != operand(x).dtype:
        store_gradient(target, product(x, weight), accumulate)
        return
    rows, columns = operand(x), operand(matrix(weight)).t()
    if accumulate:
        target.addmm_(rows, columns)
    else:
        torch.mm(rows, columns, out=target)


def check_forward(op: str, x: Operand, weight: Operand) -> tuple[int, int]:
    """Raise ValueError unless x and weight are operands of forward. Returns T and N."""
    rows = check_operand(op, "x", x, ("T", "K"))
    columns = check_operand(op, "weight", weight, ("N", rows.shape[1]), rows)
    if isinstance(weight, Quantised):
        check_width(op, columns.t())
    return len(rows), len(columns)


def check_backward(op: str, dy: Operand, x: Operand, weight: Operand) -> tuple[int, int, int]:
    """Raise ValueError unless dy, x and weight are operands of backward. Returns T, K and N."""
    if isinstance(dy, Tensor):
        rows, inputs = check_operand(op, "x", x, ("T", "K")).shape
        outputs = len(check_operand(op, "weight", weight, ("N", inputs), matrix(x)))
        check_operand(op, "dy", dy, (rows, outputs), matrix(x))
        return rows, inputs, outputs
    like = check_operand(op, "dy", dy, ("T", "N"))
    rows, outputs = like.shape
    check_operand(op, "dy", dy, (outputs, padded(rows)), like, "transpose")
    of_x = check_operand(op, "x", x, ("K", padded(rows)), like, "transpose")
    check_operand(op, "weight", weight, (len(of_x), outputs), like, "transpose")
    check_width(op, of_x.t())
    return rows, len(of_x), outputs


def check_operand(
    op: str, name: str, x: Operand, shape: Shape, like: Tensor | None = None, part: str = "values"
) -> Tensor:
    """Return x, or this part of a `Quantised` x; raise ValueError if it has another shape, or is
    of another kind than the operand `like`. See `checks.check_tensor`."""
    if like is not None and isinstance(x, Quantised) != (like.dtype == E4M3):
        raise ValueError(f"{op}: either all operands are Quantised or none, see {name}")
    if not isinstance(x, Quantised):
        check_rows(op, name, x, shape, FLOATS if like is None else (like.dtype,), like)
        return x
    found: Tensor = getattr(x, part)
    check_rows(op, f"{name}_{part}", found, shape, (E4M3,), like)
    check_width(op, found)
    check_scale(op, f"{name}_scale", x.scale, found)
    return found


def check_dweight(op: str, dweight: Tensor | None, shape: Shape, like: Tensor) -> None:
    """Raise ValueError unless dweight can be the gradient of the weight, for operands as `like`."""
    if dweight is not None:
        dtypes = (torch.bfloat16, torch.float32) if like.dtype == E4M3 else FLOATS
        check_rows(op, "dweight", dweight, shape, dtypes, like)
