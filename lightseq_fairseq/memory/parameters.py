"""Store many parameters in one contiguous buffer.

A model owns ordinary parameters with ordinary names and shapes. Only their storage is special:
``flatten_parameters`` places them one after another in one tensor. So the projections of a fused
GEMM are one matrix (``as_one``), and the optimizer updates everything with one kernel
(``FlatBuffer``). The parameters themselves keep the memory of that tensor alive. Parameters of a
module that was copied, pickled or converted are valid, but no longer adjacent in memory.

Shapes: N = elements of a buffer, including alignment gaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# Alignment of every tensor in bytes. Vectorised kernels, TMA and the best cuBLASLt algorithms need
# 16 to 128; CUDA's own allocator guarantees 256.
ALIGNMENT = 256
# Exclusive upper bound of an alignment gap, in elements. It is computed for 16-bit parameters,
# since their float32 copies have the same offsets.
_MOST_GAP = ALIGNMENT // 2
# Parameters with spare rows -> their address when the rows were reserved.
_spared_at: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
# GEMMs copy operands whose row length is no multiple of this (16 bits, csrc/linear/linear.cu).
_ROWS = 8


def as_one(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension: a view if they are neighbours in memory,
    else a copy.

    Args:
        tensors: at least one; same dtype and same shape apart from the first dimension.

    Returns:
        A detached tensor. It shares memory with ``tensors`` if all have the same strides and each
        begins where the previous one ends. Otherwise it is their ``torch.cat``.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.detach()
    if not are_neighbours(tensors):
        return torch.cat([t.detach() for t in tensors])
    rows = sum(len(tensor) for tensor in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def are_neighbours(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins where the previous one ends, in rows of the same layout."""
    first = tensors[0]
    end, storage = first.storage_offset(), first.untyped_storage()._cdata
    for tensor in tensors:
        if (
            tensor.storage_offset() != end
            or tensor.stride() != first.stride()
            or tensor.dtype != first.dtype
            # Two allocations may be adjacent by chance, but a view needs a single storage.
            or tensor.untyped_storage()._cdata != storage
            or tensor.shape[1:] != first.shape[1:]
        ):
            return False
        end += len(tensor) * first.stride(0)
    return True


