"""Arguments that belong together; `registry` flattens them into the schema of an op.

The docstrings of ops do not repeat what holds for all of them:

* An op raises ValueError on a wrong shape, dtype, device or layout, on a number outside its range
  and on an unknown activation. Indices and scales are read on a CPU; on a GPU only with
  LIGHTSEQ_CHECK_INDICES=1. `checks.check_boundaries` says when a GPU's boundaries are read.
* A result that is not wanted is EMPTY (numel 0): without a cast, so are the results in E4M3.
* The gradient of a parameter (dweight, dbias, ...) is overwritten or, with ``accumulate``, added
  to. It may be None.
* Statistics of rows (mean, rstd, lse, loss) are float32, or float64 for float64.

Shapes: T = rows, C = columns, P = padded rows, M = matrices, S = elements of all matrices,
B = tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .registry import Written


class Dropout(NamedTuple):
    """Dropout of one place in the model.

    p: probability, in [0, 1). rng: int64 [2] (seed, micro-batch). site: number of the place; see
    `philox.keep_mask`.
    """

    p: float
    rng: Tensor
    site: int


class Cast(NamedTuple):
    """The cast of a result to E4M3 in the pass that computes it, by the rule of `casting`.

    The result is a matrix whose rows have a multiple of 16 numbers.
    scale: float32 0-dim, a power of two from 2^-60 to 2^60.
    amax: float32 0-dim, raised to the largest finite |x|.
    saturated: int64 0-dim, to which the number of finite |x / scale| above 448 is added.
    """

    scale: Tensor
    amax: Written
    saturated: Written


class Quantised(NamedTuple):
    """An operand of a product in E4M3: x = scale * values.

    values: [T, C]. transpose: [C, P], zero past column T. A product reads one of them, or both in
    backward; the other may be None. scale: as in `Cast`, on a 16-byte boundary on a GPU.
    """

    values: Tensor | None
    transpose: Tensor | None
    scale: Tensor

    def t(self) -> Quantised:
        """x^T, as ``Tensor.t``."""
        return Quantised(self.transpose, self.values, self.scale)


#: An operand of a product.
Operand = Tensor | Quantised


class WeightCast(NamedTuple):
    """The cast of all matrices in a flat buffer of weights, each with a scale of its own.

    Each matrix is cast by the rule of `casting`. Its values [rows, columns] are written to
    ``values``, their transpose to ``transposes``.

    tiles: int32 [B, 8], see `fp8_weights.fp8_tiles`; on a GPU they are not checked.
    scale, amax, saturated: float32, float32 and int64 [M], see `Cast`. scale may have any stride.
    values, transposes: E4M3 [S].
    """

    tiles: Tensor
    scale: Tensor
    amax: Written
    saturated: Written
    values: Written
    transposes: Written
