"""One contiguous buffer under many parameters.

A model owns ordinary parameters with ordinary names and shapes. Their storage is what is special:
``flatten_parameters`` lays them end to end in one tensor, so that the projections of a fused GEMM
are one matrix (``as_one``) and the optimizer updates everything with one kernel (``FlatBuffer``).
Nothing keeps a handle on that tensor but the parameters themselves: whoever copies, pickles or
converts a module gets parameters that are valid on their own, merely no longer neighbours.

Letters: N elements of a buffer, alignment gaps included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops

# Every tensor begins on such a boundary (bytes): vectorised kernels, TMA and cublasLt's best
# algorithms want 16 to 128, and 256 is what CUDA's own allocator promises.
ALIGNMENT = 256
# Elements that alignment may leave between two neighbours: those of the narrowest type, since
# float32 copies keep the places of 16-bit parameters.
_MOST_GAP = ALIGNMENT // 2


def as_one(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """The tensors joined along ``dim``: a view where they are neighbours in memory, else a copy.

    Args:
        tensors: at least one; same dtype and same shape apart from ``dim``.
        dim: the dimension along which they are joined.

    Returns:
        A detached tensor. It shares memory with ``tensors`` when all have the same strides and
        each begins where the one before ends; it is ``torch.cat`` of them otherwise.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.detach()
    dim %= first.dim()
    shape, strides, dtype = first.shape, first.stride(), first.dtype
    storage = first.untyped_storage()._cdata
    end = first.storage_offset() + shape[dim] * strides[dim]
    length = shape[dim]
    for tensor in tensors[1:]:
        if (
            tensor.storage_offset() != end
            or tensor.stride() != strides
            or tensor.dtype != dtype
            # Two allocations may happen to touch: only one storage can be viewed as one.
            or tensor.untyped_storage()._cdata != storage
            or tensor.shape[:dim] != shape[:dim]
            or tensor.shape[dim + 1 :] != shape[dim + 1 :]
        ):
            return torch.cat([t.detach() for t in tensors], dim)
        end += tensor.shape[dim] * strides[dim]
        length += tensor.shape[dim]
    return first.detach().as_strided((*shape[:dim], length, *shape[dim + 1 :]), strides)


