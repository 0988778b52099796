"""The cast of all weights that fp8 products read, in one op: Adam knows no matrices.

Shapes: W = elements of the flat buffer of parameters, M = matrices, S = elements of all matrices,
N = rows (outputs) and K = columns (inputs) of a matrix, both multiples of 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_power_of_two, check_tensor
from .fp8_quantise import ALIGNMENT, CASTABLE, E4M3, MOST_EXPONENT, quantise
from .registry import Written, define


class Fp8Weights(NamedTuple):
    """Cast matrices that lie in one flat buffer, each with a scale of its own.

    Each matrix is cast by the rule of `fp8_quantise`. Its values [N, K] are written to ``values``,
    their transpose [K, N] to ``transposes``, both from the same element on.

    weights: [W], float16, bfloat16 or float32.
    places: int64 [M, 4]: of each matrix its first element in weights, on a 16-byte boundary, its
    first element in values and transposes, a multiple of 16, then N and K. On a GPU they are not
    checked.
    scale, amax, saturated: float32, float32 and int64 [M], see `fp8_quantise`. scale may have any
    stride.
    values, transposes: E4M3 [S].
    Raises ValueError on a wrong shape, dtype or device, and on a CPU on a wrong place or
    scale.
    """

    weights: Tensor
    places: Tensor
    scale: Tensor
    amax: Written
    saturated: Written
    values: Written
    transposes: Written

    def check(self, op: str) -> None:
        weights, places, scale, amax, saturated, values, transposes = self
        check_tensor(op, "weights", weights, ("W",), CASTABLE)
        check_tensor(op, "places", places, ("M", 4), (torch.int64,), weights)
        count = places.shape[:1]
        check_tensor(op, "scale", scale, count, (torch.float32,), weights)
        check_tensor(op, "amax", amax, count, (torch.float32,), weights)
        check_tensor(op, "saturated", saturated, count, (torch.int64,), weights)
        check_tensor(op, "values", values, ("S",), (E4M3,), weights)
        check_tensor(op, "transposes", transposes, values.shape, (E4M3,), weights)
        for name, x in self._asdict().items():
            if name != "scale" and not x.is_contiguous():
                raise ValueError(f"{op}: {name} must be contiguous, its strides are {x.stride()}")
        check_power_of_two(op, "scale", scale, MOST_EXPONENT)
        if places.device.type != "cpu":
            return
        for start, first, rows, columns in places.tolist():
            if start * weights.itemsize % 16 or any(x % ALIGNMENT for x in (first, rows, columns)):
                raise ValueError(
                    f"{op}: a matrix of {rows} rows and {columns} columns at element {start} of "
                    f"weights and element {first} of values is not aligned to 16"
                )
            fits = 0 <= start <= len(weights) - rows * columns
            if not fits or not 0 <= first <= len(values) - rows * columns:
                raise ValueError(
                    f"{op}: a matrix of {rows} rows and {columns} columns does not fit at element "
                    f"{start} of weights and element {first} of values"
                )

    def reference(self) -> None:
        weights, places, scale, amax, saturated, values, transposes = self
        # float8 tensors cannot be copied on every device.
        values, transposes = values.view(torch.uint8), transposes.view(torch.uint8)
        for place, (start, first, rows, columns) in enumerate(places.tolist()):
            size = rows * columns
            matrix = weights[start : start + size].view(rows, columns)
            scalars = scale[place], amax[place], saturated[place]
            for target, result in zip(
                (values, transposes), quantise(matrix.float(), *scalars), strict=True
            ):
                target[first : first + size] = result.view(torch.uint8).flatten()


fp8_weights = define("fp8_weights", Fp8Weights)
