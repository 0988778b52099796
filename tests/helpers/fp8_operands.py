"""Operands of fp8 products, and the numbers that their casts may give."""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.arguments import Cast
from lightseq_fairseq.ops.casting import quantise


class Operand:
    """A matrix in E4M3, made by `ops.fp8_quantise`, and the numbers that it stands for."""

    def __init__(self, x: Tensor, scale: float) -> None:
        self.scale = torch.tensor(scale)
        amax, saturated = torch.tensor(0.0), torch.tensor(0)
        self.values, self.transpose = ops.fp8_quantise(x, self.scale, amax, saturated)
        assert saturated == 0
        self.numbers = self.values.double() * scale

    def to(self, device: str) -> Operand:
        """A copy on a device."""
        copy = object.__new__(Operand)
        copy.scale, copy.numbers = self.scale.to(device), self.numbers
        copy.values, copy.transpose = (
            t.view(torch.uint8).to(device).view(t.dtype) for t in (self.values, self.transpose)
        )
        return copy


class OfCast:
    """Scale and statistics of a cast, as its ops take them."""

    def __init__(self, scale: float, device: str = "cpu") -> None:
        self.scale = torch.tensor(scale, device=device)
        self.amax = torch.tensor(0.5, device=device) * scale
        self.saturated = torch.tensor(3, device=device)

    def __iter__(self):
        return iter((self.scale, self.amax, self.saturated))


def bits(x: Tensor) -> Tensor:
    """A copy of an E4M3 tensor's bytes on the CPU."""
    return x.view(torch.uint8).cpu()


def assert_is_cast(
    values: Tensor, transpose: Tensor, of_cast: OfCast, exact: Tensor, error: Tensor | float
) -> None:
    """The values are a cast of numbers that differ from the exact ones [T, F], float64, by at most
    the error; the transpose has the same bytes; the statistics are those of these numbers."""
    rows = len(exact)
    assert torch.equal(bits(transpose)[:, :rows], bits(values).t())
    assert not bits(transpose)[:, rows:].any()
    scale, found = of_cast.scale.cpu(), values.cpu().float()
    ends = []
    for end in (exact - error, exact + error):
        amax, saturated = torch.tensor(0.0), torch.tensor(0)
        numbers, _ = quantise(end, Cast(scale, amax, saturated))
        ends.append((numbers.float(), amax, int(saturated)))
    (low, amax_low, few), (high, amax_high, many) = ends
    assert torch.equal(found.isnan(), exact.isnan())
    wrong = ~((found >= low) & (found <= high) | found.isnan())
    assert not wrong.any(), f"{int(wrong.sum())} numbers, such as {wrong.nonzero()[0].tolist()}"
    if exact.isnan().any() or not exact.numel():
        return
    size, most = exact.abs().max(), error if isinstance(error, float) else error.max()
    least = min(amax_low, amax_high, size - most) * 0.999
    assert least <= of_cast.amax.cpu() or of_cast.amax.cpu() == 0.5 * scale
    assert of_cast.amax.cpu() <= max(size + most, 0.5 * float(scale)) * 1.001
    count = int(of_cast.saturated) - 3
    surely = ((exact.abs() - error) / scale > 448).sum()
    assert surely <= count <= ((exact.abs() + error) / scale > 448).sum(), (few, many)