class FlatBuffer:
    """Parameters that lie end to end in one tensor, with room for as flat a gradient.

    Attributes:
        parameters: in the order in which they lie.
        offsets: first element of each in ``data``.
        data: [N], detached, shares memory with the parameters. The few elements that alignment
            leaves between two parameters are zero and stay zero under elementwise updates that
            map zero with a zero gradient to zero.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """``parameters`` are contiguous, of one storage and dtype, in memory order."""
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
        """Whether every parameter still lies where it lay (``.to()`` moves them, for one)."""
        return [p.data_ptr() for p in self.parameters] == self._addresses

    def lend(self) -> Tensor:
        """The memory [N] for another use, until `take_back`.

        Meanwhile ``data`` and the parameters are empty tensors: who reads one, to save it for one,
        gets an error, and no numbers that mean something else.
        """
        memory = self.data
        self.data = memory.new_empty(0)
        for parameter in self.parameters:
            parameter.data = self.data
        self._addresses = [0] * len(self.parameters)
        return memory

    def take_back(self, memory: Tensor) -> None:
        """The end of `lend`: parameters are where and what they were, by what is in ``memory``."""
        self.data = memory
        for parameter, view in zip(self.parameters, self.views(memory), strict=True):
            parameter.data = view
        self._addresses = [p.data_ptr() for p in self.parameters]

    def zeros(self, dtype: torch.dtype | None = None) -> Tensor:
        """A new zero tensor [N] on the same device; of the parameters' dtype by default."""
        return torch.zeros_like(self.data, dtype=dtype)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` [N] in the places and shapes of the parameters."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for shape, offset in zip(self._shapes, self.offsets, strict=True)
        ]

    def gather_gradients(self) -> tuple[Tensor, list[bool]]:
        """Bring ``.grad`` of all parameters into one tensor and leave views of it in ``.grad``.

        Gradients that are such views already (of an earlier call, or written in place since)
        cost nothing. Set ``.grad`` to None to clear them: autograd then hands its gradients over
        instead of adding them to zeros, which moves fewer bytes than a memset and the additions,
        and a parameter that takes no part in the loss is told from one whose gradient is zero.

        Returns:
            The gradient [N], of the parameters' dtype, zero in the gaps and where a parameter has
            none; and for each parameter whether it has one.
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


class DirectGradients:
    """A flat gradient that backward writes itself, so that autograd copies and adds nothing.

    The first write to a parameter in a backward pass overwrites, later ones (a tied embedding has
    three) add. Parameters whose gradients come by another way than `gradients_for` get them in
    ``.grad`` as ever; `write` takes those along at the end.

    Attributes:
        flat: [N], the gradient, in the places and of the dtype of the parameters.
    """

    def __init__(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        self.flat = buffer.zeros()
        self._start = buffer.data.data_ptr()
        self._bytes = buffer.data.numel() * buffer.data.element_size()
        self._added: set[int] | None = None  # addresses of what has been written; None: all has

    @contextmanager
    def write(self, accumulate: bool) -> Iterator[None]:
        """Within it backward writes into ``flat``; with ``accumulate`` it adds to what is there."""
        global _direct
        self._added = None if accumulate else set()
        _direct = self
        ops.defer_column_sums(self.flat)
        try:
            yield
        except BaseException:
            ops.flush_column_sums(self.flat, wanted=False)
            for parameter in self.buffer.parameters:
                parameter.grad = None  # of a backward that has not come to its end
            raise
        finally:
            _direct = None
        ops.flush_column_sums(self.flat, wanted=True)
        for parameter in self.buffer.parameters:
            if parameter.grad is not None:
                view = self.view(parameter)
                view.add_(parameter.grad) if self.is_added(parameter) else view.copy_(
                    parameter.grad
                )
                parameter.grad = None

    def holds(self, parameter: Tensor) -> bool:
        return 0 <= parameter.data_ptr() - self._start < self._bytes

    def view(self, parameter: Tensor) -> Tensor:
        """The gradient of a parameter, or of the neighbours that ``as_one`` has joined."""
        offset = (parameter.data_ptr() - self._start) // parameter.element_size()
        return self.flat.as_strided(parameter.shape, parameter.stride(), offset)

    def is_added(self, parameter: Tensor) -> bool:
        """Whether the next write has to add; from now on it has."""
        if self._added is None or parameter.data_ptr() in self._added:
            return True
        self._added.add(parameter.data_ptr())
        return False


_direct: DirectGradients | None = None


class Gradients(NamedTuple):
    """Where an op writes the gradients of some parameters.

    Attributes:
        tensors: one for each parameter, of its shape and dtype.
        accumulate: the op adds to them.
        direct: they are in place; autograd gets none.
    """

    tensors: list[Tensor]
    accumulate: bool
    direct: bool

    def handed(self, *pieces: Tensor) -> tuple[Tensor | None, ...]:
        """What backward returns to autograd: ``pieces``, by default ``tensors``, or Nones."""
        pieces = pieces or tuple(self.tensors)
        return (None,) * len(pieces) if self.direct else pieces


def gradients_for(*parameters: Tensor) -> Gradients:
    """Where one op shall write the gradients of ``parameters`` (or of what ``as_one`` joined).

    Inside `DirectGradients.write` that is the flat gradient, elsewhere new tensors for autograd.
    """
    direct = _direct
    if direct is None or not all(direct.holds(p) for p in parameters):
        return Gradients([torch.empty_like(p) for p in parameters], False, False)
    views = [direct.view(p) for p in parameters]
    added = [direct.is_added(p) for p in parameters]
    if any(added):
        for view, is_added in zip(views, added, strict=True):
            if not is_added:
                view.zero_()
    return Gradients(views, any(added), True)


def flatten_parameters(
    module: nn.Module, groups: Iterable[Sequence[Tensor]] = ()
) -> list[FlatBuffer]:
    """Lay the parameters of ``module`` end to end, one buffer for each dtype and device.

    Names, shapes, values, ``requires_grad`` and ties stay as they are; only the storage changes,
    and not even that where the layout is right already. Call it at the end of ``__init__`` and
    again after ``Module._apply`` (``.half()``, ``.cuda()``, ...), which gives every parameter a
    storage of its own.

    Args:
        module: parameters lie in the order of ``module.parameters()``.
        groups: parameters which follow one another without a gap, in the given order, so that
            ``as_one`` is a view; each group stands where its first member in
            ``module.parameters()`` does. Parameters of a group share dtype and device.

    Returns:
        The buffers, for those who want to look; the parameters alone keep them alive.
    """
    group_of = {id(p): list(group) for group in groups for p in group}
    blocks: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = defaultdict(list)
    placed: set[int] = set()
    for parameter in module.parameters():
        if id(parameter) not in placed:
            block = group_of.get(id(parameter), [parameter])
            placed.update(id(p) for p in block)
            blocks[parameter.dtype, parameter.device].append(block)
    return [_lay_out(of_one_kind) for of_one_kind in blocks.values()]


def flat_buffers(parameters: Iterable[Tensor]) -> list[FlatBuffer]:
    """The fewest buffers that hold exactly these parameters, for an optimizer.

    Parameters that share a storage stay where they are: neighbours form one buffer, and one that
    is missing between them (frozen, say) separates two. All others are moved into one buffer for
    each dtype and device.
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


def _aligned(elements: int, itemsize: int) -> int:
    step = max(ALIGNMENT // itemsize, 1)
    return -(-elements // step) * step


def _lay_out(blocks: Sequence[Sequence[Tensor]]) -> FlatBuffer:
    """Put blocks of gapless parameters at aligned places of one new tensor, if they are not."""
    parameters = [p for block in blocks for p in block]
    itemsize = parameters[0].element_size()
    offsets: list[int] = []
    end = 0
    for block in blocks:
        end = _aligned(end, itemsize)
        for parameter in block:
            offsets.append(end)
            end += parameter.numel()
    start = parameters[0].storage_offset()
    storage = parameters[0].untyped_storage()._cdata
    if not all(
        p.untyped_storage()._cdata == storage
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
    return FlatBuffer(parameters)


def _runs(members: list[Tensor]) -> list[FlatBuffer]:
    """Cut parameters of one storage into runs of neighbours, alignment gaps allowed."""
    members = sorted(members, key=lambda p: p.storage_offset())
    ends = [p.storage_offset() + p.numel() for p in members]
    start = members[0].storage_offset()
    whole = members[0].detach().as_strided((max(ends) - start,), (1,))
    runs = [[members[0]]]
    for parameter, end in zip(members[1:], ends[:-1], strict=True):
        gap = whole[end - start : parameter.storage_offset() - start]
        # A tensor that is not ours could hide in a gap; only zeros come to no harm there.
        if parameter.storage_offset() < end or gap.numel() >= _MOST_GAP or bool(gap.any()):
            runs.append([])
        runs[-1].append(parameter)
    return [FlatBuffer(run) for run in runs]
