from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightseq_fairseq.layers import vocabulary_logits
from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.memory.parameters import (
    ALIGNMENT,
    as_one,
    flat_buffers,
    flatten_parameters,
    with_spare_rows,
)
from lightseq_fairseq.memory.passes import Pass, current

SHAPES = ((3, 5), (7,), (4, 5), (4, 5), (1,))


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    torch.manual_seed(1)
    return nn.ParameterList(nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(module: nn.Module, before: dict[str, Tensor]) -> bool:
    after = module.state_dict()
    return list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)


class TestAsOne:
    def test_neighbours_are_viewed(self) -> None:
        whole = torch.arange(24.0).view(6, 4)
        one = as_one([whole[:1], whole[1:4], whole[4:5]])
        assert one.data_ptr() == whole.data_ptr()
        assert torch.equal(one, whole[:5])

    @pytest.mark.parametrize(
        "pieces",
        [
            lambda x: [x[2:4], x[:2]],  # wrong order
            lambda x: [x[:2], x[3:5]],  # a gap
            lambda x: [x[:2], x[2:4].clone()],  # another storage
            lambda x: [x[:2], x[2:].t().contiguous().t()],  # other strides
            lambda x: [x[:2], x.view(-1)[8:12].view(2, 2).repeat(1, 2)],
        ],
    )
    def test_others_are_copied(self, pieces: object) -> None:
        whole = torch.arange(24.0).view(6, 4)
        tensors = pieces(whole)  # type: ignore[operator]
        one = as_one(tensors)
        assert torch.equal(one, torch.cat(tensors))
        one.zero_()
        assert torch.equal(whole, torch.arange(24.0).view(6, 4))

    def test_is_detached(self) -> None:
        single, pair = parameters((2, 3)), parameters((2, 3), (2, 3))
        for tensors in (list(single), list(pair)):
            assert not as_one(tensors).requires_grad


