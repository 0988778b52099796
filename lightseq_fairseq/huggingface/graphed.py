"""Passes of an accelerated module as CUDA graphs, in training together with their backward pass.

The kernels of a small batch take less time than their launches, of which a pass with its backward
has some four hundred.

Shapes: B = sentences, L = longest sentence, C = model width.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.generation.module_graphs import ModuleGraphs
from lightseq_fairseq.huggingface.batch import Batch
from lightseq_fairseq.huggingface.copies import replaced
from lightseq_fairseq.layers.second_derivatives import once_differentiable
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.packing import Segments

#: Computes features [B, L, C] from the collator's tensors, the segments and the rng.
Compute = Callable[[Mapping[str, Tensor], Mapping[str, Segments], Tensor], Tensor]

_ALIGNMENT = 32  # elements, of each gradient


def captures(device: torch.device) -> bool:
    """Whether passes on ``device`` can be graphs now."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class FeatureGraphs(ModuleGraphs):
    """Passes without gradients."""

    def features(self, module: nn.Module, device: torch.device, batch: Batch, key: Hashable,
                 compute: Compute) -> Tensor:  # fmt: skip
        """What ``compute`` returns; the batch's own rng is used.

        key: all else on which the work depends.
        """

        def launch(graphs: Graphs, block: Tensor) -> Tensor:
            features: Tensor = graphs.launch(
                (batch.shapes, key), lambda: compute(*batch.open(block))
            )
            return features.clone()

        return self.run(module, device, batch.size, batch.send, launch)


class GradientGraphs(ModuleGraphs):
    """Differentiable passes: one graph computes features, another one the gradients.

    What a pass keeps for its backward is in memory that the next pass overwrites, and so are the
    results of both graphs: else each shape of batches would keep a gradient of all parameters. So
    there is no pass by graphs as long as the backward of another one may come.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._one_by_one = threading.Lock()
        self._last: Callable[[], Any] = lambda: None  # the last pass, if it still exists
        self._of: Graphs | None = None  # to which what follows belongs
        self._parameters: list[nn.Parameter] = []
        self._searched: set[Hashable] = set()

    def features(
        self, module: nn.Module, device: torch.device, batch: Batch, key: Hashable,
        compute: Compute, given: Mapping[str, Tensor],
    ) -> Tensor | None:  # fmt: skip
        """What ``compute`` returns, differentiable by the module's parameters and ``given``; None
        if another pass waits for its backward.

        key: all else on which the work depends. given: tensors of the batch, by their names.
        """

        def launch(graphs: Graphs, block: Tensor) -> Tensor:
            if self._of is not graphs:
                self._of, self._parameters = graphs, list(module.parameters())
                self._searched.clear()
            trained = [p for p in self._parameters if p.requires_grad]

            def captured() -> _Run:
                # The graph of a pass before it may exist, and have autograd's nodes of the
                # parameters. They belong to another stream, which a capture must not touch.
                leaves = {id(p): p.detach().requires_grad_() for p in trained}
                tensors, sides, rng = batch.open(block)
                inputs = {name: tensors[name].detach().requires_grad_() for name in given}
                with replaced(module, leaves):
                    result = compute({**tensors, **inputs}, sides, rng)
                return _Run(result, [*leaves.values(), *inputs.values()])

            frozen = tuple(p.requires_grad for p in self._parameters)
            shapes = batch.shapes, key, frozen, tuple(given)
            sizes = {(part.name, part.shape, key) for part in batch.parts}
            with torch.enable_grad():
                # A batch with a new number of rows runs eagerly, since cuBLASLt then times
                # algorithms. The next pass writes the block.
                if not sizes <= self._searched:
                    tensors, sides, rng = batch.open(block.clone())
                    eager = compute({**tensors, **given}, sides, rng)
                    self._searched |= sizes
                    return eager
                run: _Run = graphs.launch(("forward", shapes), captured, is_prepared=True)
                copy = run.features.detach().clone()
                replayed: Tensor = _Replayed.apply(
                    self, graphs, run, copy, *trained, *given.values()
                )
            return replayed

        with self._one_by_one:
            if self._waits():
                return None
            return self.run(module, device, batch.size, batch.send, launch)

    def _waits(self) -> bool:
        """Whether the backward of the last pass may come."""
        last = self._last()
        if last is None:
            return False
        try:
            last.saved_tensors  # noqa: B018
        except RuntimeError:  # backward has freed them, or it will raise this error
            return False
        return True

    def gradients(self, graphs: Graphs, run: _Run, dfeatures: Tensor, keeps: bool) -> list[Any]:
        """By the leaves of the pass ``run``; new tensors.

        keeps: backward may be called again.
        """

        def back() -> Sequence[Tensor | None]:
            found = torch.autograd.grad(
                run.features, run.leaves, run.dfeatures, retain_graph=keeps, allow_unused=True
            )
            is_captured = dfeatures.is_cuda and torch.cuda.is_current_stream_capturing()
            if keeps or not is_captured:
                return found
            run.features, run.dfeatures = _lent(run.features.detach()), _lent(run.dfeatures)
            return [None if x is None else _lent(x) for x in found]

        with self._alone(dfeatures.device):
            if graphs is not self._graphs:
                raise RuntimeError(
                    "lightseq: the model was moved, or called by another thread, between a pass "
                    "and its backward"
                )
            run.dfeatures.copy_(dfeatures)
            return _copied(graphs.launch(("backward", run.number), back, is_prepared=True))


class _Run:
    """A pass that was computed or captured; its tensors are those of the graphs.

    Attributes:
        features: the result.
        dfeatures: its gradient, which the backward pass reads.
        leaves: what backward differentiates by: they have the memory of parameters and inputs.
        number: no other pass has it.
    """

    _numbers = itertools.count()

    def __init__(self, features: Tensor, leaves: Sequence[Tensor]) -> None:
        self.features, self.leaves = features, leaves
        self.dfeatures = torch.empty_like(features)
        self.number = next(self._numbers)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: GradientGraphs, graphs: Graphs, run: _Run, features: Tensor,
                *trained: Tensor) -> Tensor:  # fmt: skip
        ctx.owner, ctx.graphs, ctx.run = owner, graphs, run
        ctx.save_for_backward(*trained)  # torch then raises its errors if one changes
        owner._last = weakref.ref(ctx)
        return features

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dfeatures: Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, None, None, *ctx.owner.gradients(ctx.graphs, ctx.run, dfeatures, keeps)


def _lent(x: Tensor) -> Tensor:
    """The memory of x, which other graphs of the pool may use once nobody refers to x.

    Whoever reads it does so before another graph runs.
    """
    if x.numel() == 0 or not x.is_contiguous():
        return x
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype).view(x.shape)


class _Memory:
    """Bytes on a GPU that belong to nobody, as ``torch.as_tensor`` reads them."""

    def __init__(self, x: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (x.nbytes,), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 2
        }  # fmt: skip


def _copied(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies, which lie side by side: one kernel copies many tensors."""
    given = [x for x in gradients if x is not None]
    if not given:
        return list(gradients)
    sizes = [-(-x.numel() // _ALIGNMENT) * _ALIGNMENT for x in given]
    parts = given[0].new_empty(sum(sizes)).split(sizes)
    views = [part[: x.numel()].view(x.shape) for part, x in zip(parts, given, strict=True)]
    torch._foreach_copy_(views, given)
    left = iter(views)
    del views, parts  # autograd copies a gradient to which others refer
    return [None if x is None else next(left) for x in gradients]
