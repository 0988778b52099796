"""Operands of fp8 products, and the numbers that their casts may give."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops import Cast, Quantised
from lightseq_fairseq.ops.casting import quantise

from .ops_testing import make_cast


def quantised(x: Tensor, scale: float) -> Quantised:
    """x [T, C] in E4M3, in which all its numbers fit."""
    cast = make_cast(scale, x.device)
    values, transpose = ops.fp8_quantise(x, cast)
    assert cast.saturated == 3
    return Quantised(values, transpose, cast.scale)


def numbers(x: Tensor | Quantised) -> Tensor:
    """The numbers of an operand [T, C] in float64."""
    return x.double() if isinstance(x, Tensor) else x.values.double() * x.scale


def parts(x: Tensor | Quantised) -> tuple[Tensor | None, ...]:
    """An operand as ``torch.ops.lightseq`` takes it."""
    return (x, None, None) if isinstance(x, Tensor) else x


def changed(x: Tensor | Quantised, change: Callable[[Tensor], Tensor]) -> Tensor | Quantised:
    """The operand after a change of its tensor, or of its bytes and those of the transpose."""
    if isinstance(x, Tensor):
        return change(x)
    return Quantised(*(change(t.view(torch.uint8)).view(t.dtype) for t in x[:2]), x.scale)


def widened(x: Tensor | Quantised, columns: int = 16) -> Tensor | Quantised:
    """The operand as a view of a matrix that has as many columns of NaN on both sides."""

    def inside(t: Tensor) -> Tensor:
        nan = torch.nan if t.is_floating_point() else 0x7F
        wide = t.new_full((len(t), t.shape[1] + 2 * columns), nan)
        return wide[:, columns:-columns].copy_(t)

    return changed(x, inside)


def with_nan(x: Tensor | Quantised, row: int, column: int) -> Tensor | Quantised:
    """The operand with NaN at this place."""
    if isinstance(x, Tensor):
        x = x.clone()
        x[row, column] = torch.nan
        return x
    copy = changed(x, Tensor.clone)
    copy.values.view(torch.uint8)[row, column] = 0x7F
    copy.transpose.view(torch.uint8)[column, row] = 0x7F
    return copy


def bits(x: Tensor) -> Tensor:
    """A copy of a tensor's bytes on the CPU."""
    return x.contiguous().view(torch.uint8).cpu()


def assert_is_cast(
    values: Tensor, transpose: Tensor, cast: Cast, exact: Tensor, error: Tensor | float
) -> None:
    """The values are a cast of numbers that differ from the exact ones [T, F], float64, by at most
    the error; the transpose has the same bytes; the statistics are those of these numbers."""
    rows = len(exact)
    assert torch.equal(bits(transpose)[:, :rows], bits(values).t())
    assert not bits(transpose)[:, rows:].any()
    scale, found = cast.scale.cpu(), values.cpu().float()
    ends = []
    for end in (exact - error, exact + error):
        amax, saturated = torch.tensor(0.0), torch.tensor(0)
        of_end, _ = quantise(end, Cast(scale, amax, saturated))
        ends.append((of_end.float(), amax, int(saturated)))
    (low, amax_low, few), (high, amax_high, many) = ends
    assert torch.equal(found.isnan(), exact.isnan())
    wrong = ~((found >= low) & (found <= high) | found.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} numbers, such as {wrong.nonzero()[0].tolist()}"
    if exact.isnan().any() or not exact.numel():
        return
    size, most = exact.abs().max(), error if isinstance(error, float) else error.max()
    least = min(amax_low, amax_high, size - most) * 0.999
    assert least <= cast.amax.cpu() or cast.amax.cpu() == 0.5 * scale
    assert cast.amax.cpu() <= max(size + most, 0.5 * float(scale)) * 1.001
    count = int(cast.saturated) - 3
    surely = ((exact.abs() - error) / scale > 448).sum()
    assert surely <= count <= ((exact.abs() + error) / scale > 448).sum(), (few, many)
