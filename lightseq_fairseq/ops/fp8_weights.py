"""Casts of all weights that fp8 products read: alone, or in the pass of Adam that computes them.

Shapes: N = elements of the flat buffer of parameters, M = matrices, S = elements of all matrices,
B = tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast, WeightCast
from .casting import ALIGNMENT, E4M3, MOST_EXPONENT, quantise
from .checks import check_contiguous, check_power_of_two, check_tensor
from .registry import define

TILE_ROWS, TILE_COLUMNS = 64, 128  # the most that a thread block of fp8_weights.cu has
QUAD = 4  # columns of a thread


class Tile(NamedTuple):
    """Rows of 4 x ``quads`` parameters: of a matrix, or of the parameters between matrices.

    A quad is 4 elements, a unit 16 bytes.

    Attributes:
        first: its first quad in the buffer.
        stride: quads from one row to the next, in the buffer and in the values.
        rows, quads: its size.
        matrix: number of its matrix, or -1: its parameters are not cast.
        value, unit: its first quad in the values, and its first unit in the transposes.
        pitch: units from one row of the transpose to the next.
    """

    first: int
    stride: int
    rows: int
    quads: int
    matrix: int = -1
    value: int = 0
    unit: int = 0
    pitch: int = 0


class Matrix(NamedTuple):
    """A matrix [rows, columns], both multiples of 16.

    Attributes:
        start: its first element in the buffer, a multiple of 4.
        place: its first element in values and transposes, a multiple of 16.
    """

    start: int
    place: int
    rows: int
    columns: int


def fp8_tiles(matrices: Iterable[Matrix], count: int) -> Tensor:
    """The tiles of a buffer of ``count`` parameters, each a `Tile`: int32 [B, 8] in host memory.

    They cover the matrices and all parameters between them, but for the last count % 4. No two
    matrices overlap.

    Raises:
        ValueError: a matrix is not aligned.
    """
    tiles: list[Tile] = []
    end = 0
    for number, matrix in sorted(enumerate(matrices), key=lambda found: found[1]):
        if matrix.start % QUAD or any(x % ALIGNMENT for x in matrix[1:]):
            raise ValueError(f"fp8_tiles: {matrix} is not aligned")
        tiles += _others(end, matrix.start)
        tiles += _of_matrix(number, matrix)
        end = matrix.start + matrix.rows * matrix.columns
    tiles += _others(end, count)
    return torch.tensor(tiles, dtype=torch.int32).view(-1, len(Tile._fields))


def _of_matrix(number: int, matrix: Matrix) -> Iterator[Tile]:
    start, place, rows, columns = matrix
    stride, pitch = columns // QUAD, rows // ALIGNMENT
    for row in range(0, rows, TILE_ROWS):
        for column in range(0, columns, TILE_COLUMNS):
            inside = row * columns + column
            yield Tile(
                (start + inside) // QUAD, stride,
                min(TILE_ROWS, rows - row), min(TILE_COLUMNS, columns - column) // QUAD,
                number, (place + inside) // QUAD,
                (place + column * rows + row) // ALIGNMENT, pitch,
            )  # fmt: skip


def _others(start: int, end: int) -> Iterator[Tile]:
    """Tiles of adjacent parameters: whole rows of 128, then the rest."""
    first, left, stride = start // QUAD, (end - start) // QUAD, TILE_COLUMNS // QUAD
    while left > 0:
        rows = max(1, min(TILE_ROWS, left // stride))
        quads = min(stride, left)
        yield Tile(first, stride, rows, quads)
        first, left = first + rows * quads, left - rows * quads


class Fp8Weights(NamedTuple):
    """Cast matrices that lie in one flat buffer.

    weights: bfloat16 [N]. On a CPU, a tile that does not fit raises ValueError.
    """

    weights: Tensor
    cast: WeightCast

    def check(self, op: str) -> None:
        weights, (tiles, scale, amax, saturated, values, transposes) = self
        check_contiguous(op, "weights", weights, ("N",), (torch.bfloat16,))
        check_contiguous(op, "tiles", tiles, ("B", len(Tile._fields)), (torch.int32,), weights)
        check_tensor(op, "scale", scale, ("M",), (torch.float32,), weights)
        check_contiguous(op, "amax", amax, scale.shape, (torch.float32,), weights)
        check_contiguous(op, "saturated", saturated, scale.shape, (torch.int64,), weights)
        check_contiguous(op, "values", values, ("S",), (E4M3,), weights)
        check_contiguous(op, "transposes", transposes, values.shape, (E4M3,), weights)
        check_power_of_two(op, "scale", scale, MOST_EXPONENT)
        if tiles.device.type != "cpu" or len(tiles) == 0:
            return
        tiles = tiles.long()
        first, stride, rows, quads, matrix, value, unit, pitch = tiles.T
        inside = (rows - 1) * stride + quads
        cast = matrix >= 0
        ends = {
            "weights": (QUAD * (first + inside), weights),
            "values": (QUAD * (value + inside)[cast], values),
            "transposes": (
                ALIGNMENT * (unit + (QUAD * quads - 1) * pitch)[cast] + rows[cast], transposes
            ),
            "scale": (matrix + 1, scale),
        }  # fmt: skip
        for name, (end, x) in ends.items():
            if (tiles < -1).any() or (end > len(x)).any():
                raise ValueError(f"{op}: the tiles do not fit {name} with {len(x)} elements")

    def reference(self) -> None:
        weights, (tiles, scale, amax, saturated, values, transposes) = self
        # float8 tensors cannot be copied on every device.
        values, transposes = values.view(torch.uint8), transposes.view(torch.uint8)

        def part(x: Tensor, start: int, rows: int, columns: int, stride: int) -> Tensor:
            return x.as_strided((rows, columns), (stride, 1), x.storage_offset() + start)

        for tile in (Tile(*row) for row in tiles.tolist()):
            if tile.matrix < 0:
                continue
            place, shape = tile.matrix, (tile.rows, QUAD * tile.quads)
            x = part(weights, QUAD * tile.first, *shape, QUAD * tile.stride)
            results = quantise(x, Cast(scale[place], amax[place], saturated[place]))
            for target, result in zip(
                (
                    part(values, QUAD * tile.value, *shape, QUAD * tile.stride),
                    part(transposes, ALIGNMENT * tile.unit, *shape[::-1], ALIGNMENT * tile.pitch),
                ),
                results,
                strict=True,
            ):
                target.copy_(result.view(torch.uint8))


fp8_weights = define("fp8_weights", Fp8Weights)
