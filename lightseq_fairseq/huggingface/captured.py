"""Forward and backward of a Hugging Face model as CUDA graphs, one for each shape of batches.

The graph has the Trainer's own ``training_step``: the model's heads and loss are Hugging Face's,
its encoder ours, and so are a head over a vocabulary and its loss. Gradients are written into one
flat gradient, which `LightseqAdamW` reads. In bfloat16, layers and heads read 16-bit copies of the
parameters, which the update also writes.

Shapes: N = elements of the parameter buffer, including alignment gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface.accelerated import Accelerated
from lightseq_fairseq.huggingface.adamw import LightseqAdamW
from lightseq_fairseq.huggingface.batch import Batch
from lightseq_fairseq.huggingface.calls import GIVEN, GivenPass
from lightseq_fairseq.huggingface.copies import replaced
from lightseq_fairseq.huggingface.head_and_loss import HeadAndLoss, heads
from lightseq_fairseq.memory.fp8 import OFF, Fp8State, NoFp8, why_no_fp8
from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.parameters import (
    FlatBuffer,
    flatten_parameters,
    give_own_storages,
    keep_spare_rows,
)
from lightseq_fairseq.memory.passes import Pass


class CapturedStep:
    """Computes gradients of one model on one device.

    Args:
        model: accelerated.
        optimizer: of all parameters that are trained.
        dtype: of the copies that the layers read; None: they read the parameters' memory.
        fp8: the layers' products are computed in fp8.

    Raises:
        UserError: fp8 cannot be used.
    """

    def __init__(
        self, model: nn.Module, optimizer: LightseqAdamW, dtype: torch.dtype | None,
        fp8: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self._dtype = model, optimizer, dtype
        self._has_fp8 = fp8
        self._fp8: NoFp8 = OFF
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = self._parameters[0].device
        self._graphs = Graphs(self.device, "training steps")
        self._block = torch.zeros(0, dtype=torch.uint8, device=self.device)
        self._items = torch.zeros((), dtype=torch.float64, device=self.device)
        self._searched: set[tuple[str, tuple[int, ...]]] = set()
        self._lay_out()

    def _lay_out(self) -> None:
        """Place the parameters in one buffer, those of a group of the optimizer side by side."""
        encoders = [m for m in self.model.modules() if isinstance(m, Accelerated)]
        groups = [group for m in encoders for group in m._lightseq.family.groups(m)]
        found = heads(self.model)
        self._head_weights = [head.weight for head in found]
        biases = [head.bias for head in found if head.bias is not None]
        spared = [*self._head_weights, *biases]
        buffers = flatten_parameters(self.model, groups, spared, first=self._parameters)
        trained = [buffer for buffer in buffers if buffer.parameters[0].requires_grad]
        assert len(trained) == 1  # of one dtype and device
        self._whole = trained[0]
        self._all = [p for buffer in buffers for p in buffer.parameters]
        self._read: dict[int, Tensor] = {}
        # What layers and heads read: leaves in one storage, by which neighbours are known.
        self._copied: list[tuple[Tensor, Tensor]] = []
        for buffer in buffers:
            flat = buffer.data
            if self._dtype is not None:
                flat = flat.to(self._dtype)
                self._copied.append((flat, buffer.data))
            leaves = [view.detach() for view in buffer.views(flat)]
            if buffer is self._whole:
                leaves = [leaf.requires_grad_() for leaf in leaves]
                self._low = FlatBuffer(leaves)
            for parameter, leaf in zip(buffer.parameters, leaves, strict=True):
                self._read[id(parameter)] = leaf
                keep_spare_rows(parameter, leaf)
        self.optimizer.lay_out()
        for buffer in buffers:
            give_own_storages(buffer)
        self._gradients = DirectGradients(self._low)
        if self._has_fp8:
            self._fp8 = Fp8State(self._products(encoders), self._low, self._fp8.state())
        self._casts_weights = False  # before the next update
        self._versions = self._version()
        self._knows_unused = False

    def _products(self, encoders: list[Any]) -> _Products:
        if self._low.data.dtype != torch.bfloat16:
            raise UserError(
                "fp8 needs bfloat16: set bf16=True in TrainingArguments, or load the model in it."
            )
        if reason := why_no_fp8(self.device):
            raise UserError(f"fp8 {reason}: call lightseq.accelerate without fp8.")
        named = self.model.named_parameters()
        with replaced(self.model, self._read):
            weights = [each for m in encoders for each in m._lightseq.family.products(m)]
        return _Products([(name, self._read[id(p)]) for name, p in named], weights)

    def _version(self) -> int:
        """Changes if others than the optimizer write a parameter."""
        return sum(p._version for p in self._all)

    def gradient(
        self, batch: Batch | None, first: bool, key: Hashable, items: float | None,
        function: Callable[[Any, Any], Tensor], inputs: Any = None,
    ) -> Tensor:  # fmt: skip
        """Add the gradient of a micro-batch, without waiting for the device; returns its loss [].

        The next call may overwrite the loss.

        Args:
            batch: None: the host could not pack it; then ``inputs`` are the function's, and no
                graph is captured.
            first: of the update; it overwrites the gradient.
            key: all else on which the work depends.
            items: a number that the function gets as a tensor [], or None.
            function: takes the collator's tensors and ``items``, calls backward, returns the loss.
        """
        given_items = None if items is None else self._items.fill_(items)

        def compute() -> Tensor:
            if batch is None:
                return self._compute(GivenPass(None, None), first, function, inputs, given_items)
            return self._launch(batch, first, key, given_items, function)

        if first:
            self._prepare()
        while self._fp8.passes_due:
            compute()
            self._share_amaxes()
            self._fp8.after_pass()
        loss = compute()
        if first and not self._knows_unused:
            self._leave_out_unused()
        return loss

    def _launch(
        self, batch: Batch, first: bool, key: Hashable, items: Tensor | None,
        function: Callable[[Any, Any], Tensor],
    ) -> Tensor:  # fmt: skip
        block = self._sent(batch)

        def run() -> Tensor:
            tensors, segments, rng = batch.open(block)
            given = GivenPass(segments, rng, batch.of_head, tensors.pop("/picked", None))
            return self._compute(given, first, function, tensors, items)

        shapes = (batch.shapes, first, key, items is None)
        # A batch with a new number of rows runs eagerly, since cuBLASLt then times algorithms.
        sizes = {(part.name, part.shape) for part in batch.parts}
        is_prepared = sizes <= self._searched
        loss: Tensor = self._graphs.launch(shapes, run, is_prepared)
        self._searched |= sizes
        return loss

    def _prepare(self) -> None:
        if not self._whole.intact():
            self._graphs.clear()
            self._lay_out()
        elif self._versions != self._version():
            for copy, whole in self._copied:
                copy.copy_(whole)
            self._versions = self._version()
            self._casts_weights = True
        if self._casts_weights:
            self._fp8.cast_weights()
            self._casts_weights = False

    def _sent(self, batch: Batch) -> Tensor:
        """The block on the device, at the address that graphs read."""
        size = batch.size
        if size > len(self._block):
            self._graphs.clear()  # they read the old address
            self._block = torch.zeros(2 * size, dtype=torch.uint8, device=self.device)
        block = self._block[:size]
        batch.send(block)
        return block

    def _compute(
        self, given: GivenPass, first: bool, function: Callable[[Any, Any], Tensor], inputs: Any,
        items: Tensor | None,
    ) -> Tensor:  # fmt: skip
        token = GIVEN.set(given)
        try:
            with (
                replaced(self.model, self._read),
                HeadAndLoss([self._read[id(weight)] for weight in self._head_weights]),
                Pass(self._gradients, self._fp8).entered(),
                self._gradients.write(accumulate=not first),
            ):
                return function(inputs, items).detach()
        finally:
            GIVEN.reset(token)

    def _leave_out_unused(self) -> None:
        """As in torch, parameters without a gradient are not updated."""
        unused = {id(leaf) for leaf in self._gradients.unwritten()}
        pairs = zip(self._whole.parameters, self._low.parameters, strict=True)
        self.optimizer.leave_out([p for p, leaf in pairs if id(leaf) in unused])
        self._knows_unused = True

    def clip(self, max_norm: float) -> Tensor:
        """The norm of the update's gradient, []; the update clips it, unless ``max_norm`` is 0.

        Of several processes the gradient is the mean, as in DistributedDataParallel.
        """
        if _ranks() > 1:
            distributed.all_reduce(self._gradients.flat.div_(_ranks()))
        self.optimizer.give(
            self._whole, self._gradients.flat, self._low.data if self._dtype else None
        )
        norm = self.optimizer.clip_given(max_norm)
        if self._fp8.is_on:
            self._share_amaxes()
            self._fp8.update((~norm.isfinite()).double())
            self._casts_weights = True
        return norm

    def _share_amaxes(self) -> None:
        if _ranks() > 1:
            distributed.all_reduce(self._fp8.amax, distributed.ReduceOp.MAX)


class _Products:
    """What `Fp8State` asks a model."""

    def __init__(self, named: list[tuple[str, Tensor]], weights: list[list[Tensor]]) -> None:
        self._named, self._weights = named, weights

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        return self._named

    def products(self) -> list[list[Tensor]]:
        return self._weights


def _ranks() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1
