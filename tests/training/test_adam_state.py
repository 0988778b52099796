"""Adam's state in the captured step: parameters that are split into 16 bits and remainders, and the
cast of new weights to fp8."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightseq_fairseq import ops
from lightseq_fairseq.memory.parameters import ALIGNMENT
from lightseq_fairseq.ops.casting import E4M3
from lightseq_fairseq.ops.fp8_weights import Matrix, fp8_tiles
from lightseq_fairseq.step import adam_state
from lightseq_fairseq.step.flat_adam import FlatAdam


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("function", ["split_floats", "join_floats"])
def test_an_error_amid_splitting_loses_nothing(
    function: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may run out at any block. Calling it again, in either direction, completes the
    conversion."""
    parameter = nn.Parameter(torch.randn(100))
    expected, low = parameter.detach().clone(), torch.empty(100, dtype=torch.bfloat16)
    adam = FlatAdam([parameter])
    monkeypatch.setattr(adam_state, "_BLOCK", 16)
    convert, calls = getattr(adam_state.ops, function), iter(range(1000))

    def fails_once(*arguments: Any) -> Any:
        if next(calls) == place:
            raise RuntimeError("CUDA out of memory")
        return convert(*arguments)

    monkeypatch.setattr(adam_state.ops, function, fails_once)
    directions = {"split_floats": lambda: adam.fused.split(low), "join_floats": adam.join}
    if function == "join_floats":
        adam.fused.split(low)
    with pytest.raises(RuntimeError, match="out of memory"):
        directions[function]()
    for direction in directions.values():  # first the same direction, then back
        direction()
    assert torch.equal(parameter.detach(), expected)
    assert torch.equal(low, expected.bfloat16())


def test_split_parameters_cannot_be_read() -> None:
    """They have no values while they are split; saving a state or taking a step joins them
    first."""
    parameter = nn.Parameter(torch.randn(6, 5))
    expected, low = parameter.detach().clone(), torch.empty(30, dtype=torch.bfloat16)
    adam = FlatAdam([parameter])
    adam.fused.split(low)
    with pytest.raises(RuntimeError):
        torch.empty(6, 5).copy_(parameter.detach())
    assert adam.fused.buffer.intact() and len(adam.fused.buffer.data) == 0
    adam.state_dict()
    assert torch.equal(parameter.detach(), expected) and adam.fused.buffer.intact()
    parameter.grad = torch.ones(6, 5)
    adam.fused.split(low)
    adam.step()
    assert parameter.shape == (6, 5) and not torch.equal(parameter.detach(), expected)


def test_half_of_the_memory_is_free_while_parameters_are_split() -> None:
    parameter = nn.Parameter(torch.randn(60, 50))
    expected = parameter.detach().clone()
    low, adam = torch.empty(3000, dtype=torch.bfloat16), FlatAdam([parameter])
    for _ in range(2):
        memory = adam.fused.split(low)
        assert memory is not None and 2 * 3000 - ALIGNMENT < len(memory) <= 2 * 3000
        memory.fill_(255)
        assert adam.fused.split(low) is None
        adam.join()
        assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("is_whole", [True, False])
def test_updated_weights_are_cast_to_fp8(is_whole: bool, is_wide: bool) -> None:
    """In the launch of the update, if there is one for all parameters and the gradient is bfloat16,
    otherwise after it."""
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in [(16, 32), (7,), (48, 16)]]
    adam = FlatAdam(parameters)
    if not is_whole:
        adam.fused.leave_out(parameters[1:2])
    buffer = adam.fused.buffer
    low, gradient = buffer.data.bfloat16(), torch.randn_like(buffer.data)
    gradient = gradient if is_wide else gradient.bfloat16()
    places = (buffer.offsets[0], 0, 16, 32), (buffer.offsets[2], 512, 48, 16)
    tiles = fp8_tiles([Matrix(*place) for place in places], len(low))
    values, transposes = (torch.zeros(1280, dtype=torch.uint8).view(E4M3) for _ in range(2))
    scale, one = torch.full((2,), 2.0**-6), torch.ones(())
    amax, saturated = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    cast = ops.WeightCast(tiles, scale, amax, saturated, values, transposes)
    before = low.clone()
    adam.fused.split(low)
    with mock.patch.object(ops, "fp8_weights", wraps=ops.fp8_weights) as cast_alone:
        adam.fused.update(gradient, low, one * 0.1, one, one, 0.0, 1e-6, cast=cast)
    assert cast_alone.called == (is_wide or not is_whole)
    adam.join()
    assert adam.fused.buffer.views(low)[1].equal(buffer.views(before)[1]) != is_whole
    for i, (start, place, rows, columns) in enumerate(places):
        part = slice(start, start + rows * columns)
        assert not torch.equal(low[part], before[part])
        of_matrix = ops.Cast(scale[i], torch.zeros(()), torch.tensor(0))
        expected = ops.fp8_quantise(low[part].view(rows, columns), of_matrix)
        for ours, theirs in zip((values, transposes), expected, strict=True):
            ours = ours.view(torch.uint8)[place : place + rows * columns]
            assert torch.equal(ours, theirs.view(torch.uint8).flatten())
        assert amax[i] == of_matrix.amax > 0 and saturated[i] == of_matrix.saturated


def test_split_parameters_are_all_updated() -> None:
    """The captured step in bf16 updates remainders; the result is that of float32 parameters."""
    shapes = [(6, 5), (7,), (3, 3)]
    torch.manual_seed(1)
    values = [torch.randn(shape) for shape in shapes]
    found = []
    for is_split in (False, True):
        parameters = [nn.Parameter(value.clone()) for value in values]
        adam = FlatAdam(parameters)
        buffer = adam.fused.buffer
        low = buffer.zeros(torch.bfloat16)
        gradient = buffer.zeros(torch.float32)
        for view, low_view, value in zip(
            buffer.views(gradient), buffer.views(low), values, strict=True
        ):
            view.fill_(0.5)
            low_view.copy_(value)
        if is_split:
            adam.fused.split(low)
        one = torch.ones(())
        for _ in range(2):
            adam.fused.update(gradient, low, one * 0.1, one, one, 0.0, 1e-6)
        adam.join()
        found.append([parameter.detach().clone() for parameter in parameters])
    for split, plain, before in zip(found[1], found[0], values, strict=True):
        torch.testing.assert_close(split, plain, rtol=0, atol=1e-6)
        assert not (plain == before).any()
