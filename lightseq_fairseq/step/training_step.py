"""One training step as CUDA graphs (forward, backward, update), without waiting for the host.

The host prefetches a packed batch on a separate stream and launches two graphs: forward and
backward, one graph per bucket of shapes, and then the update. With several ranks, gradients are
all-reduced while the first graph still runs (`step.exchange`). Everything that depends on a
result (loss scale, clipping, skipped updates, learning rate, dropout counter) is decided on the
device by `ops.update_scalars`. The values to log are copied back while later steps already run.

On a CPU, and wherever a graph cannot be captured, the same functions run eagerly with the same
results.

Shapes: N = elements of the flat buffers, S and T = packed rows of source and target.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import UserError, is_out_of_memory
from lightseq_fairseq.memory.fp8 import OFF, Fp8State
from lightseq_fairseq.memory.graphs import Graphs, wait_for
from lightseq_fairseq.memory.packing import PackedBatch
from lightseq_fairseq.memory.parameters import FlatBuffer
from lightseq_fairseq.memory.passes import Pass
from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, Given, State
from lightseq_fairseq.step.adafactor import Adafactor
from lightseq_fairseq.step.exchange import Exchange, Ranks
from lightseq_fairseq.step.flat_adam import FlatAdam
from lightseq_fairseq.step.objectives import Objective

logger = logging.getLogger(__name__)


class Count(IntEnum):
    """Indices of the counts, which follow the state in one tensor; they are summed over the ranks.

    One all-reduce sums the end of the state (from ``State.SUM_0`` on), the counts and, with fp8, a
    slot of amaxes for each rank.
    """

    SAMPLE_SIZE = 0
    TOKENS = 1
    SENTENCES = 2
    SECONDS = 3  # training time, so that all ranks stop together at a time limit
    SIGNALS = 4  # signals that a rank has received, see ``stopping``
    SQUARES = 5  # sum of squares of the gradient that a rank updates, if the state is sharded
    CAST = 6  # numbers that were cast to fp8
    SATURATED = 7  # those of them that were too large


# Steps that may be unfinished when train_step returns. The GPU computes them while the host
# captures a graph, which takes as long as several steps.
STEPS_AHEAD = KNOWN_RATES - 2
_UPDATE_INPUTS = len(Given) + KNOWN_RATES - 1  # numbers that ops.update_scalars reads as ``given``
_GIVEN = _UPDATE_INPUTS + len(Count)  # numbers in front of a batch in its block
_BATCH = _GIVEN + _GIVEN % 2  # start of the batch in the block; its parts are 16-byte aligned

_NO_MEMORY = (
    "The GPU has no memory left to complete an update, and its batch can no longer be dropped: "
    "lower --max-tokens, and run the same command again to continue from the last checkpoint."
)


class _Weighted(torch.autograd.Function):
    """A number without a value, whose gradient for each of ``losses`` is ``weight``.

    ``losses.backward(gradient)`` would import sympy, for a second.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, weight: Tensor) -> Tensor:
        ctx.gradient = weight.expand_as(losses)
        return losses.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


@dataclass(frozen=True)
class UpdateOptions:
    """Settings of an update.

    Attributes:
        seed: dropout seed; the number of updates is added to it.
        max_norm, clip_eps: clipping, see ``ops.adam_step``.
        scale_window, tolerance, threshold, min_loss_scale: see ``ops.update_scalars``.
    """

    seed: int
    max_norm: float
    clip_eps: float
    scale_window: int = 0
    tolerance: float = 0.0
    threshold: float = 0.0
    min_loss_scale: float = 0.0


@dataclass
class StepReport:
    """A copy of the state after a step, which may still be in transfer to the host."""

    values: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> list[float]:
        """The ``ops.update_scalars.State`` after the step, then the counts.

        With a single rank, the counts are only those of fp8.

        Raises:
            GPUHangs: the step does not finish.
        """
        if self.arrived is not None:
            wait_for(self.arrived)
        return self.values.tolist()