class TestFlattenParameters:
    def test_changes_nothing_but_the_storage(self) -> None:
        module = parameters(*SHAPES)
        module.append(module[0])  # tied
        module[1].requires_grad_(False)
        before, objects = values(module), list(module)
        buffers = flatten_parameters(module)
        assert same(module, before)
        assert all(a is b for a, b in zip(module, objects, strict=True))
        assert [p.requires_grad for p in module] == [True, False, True, True, True, True]
        # A frozen parameter has a buffer of its own.
        assert [len(buffer.parameters) for buffer in buffers] == [4, 1]
        assert len({p.untyped_storage().data_ptr() for p in module}) == 2

    def test_alignment_and_padding(self) -> None:
        module = parameters(*SHAPES, dtype=torch.bfloat16)
        (buffer,) = flatten_parameters(module)
        assert [p.data_ptr() % ALIGNMENT for p in module] == [0] * 5
        assert [p.data_ptr() for p in module] == [
            buffer.data.data_ptr() + 2 * offset for offset in buffer.offsets
        ]
        outside = buffer.data.clone()
        for view in buffer.views(outside):
            view.zero_()
        assert not outside.any()

    def test_groups_are_one_matrix(self) -> None:
        module = parameters(*SHAPES)
        before = values(module)
        first, _, second, third, _ = module
        flatten_parameters(module, [[third, first, second]])
        one = as_one([third, first, second])
        assert one.data_ptr() == third.data_ptr()
        assert third.data_ptr() % ALIGNMENT == 0
        assert torch.equal(one, torch.cat([third, first, second]))
        assert same(module, before)

    def test_spare_rows(self) -> None:
        module = parameters((5, 3), (5,), (16, 2), (3, 4))
        before = values(module)
        (buffer,) = flatten_parameters(module, spared=[module[0], module[1], module[3]])
        assert same(module, before)
        for place, shape in ((0, (8, 3)), (1, (8,)), (3, (8, 4))):
            whole = with_spare_rows(module[place])
            assert whole is not None and whole.shape == shape
            rows = len(module[place])
            assert torch.equal(whole[:rows], module[place]) and not whole[rows:].any()
        # Nothing is reserved for module[2], which is the last one of the buffer.
        assert with_spare_rows(module[2]) is None
        assert buffer.parameters[-1] is module[2]
        (alone,) = parameters((5, 3))
        flatten_parameters(nn.ParameterList([alone]), spared=[alone])
        assert with_spare_rows(alone) is None
        # Zero rows after a frozen one need no gradient.
        alone.requires_grad_(False)
        flatten_parameters(nn.ParameterList([alone]), spared=[alone])
        whole = with_spare_rows(alone)
        assert whole is not None and torch.equal(whole[:5], alone) and not whole[5:].any()
        # An optimizer still finds one buffer.
        (found,) = flat_buffers(module.parameters())
        assert found.data.data_ptr() == buffer.data.data_ptr()
        module.half()
        assert with_spare_rows(module[0]) is None

    def test_spare_rows_wider_than_a_gap(self) -> None:
        module = parameters((9, 64), (3,))
        flatten_parameters(module, spared=[module[0]])
        (buffer,) = flat_buffers(module.parameters())
        assert buffer.offsets[1] == 16 * 64
        (masters,) = flat_buffers(buffer.views(buffer.data.double()))
        assert masters.offsets == buffer.offsets

    def test_second_call_moves_nothing(self) -> None:
        module = parameters(*SHAPES)
        groups = [[module[3], module[2]]]
        (first,) = flatten_parameters(module, groups)
        (second,) = flatten_parameters(module, groups)
        assert first.data.data_ptr() == second.data.data_ptr()

    def test_after_a_change_of_dtype(self) -> None:
        module = parameters(*SHAPES)
        groups = [[module[2], module[3]]]
        (before,) = flatten_parameters(module, groups)
        module.half()
        assert not before.intact()
        (after,) = flatten_parameters(module, groups)
        assert after.data.dtype == torch.float16
        assert as_one(groups[0]).data_ptr() == module[2].data_ptr()

    def test_one_buffer_for_each_dtype(self) -> None:
        module = parameters(*SHAPES)
        module[1].data = module[1].data.double()
        assert {b.data.dtype for b in flatten_parameters(module)} == {torch.float32, torch.float64}

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_copies_stand_alone(self, copied: object) -> None:
        module = parameters(*SHAPES)
        groups = [[module[2], module[3]]]
        flatten_parameters(module, groups)
        before = values(module)
        twin = copied(module)  # type: ignore[operator]
        with torch.no_grad():
            for parameter in module:
                parameter.zero_()
        assert same(twin, before)
        joined = torch.cat([before["2"], before["3"]])
        assert torch.equal(as_one([twin[2], twin[3]]), joined)
        flatten_parameters(twin, [[twin[2], twin[3]]])
        assert same(twin, before)


class TestFlatBuffers:
    def test_a_flat_model_stays_where_it_is(self) -> None:
        module = parameters(*SHAPES)
        (buffer,) = flatten_parameters(module, [[module[2], module[3]]])
        (found,) = flat_buffers(module.parameters())
        assert found.data.data_ptr() == buffer.data.data_ptr()
        assert found.data.shape == buffer.data.shape

    def test_a_frozen_parameter_is_not_touched(self) -> None:
        module = parameters(*SHAPES)
        flatten_parameters(module, [[module[2], module[3]]])
        for frozen in range(5):
            trained = [p for i, p in enumerate(module) if i != frozen]
            buffers = flat_buffers(trained)
            assert len(buffers) == (2 if 0 < frozen < 4 else 1)
            inside = {p.data_ptr() for b in buffers for p in b.parameters}
            assert inside == {p.data_ptr() for p in trained}
            before = module[frozen].detach().clone()
            kept = [buffer.data.clone() for buffer in buffers]
            for buffer in buffers:
                buffer.data.add_(1)
            assert torch.equal(module[frozen], before)
            for buffer, data in zip(buffers, kept, strict=True):
                buffer.data.copy_(data)

    def test_a_stranger_in_a_gap_is_not_touched(self) -> None:
        whole = torch.ones(40)
        first, second = nn.Parameter(whole[:10]), nn.Parameter(whole[12:30])
        for buffer in flat_buffers([first, second]):
            buffer.data.mul_(2)
        assert torch.equal(whole[10:12], torch.ones(2))
        assert torch.equal(first, torch.full((10,), 2.0))

    def test_loose_parameters_are_moved_together(self) -> None:
        module = parameters(*SHAPES)
        before = values(module)
        (buffer,) = flat_buffers([*module, module[0]])
        assert same(module, before)
        buffer.data.zero_()
        assert all(not p.any() for p in module)

    def test_one_vector_is_left_alone(self) -> None:
        vector = nn.Parameter(torch.randn(9))
        address = vector.data_ptr()
        (buffer,) = flat_buffers([vector])
        assert vector.data_ptr() == address == buffer.data.data_ptr()