class FlatBuffer:
    """Parameters that are contiguous in one tensor, and a flat gradient of the same layout.

    Attributes:
        parameters: in memory order.
        offsets: index of the first element of each parameter in ``data``.
        data: [N], detached, shares memory with the parameters. The alignment gaps between
            parameters are zero. They stay zero under elementwise updates that map a zero parameter
            with zero gradient to zero.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """``parameters``: contiguous, of one storage and one dtype, in memory order."""
        first, last = parameters[0], parameters[-1]
        start = first.storage_offset()
        self.parameters = list(parameters)
        self.offsets = [p.storage_offset() - start for p in parameters]
        size = self.offsets[-1] + last.numel()
        self.data = first.detach().as_strided((size,), (1,))
        self._shapes = [p.shape for p in parameters]
        self._addresses = [p.data_ptr() for p in parameters]
        self._gradient: Tensor | None = None
        self._gradient_views: list[Tensor] = []

    def intact(self) -> bool:
        """Whether every parameter is still at its address (``.to()`` moves them, for example)."""
        return [p.data_ptr() for p in self.parameters] == self._addresses

    def lend(self) -> Tensor:
        """Return the memory [N] for another use, until `take_back`.

        Meanwhile ``data`` and the parameters are empty tensors. So code that reads one, for example
        to save it, gets an error instead of wrong numbers.
        """
        memory = self.data
        self.data = memory.new_empty(0)
        for parameter in self.parameters:
            parameter.data = self.data
        self._addresses = [0] * len(self.parameters)
        return memory

    def take_back(self, memory: Tensor) -> None:
        """Undo `lend`: the parameters are views of ``memory`` again and take its values."""
        self.data = memory
        for parameter, view in zip(self.parameters, self.views(memory), strict=True):
            parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new zero tensor [N] on the same device; default dtype: that of the parameters."""
        return torch.zeros_like(self.data, dtype=dtype)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` [N] with the offsets and shapes of the parameters."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for shape, offset in zip(self._shapes, self.offsets, strict=True)
        ]

    def gather_gradients(self) -> tuple[Tensor, list[bool]]:
        """Copy ``.grad`` of all parameters into one tensor, and set ``.grad`` to views of it.

        Gradients that are such views already (from an earlier call) are not copied. To clear
        gradients, set ``.grad`` to None: autograd then assigns its gradients instead of adding them
        to zeros. This moves fewer bytes than a memset and the additions, and it distinguishes an
        unused parameter from one with a zero gradient.

        Returns:
            The gradient [N] in the parameters' dtype, zero in the gaps and for parameters without a
            gradient; and for each parameter whether it has a gradient.
        """
        gradients = [p.grad for p in self.parameters]
        if len(gradients) == 1 and gradients[0] is not None and gradients[0].is_contiguous():
            return gradients[0].detach().view(-1), [True]
        if self._gradient is None:
            self._gradient = self.zeros()
            self._gradient_views = self.views(self._gradient)
        views = self._gradient_views
        found = [
            (v, g) for v, g in zip(views, gradients, strict=True) if g is not None and g is not v
        ]
        if found:
            torch._foreach_copy_([v for v, _ in found], [g.detach() for _, g in found])
        used = [g is not None for g in gradients]
        if not all(used):
            torch._foreach_zero_([v for v, g in zip(views, gradients, strict=True) if g is None])
        for parameter, view, gradient in zip(self.parameters, views, gradients, strict=True):
            if gradient is not None and gradient is not view:
                parameter.grad = view
        return self._gradient, used


def with_spare_rows(parameter: Tensor) -> Tensor | None:
    """A vector or matrix with the zero rows after it that `flatten_parameters` has reserved.

    Its number of rows is then a multiple of 8. Detached, shares memory with ``parameter``; None if
    nothing is reserved, or if the parameter has been moved since.
    """
    if _spared_at.get(parameter) != parameter.data_ptr():
        return None
    rows = _rounded(parameter.shape[0])
    return parameter.detach().as_strided((rows, *parameter.shape[1:]), parameter.stride())


def keep_spare_rows(parameter: Tensor, copy: Tensor) -> None:
    """Let `with_spare_rows` know that ``copy``, in a buffer of the same layout, has them, too."""
    if with_spare_rows(parameter) is not None:
        _spared_at[copy] = copy.data_ptr()


def read_as_one(parameters: Sequence[Tensor], spared: bool) -> Tensor:
    """`as_one`; or with ``spared`` a single parameter with its spare rows, which it must have."""
    if not spared:
        return as_one(parameters)
    whole = with_spare_rows(*parameters)
    assert whole is not None
    return whole


def flatten_parameters(
    module: nn.Module, groups: Iterable[Sequence[Tensor]] = (), spared: Iterable[Tensor] = (),
    first: Iterable[Tensor] = (),
) -> list[FlatBuffer]:  # fmt: skip
    """Place the parameters of ``module`` one after another, in one buffer per dtype and device.

    Frozen parameters (``requires_grad`` is False) get a buffer of their own, so that gradients and
    the optimizer's state have no room for them. A group of which only a part is frozen is not kept
    together: then `as_one` copies it.

    Names, shapes, values, ``requires_grad`` and ties do not change. Only the storage changes, and
    only if the layout is not right already. Call this at the end of ``__init__``, and again after
    ``Module._apply`` (``.half()``, ``.cuda()``, ...), which gives every parameter its own storage,
    and after parameters have been frozen.

    Args:
        module: its parameters are placed in the order of ``module.parameters()``, but see spared
            and first.
        groups: each group's parameters are placed without gaps, in the given order, so that
            ``as_one`` is a view. A group is placed where its first member occurs in
            ``module.parameters()``. Parameters of a group share dtype and device.
        spared: parameters without a group, after which zero rows are reserved if their number of
            rows is no multiple of 8 (`with_spare_rows`). The last parameter of a buffer gets none,
            unless it is frozen. So those that are not in ``first`` are placed first.
        first: parameters that are placed before all others, in this order.

    Returns:
        The buffers. The caller need not keep them: the parameters keep their storage alive.
    """
    whole = (list(group) for group in groups if len({p.requires_grad for p in group}) == 1)
    group_of = {id(p): group for group in whole for p in group}
    blocks: dict[tuple[torch.dtype, torch.device, bool], list[list[Tensor]]] = defaultdict(list)
    placed: set[int] = set()
    given = list(first)
    for parameter in (*given, *module.parameters()):
        if id(parameter) not in placed:
            block = group_of.get(id(parameter), [parameter])
            placed.update(id(p) for p in block)
            kind = parameter.dtype, parameter.device, parameter.requires_grad
            blocks[kind].append(block)
    spare = {id(p): _spare(p) for p in spared if _spare(p) > 0}
    placed_first = {id(p) for p in given}
    for of_one_kind in blocks.values():
        of_one_kind.sort(
            key=lambda block: 0 if id(block[0]) in placed_first else 1 + (id(block[0]) not in spare)
        )
    return [_lay_out(of_one_kind, spare) for of_one_kind in blocks.values()]


def flat_buffers(parameters: Iterable[Tensor]) -> list[FlatBuffer]:
    """The fewest buffers that hold exactly these parameters, for an optimizer.

    Parameters that share a storage are not moved: neighbours form one buffer. If a parameter
    between them is missing (a frozen one, for example), they form two buffers. All other parameters
    are moved into one buffer per dtype and device.
    """
    shared: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
    for parameter in {id(p): p for p in parameters}.values():
        shared[parameter.untyped_storage()._cdata, parameter.dtype].append(parameter)
    loose: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    buffers: list[FlatBuffer] = []
    for members in shared.values():
        if len(members) > 1 and all(p.is_contiguous() for p in members):
            buffers += _runs(members)
        else:
            loose[members[0].dtype, members[0].device] += members
    for members in loose.values():
        if len(members) == 1 and members[0].is_contiguous():
            buffers.append(FlatBuffer(members))
        else:
            buffers.append(_lay_out([[p] for p in members]))
    return buffers


def give_own_storages(buffer: FlatBuffer) -> None:
    """Give each parameter a storage of its own, within the memory of ``buffer.data``.

    Some writers of files take parameters that share a storage for tied ones. Afterwards `as_one`
    does not see that parameters are neighbours.
    """
    whole, start = buffer.data.untyped_storage(), buffer.data.storage_offset()
    for parameter, offset in zip(buffer.parameters, buffer.offsets, strict=True):
        first = (start + offset) * parameter.element_size()
        part = whole[first : first + parameter.numel() * parameter.element_size()]
        own = parameter.detach().new_empty(0)
        parameter.data = own.set_(part, 0, parameter.shape, parameter.stride())


def _aligned(elements: int, itemsize: int) -> int:
    step = max(ALIGNMENT // itemsize, 1)
    return -(-elements // step) * step


def _rounded(rows: int) -> int:
    return -(-rows // _ROWS) * _ROWS


def _spare(parameter: Tensor) -> int:
    """Elements of the zero rows after a parameter that round up its number of rows."""
    rows = parameter.shape[0] if parameter.dim() else 0
    return (_rounded(rows) - rows) * (parameter.numel() // max(rows, 1))


def _lay_out(
    blocks: Sequence[Sequence[Tensor]], spare: Mapping[int, int] = MappingProxyType({})
) -> FlatBuffer:
    """Place blocks at aligned offsets of one new tensor, unless they are placed so already.

    The parameters of a block have no gaps between them.

    spare: ``id(parameter)`` -> elements to reserve after it.
    """
    parameters = [p for block in blocks for p in block]
    itemsize = parameters[0].element_size()
    # A gradient ends with the last parameter, so zero rows after it would have none.
    with_spare = parameters[: len(parameters) - parameters[0].requires_grad]
    spare = {id(p): spare[id(p)] for p in with_spare if id(p) in spare}
    offsets: list[int] = []
    end = 0
    for block in blocks:
        end = _aligned(end, itemsize)
        for parameter in block:
            offsets.append(end)
            end += parameter.numel() + spare.get(id(parameter), 0)
    start = parameters[0].storage_offset()
    storage = parameters[0].untyped_storage()
    if storage.nbytes() < (start + end) * itemsize or not all(
        p.untyped_storage()._cdata == storage._cdata
        and p.storage_offset() == start + offset
        and p.is_contiguous()
        for p, offset in zip(parameters, offsets, strict=True)
    ):
        slack = _aligned(1, itemsize)  # CPU allocations are aligned to 64 bytes only
        flat = torch.zeros(end + slack, dtype=parameters[0].dtype, device=parameters[0].device)
        flat = flat[-flat.data_ptr() % ALIGNMENT // itemsize :]
        views = [
            flat[o : o + p.numel()].view(p.shape) for p, o in zip(parameters, offsets, strict=True)
        ]
        torch._foreach_copy_(views, [p.detach() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.data = view
    for parameter in parameters:
        if id(parameter) in spare:
            _spared_at[parameter] = parameter.data_ptr()
    return FlatBuffer(parameters)


def _runs(members: list[Tensor]) -> list[FlatBuffer]:
    """Split parameters of one storage into runs of neighbours; alignment gaps are allowed."""
    members = sorted(members, key=lambda p: p.storage_offset())
    ends = [p.storage_offset() + p.numel() for p in members]
    start = members[0].storage_offset()
    whole = members[0].detach().as_strided((max(ends) - start,), (1,))
    runs = [[members[0]]]
    for previous, parameter, end in zip(members, members[1:], ends, strict=False):
        gap = whole[end - start : parameter.storage_offset() - start]
        # A gap could hold a foreign tensor. Elementwise updates leave a gap unchanged only if it is
        # all zeros.
        most = _MOST_GAP + _spare(previous)
        if parameter.storage_offset() < end or gap.numel() >= most or bool(gap.any()):
            runs.append([])
        runs[-1].append(parameter)
    return [FlatBuffer(run) for run in runs]
