"""Packed tokens and the boundaries of their sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.layer_inputs import lengths
from torch import Tensor

from lightseq_fairseq import plugins  # noqa: F401  (fairseq does not import without it)
from lightseq_fairseq.memory.packing import Segments

# isort: split
from fairseq.utils import make_positions


def random_masks() -> list[Tensor]:
    right = torch.arange(6) < torch.tensor([[6], [1], [3], [2]])
    scattered = torch.rand(5, 7) < 0.6
    return [right, right.flip(1), scattered, torch.ones(2, 3, dtype=torch.bool)]


@pytest.mark.parametrize("mask", random_masks(), ids=["right", "left", "scattered", "none"])
def test_packing_round_trip(mask: Tensor) -> None:
    segments = Segments.from_mask(mask)
    padded = torch.randn(*mask.shape, 4, dtype=torch.float64, requires_grad=True)
    packed = segments.pack(padded)
    assert torch.equal(packed, padded[mask])
    assert torch.equal(segments.pad(packed), padded * mask[..., None])
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.cu_seqlens.diff().tolist() == mask.sum(1).tolist()
    assert segments.max_len >= mask.sum(1).max()
    assert torch.autograd.gradcheck(segments.pack, (padded,))
    assert torch.autograd.gradcheck(segments.pad, (packed.detach().requires_grad_(),))


@pytest.mark.parametrize("mask", random_masks(), ids=["right", "left", "scattered", "none"])
def test_positions_are_fairseqs(mask: Tensor) -> None:
    tokens = torch.where(mask, 7, 1)
    expected = make_positions(tokens, padding_idx=1)[mask]
    assert torch.equal(Segments.from_mask(mask).positions + 2, expected)


def test_lengths_say_the_same_as_a_mask() -> None:
    a, b = lengths(2, 0, 3), Segments.from_mask(torch.arange(3) < torch.tensor([[2], [0], [3]]))
    assert a.cu_seqlens.tolist() == b.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert a.positions.tolist() == b.positions.tolist() == [0, 1, 0, 1, 2]
    assert a.index.tolist() == b.index.tolist() == [0, 1, 6, 7, 8]


def test_lengths_may_be_a_list() -> None:
    by_list, by_tensor = Segments.from_lengths([3, 0, 2]), lengths(3, 0, 2)
    assert torch.equal(by_list.cu_seqlens, by_tensor.cu_seqlens)
    assert torch.equal(by_list.positions, by_tensor.positions)
    assert len(Segments.from_lengths([]).positions) == 0


@pytest.mark.parametrize("wrong", [[-1, 3], [2.5, 1.0], [[1, 2]], 3])
def test_lengths_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match="lengths must be whole numbers from 0 on, one for each"):
        Segments.from_lengths(wrong)


def test_segments_on_another_device() -> None:
    there = lengths(3, 2).to("meta")
    assert {x.device.type for x in (there.cu_seqlens, there.positions, there.index)} == {"meta"}
    assert (there.max_len, there.shape) == (3, (2, 3))
    assert Segments.from_lengths([3, 2], "cpu").cu_seqlens.tolist() == [0, 3, 5]