class TestGradients:
    def test_gathered_once(self) -> None:
        module = parameters(*SHAPES)
        (buffer,) = flatten_parameters(module)
        sum((p * (i + 1)).sum() for i, p in enumerate(module)).backward()
        flat, used = buffer.gather_gradients()
        assert used == [True] * 5
        for i, parameter in enumerate(module):
            assert torch.equal(parameter.grad, torch.full_like(parameter, i + 1))
        assert flat.sum() == sum((i + 1) * p.numel() for i, p in enumerate(module))
        module[1].grad.zero_()
        again, _ = buffer.gather_gradients()
        assert again.data_ptr() == flat.data_ptr()
        assert again.sum() == sum((i + 1) * p.numel() for i, p in enumerate(module) if i != 1)

    def test_accumulation_goes_on_in_place(self) -> None:
        module = parameters(*SHAPES)
        (buffer,) = flatten_parameters(module)
        for _ in range(2):
            sum(p.sum() for p in module).backward()
            flat, _ = buffer.gather_gradients()
        assert all(torch.equal(p.grad, torch.full_like(p, 2)) for p in module)
        assert flat.sum() == 2 * sum(p.numel() for p in module)

    def test_missing_gradients_are_told_from_zeros(self) -> None:
        module = parameters(*SHAPES)
        (buffer,) = flatten_parameters(module)
        sum(p.sum() for p in module).backward()
        buffer.gather_gradients()
        module.zero_grad(set_to_none=True)
        (module[0].sum() + module[3].sum() * 0).backward()
        flat, used = buffer.gather_gradients()
        assert used == [True, False, False, True, False]
        assert flat.sum() == module[0].numel()
        assert module[1].grad is None


def test_nothing_is_left_of_a_backward_that_fails() -> None:
    module = parameters((3,), (2,))
    direct = DirectGradients(flatten_parameters(module)[0])
    with pytest.raises(RuntimeError, match="halfway"), direct.write(accumulate=False):
        module[0].sum().backward()
        raise RuntimeError("halfway")
    with direct.write(accumulate=False):
        (2 * module[0].sum() + module[1].sum()).backward()
    assert direct.view(module[0]).tolist() == [2, 2, 2]
    assert direct.view(module[1]).tolist() == [1, 1]


class TestArrival:
    def test_waits_for_the_last_element_that_is_read(self) -> None:
        module = parameters(*SHAPES)
        (buffer,) = flatten_parameters(module)
        ends: list[int] = []
        around = Pass(DirectGradients(buffer), wait_until=ends.append)
        with around.entered():
            current().wait_for([module[2], module[1]])
            current().wait_for([module[3][:2]])
            current().wait_for([torch.ones(3)])  # no parameter
            around.end_forward()
            current().wait_for(module)
        current().wait_for(module)
        offsets = buffer.offsets
        assert ends == [offsets[2] + 20, offsets[3] + 10, 0, len(buffer.data)]

    def test_nothing_is_left_of_a_forward_that_fails(self) -> None:
        module = parameters(*SHAPES)
        (buffer,) = flatten_parameters(module)
        ends: list[int] = []
        around = Pass(DirectGradients(buffer), wait_until=ends.append)
        with pytest.raises(RuntimeError), around.entered():
            raise RuntimeError
        current().wait_for(module)
        assert ends == []

    def test_logits_wait_for_spare_rows(self) -> None:
        """Models place them first in memory, so there an earlier wait covers them."""
        module = parameters((97, 8), (97,), (1,))
        (buffer,) = flatten_parameters(module, spared=module)
        x = torch.randn(3, 8)
        expected = vocabulary_logits(x, module[0], module[1])
        flat = buffer.data.data
        late = flat.clone()
        flat.fill_(torch.nan)
        direct = DirectGradients(buffer)
        with Pass(direct, wait_until=lambda end: flat[:end].copy_(late[:end])).entered():
            found = vocabulary_logits(x, module[0], module[1])
            assert found.stride(0) == 104
            assert torch.equal(found, expected)