class TrainingStep:
    """Trains one model on one device, with packed batches.

    Args:
        model: is passed to the objective.
        low: the buffer of its trained parameters.
        optimizer: on ``low`` itself or on a float32 copy with the same layout.
        objective, options, ranks: see their classes.
        scales: the layers' products are computed in fp8; these are the scales of an earlier run,
            empty if there is none. None: products are computed in the model's precision.

    Attributes:
        state: float64 [len(State)] on the device.
    """

    def __init__(
        self, model: Any, low: FlatBuffer, optimizer: FlatAdam | Adafactor, objective: Objective,
        options: UpdateOptions, ranks: Ranks, scales: Mapping[str, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.low, self.optimizer, self.objective = model, low, optimizer, objective
        self.options, self.ranks = options, ranks
        self.device = low.data.device
        # float32 beside low
        self._has_copy = optimizer.fused.buffer.data.data_ptr() != low.data.data_ptr()
        self._exchange = Exchange(ranks, low)
        if ranks.sharded:
            assert isinstance(optimizer, FlatAdam)
            optimizer.fused.shard(self._exchange, self._has_copy)
        self.gradients = self._exchange.gradients
        self.fp8 = OFF
        if scales is not None:
            self.fp8 = Fp8State(model, low, scales, self._split_parameters())
        reported = len(State) + len(Count)
        amaxes = 0 if ranks.count == 1 else self.fp8.amax.numel()
        self._numbers = torch.zeros(
            reported + ranks.count * amaxes, dtype=torch.float64, device=self.device
        )
        self._reported = self._numbers[:reported]
        self.state, self._counts = self._reported.split([len(State), len(Count)])
        # Of each rank. A rank fills its own row and leaves the others zero, so the sum has all.
        self._amaxes = self._numbers[reported:].view(ranks.count, amaxes)
        self.rng = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._inputs = _Inputs(self.device)
        self._graphs = Graphs(self.device, "training steps")
        # (part, stream, rows, is it an update's first batch) whose GEMMs have run eagerly: their
        # cuBLASLt algorithm search is done.
        self._searched: set[tuple[str, str, int, bool]] = set()
        self._reports = [
            torch.zeros(reported, dtype=torch.float64, pin_memory=self.device.type == "cuda")
            for _ in range(KNOWN_RATES)
        ]
        self._next_report = 0
        self._changes = False  # whether the part that runs has begun to change the state

    def set_state(self, num_updates: int, scaler: Any = None) -> None:
        """Start at ``num_updates``, with loss scale and counters of fairseq's loss scaler."""
        values = [0.0] * len(State)
        values[State.NUM_UPDATES] = num_updates
        values[State.LOSS_SCALE] = 1.0
        for place, name in SCALER.items() if scaler is not None else ():
            values[place] = getattr(scaler, name)
        self.state.copy_(torch.tensor(values))
        self.rng.copy_(torch.tensor([self.options.seed + num_updates, 0]))

    def update(self, batches: Sequence[PackedBatch], given: Sequence[float]) -> StepReport:
        """Launch one update by the gradient of all ``batches``, without waiting for the device.

        batches: the micro-batches of this rank; with several ranks, a rank may have none.
        given: ``ops.update_scalars.Given``, then `Count` of all batches of this rank.
        """
        if not self.low.intact():
            raise RuntimeError(
                "lightseq: the model's parameters were moved to other memory during training"
            )
        freed = self._split_parameters()
        self.fp8.prepare(overwritten=freed is not None)
        if self._inputs.make_room(batches):
            self._graphs.clear()  # they read the old address of the inputs
        while self.fp8.passes_due:
            self._collect_or_retry(batches, given)
            self.rng[1].zero_()
            if self.ranks.count > 1:
                self.ranks.largest(self.fp8.amax)
            self._complete(self.fp8.after_pass)
        self._collect_or_retry(batches, given)
        # Only now, since a collective cannot be taken back.
        if self.ranks.count > 1:
            self._add_up()
        self._complete(lambda: self._graphs.launch("update", self._update))
        if self.ranks.sharded:
            self._exchange.gather()
            if self.fp8.is_on:
                self.wait()
                cast = functools.partial(self._graphs.launch, "fp8 weights", self.fp8.cast_weights)
                self._complete(cast)
        return self._report()

    def _complete(self, part: Callable[[], Any]) -> None:
        """Run a part of the update that no batch can be dropped from any more.

        Other ranks have begun the update's collectives. So if memory runs out, only this part
        starts again.

        Raises:
            UserError: memory runs out again, or after the part has begun to change the state.
        """
        self._changes = False
        if _fits(part):
            return
        if not self._changes:
            logger.info("out of memory: all CUDA graphs are freed, and the update is completed")
            self.forget_graphs()
            if _fits(part):
                return
        raise UserError(_NO_MEMORY)

    def _split_parameters(self) -> Tensor | None:
        """``AdamState.split``, if float32 parameters have bf16 copies.

        Returns the memory that is free from now on, unless it has been so before.
        """
        if self._has_copy and self.low.data.dtype == torch.bfloat16:
            return self.optimizer.fused.split(self.low.data)
        return None

    def _collect_or_retry(self, batches: Sequence[PackedBatch], given: Sequence[float]) -> None:
        collect = functools.partial(self._collect_gradients, batches, given)
        if not _fits(collect):
            # The graphs' memory may be too fragmented for this batch. Free it and start again with
            # the first batch, which overwrites gradients and sums.
            logger.info("out of memory: all CUDA graphs are freed, and the update starts again")
            self.forget_graphs()
            self.rng[1].zero_()
            collect()

    def _collect_gradients(self, batches: Sequence[PackedBatch], given: Sequence[float]) -> None:
        # Otherwise the first batch overwrites the whole gradient.
        if not batches or any(batch.part for batch in batches):
            self.gradients.flat.zero_()
        if not batches:
            self._inputs.send(torch.zeros(0, dtype=torch.int64), given)
            self.state[State.SUM_0 :].zero_()
            self._exchange.finish_all()
            self.wait()
        table_rows = getattr(self.model, "table_rows", None)  # our models have it
        for place, batch in enumerate(batches):
            block = self._inputs.send(batch.block, given)
            first = place == 0
            forward_backward = functools.partial(self._forward_backward, batch, block, first)
            streams = zip(batch.layout, batch.bucket.rows, strict=True)
            sizes = {(batch.part, stream.name, rows, first) for stream, rows in streams}
            tables = () if table_rows is None else table_rows(batch)
            shapes = (batch.part, batch.bucket, first, tables)
            self._graphs.launch(shapes, forward_backward, sizes <= self._searched)
            self._searched |= sizes

    def _forward_backward(self, batch: PackedBatch, block: Tensor, first: bool) -> None:
        scale = self.state[State.LOSS_SCALE]
        if self.ranks.count > 1:  # as in DDP, so that the sum over the ranks does not overflow
            scale = scale / self.ranks.count
        # Later forwards of this update read what the first one has waited for.
        waits = first and self.ranks.sharded
        self._exchange.begin_forward()
        around = Pass(self.gradients, self.fp8, self._exchange.wait_until if waits else None)
        with around.entered():
            with torch.enable_grad():
                losses, counted = self.objective.losses(
                    self.model, batch.open(block[_BATCH:]), self.rng, scale
                )
            around.end_forward()
            with self.gradients.write(not first, batch.part):
                _Weighted.apply(losses, scale.to(losses.dtype)).backward()
        sums = torch.stack(counted).sum(1, dtype=torch.float64)
        totals = self.state[State.SUM_0 : State.SUM_0 + len(counted)]
        totals.copy_(sums) if first else totals.add_(sums)
        self.rng[1].add_(1)

    @torch.no_grad()
    def _add_up(self) -> None:
        """All-reduce the gradient, then the sums.

        This is not captured: in one update, ranks replay graphs of different buckets, but a
        collective would have to be in the same graph on all ranks.
        """
        self._exchange.add_up()
        self._complete(lambda: self._graphs.launch("counts", self._count))
        self.ranks.add_up(self._numbers[State.SUM_0 :])

    def _count(self) -> None:
        self._counts.copy_(self._inputs.given()[_UPDATE_INPUTS:])
        if self.ranks.sharded:
            self._counts[Count.SQUARES] = self._exchange.squares(ops.adam_norm)
        self.fp8.report(self._counts[Count.CAST :])
        self._amaxes.zero_()
        self._amaxes[self.ranks.rank].copy_(self.fp8.amax.flatten())

    @torch.no_grad()
    def _update(self) -> None:
        options, state, gradient = self.options, self.state, self._exchange.sum
        given = self._inputs.given()[:_UPDATE_INPUTS]
        if self.ranks.count > 1:
            # The gradient is now the mean over the ranks, so divide the sample size as well.
            mean = self._counts[Count.SAMPLE_SIZE].clamp_min(1.0) / self.ranks.count
            given[Given.SAMPLE_SIZE].copy_(mean)
        if self.ranks.sharded:
            norm = self._counts[Count.SQUARES].sqrt().to(self.optimizer.fused.buffer.data.dtype)
        else:
            norm = ops.adam_norm(gradient)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._changes = not capturing
        ops.update_scalars(
            state, self.rng, given, norm, seed=options.seed, scale_window=options.scale_window,
            tolerance=options.tolerance, threshold=options.threshold,
            min_loss_scale=options.min_loss_scale,
        )  # fmt: skip
        if self.ranks.count > 1:
            self.fp8.amax.copy_(self._amaxes.amax(0).view_as(self.fp8.amax))
        else:
            self.fp8.report(self._counts[Count.CAST :])
        self.fp8.update(state[State.SKIPPED])
        # With sharded state, the ranks must first gather the weights.
        cast = None if self.ranks.sharded else self.fp8.weight_cast()
        self.optimizer.fused.update(
            gradient, self.low.data if self._has_copy else None, state[State.RATE],
            state[State.MULTIPLIER], norm, options.max_norm, options.clip_eps,
            self._exchange.finish, cast,
        )  # fmt: skip

    def _report(self) -> StepReport:
        values = self._reports[self._next_report]
        self._next_report = (self._next_report + 1) % len(self._reports)
        values.copy_(self._reported, non_blocking=True)
        arrived = None
        if self.device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record()
        return StepReport(values, arrived)

    def wait(self) -> None:
        """Let the current stream wait for the parameters that other ranks are still sending."""
        self._exchange.wait()

    def forget_graphs(self) -> None:
        """Free the memory of all graphs; also works after an error within a step."""
        self._graphs.clear()


SCALER = {
    State.LOSS_SCALE: "loss_scale",
    State.SCALER_ITER: "_iter",
    State.LAST_OVERFLOW_ITER: "_last_overflow_iter",
    State.LAST_RESCALE_ITER: "_last_rescale_iter",
    State.OVERFLOWS_SINCE_RESCALE: "_overflows_since_rescale",
}  # attributes of fairseq's DynamicLossScaler


class _Inputs:
    """Prefetches batches to the device, each with the numbers that the host gives the update.

    A separate stream copies them into a ring of slots while earlier steps still compute. From a
    slot they are copied to the fixed address that the graphs read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._block = torch.zeros(0, dtype=torch.int64, device=device)
        self._slots: list[_Slot] = []
        self._stream = torch.cuda.Stream(device) if self.is_cuda else None

    def given(self) -> Tensor:
        return self._block[:_GIVEN].view(torch.float64)

    def send(self, batch: Tensor, given: Sequence[float]) -> Tensor:
        """Copy to the device; returns an int64 block: ``given`` as float64, then the batch."""
        numbers = torch.tensor(given, dtype=torch.float64).view(torch.int64)
        size = _BATCH + len(batch)
        if not self.is_cuda:
            self._block = torch.cat([numbers, batch.new_zeros(_BATCH - _GIVEN), batch])
            return self._block
        compute = torch.cuda.current_stream(self.device)
        slot = self._slots.pop(0)
        self._slots.append(slot)
        wait_for(slot.written)  # this copy was several steps ago: no real wait
        slot.numbers.copy_(numbers)
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.read)
            slot.block[:_GIVEN].copy_(slot.numbers, non_blocking=True)
            slot.block[_BATCH:size].copy_(batch, non_blocking=True)
            slot.written.record(self._stream)
        compute.wait_event(slot.written)
        self._block[:size].copy_(slot.block[:size], non_blocking=True)
        slot.read.record(compute)
        return self._block[:size]

    def make_room(self, batches: Sequence[PackedBatch]) -> bool:
        """Make the block that graphs read large enough; returns whether its address changed."""
        size = _BATCH + max((len(batch.block) for batch in batches), default=0)
        if not self.is_cuda or size <= len(self._block):
            return False
        torch.cuda.synchronize(self.device)
        size *= 2  # batches have similar sizes, so this rarely happens twice
        self._block = torch.empty(size, dtype=torch.int64, device=self.device)
        self._slots = [_Slot(size, self.device) for _ in range(KNOWN_RATES)]
        return True


class _Slot:
    """One slot of the ring: device memory, pinned memory, and the events of write and read."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Left unfilled: a fill would run on another stream than the copies, possibly after them.
        self.block = torch.empty(size, dtype=torch.int64, device=device)
        self.written, self.read = torch.cuda.Event(), torch.cuda.Event()
        self.numbers = torch.zeros(_GIVEN, dtype=torch.int64, pin_memory=True)


def _fits(part: Callable[[], Any]) -> bool:
    """Run a part of an update; returns False if the GPU runs out of memory in it.

    The caller can then free memory: the error, which holds some, no longer exists.
    """
    try:
        part()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True
