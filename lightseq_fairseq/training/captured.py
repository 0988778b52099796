"""The captured step inside fairseq's training loop: which runs use it, and fairseq's bookkeeping.

fairseq's loop expects that a step has finished when ``train_step`` returns. Here it has only been
launched: the host's count of updates is a few steps ahead of the device, and the results of a step
are logged when they arrive. So this module, not the loop, writes the line of a log interval: when
the results of its last update have been logged, and before those of the next one. Before the loop
uses more than the count (it validates, saves, stops or ends an epoch), the host waits for all
steps, and the device for the parameters that other ranks are still sending. A skipped update is
subtracted from the count.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fairseq import optim
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError, is_out_of_memory
from lightseq_fairseq.base.families import named
from lightseq_fairseq.memory.fp8 import products, why_no_fp8
from lightseq_fairseq.memory.packing import LEAST_GRANULARITY, Granularity, PackedBatch
from lightseq_fairseq.memory.parameters import flat_buffers
from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, State, StopReason
from lightseq_fairseq.plugins import settings
from lightseq_fairseq.plugins.conditions import of_ranks, pads_targets_left
from lightseq_fairseq.plugins.dropout import seed_of_masks
from lightseq_fairseq.plugins.settings import FALLBACK, is_used, option
from lightseq_fairseq.plugins.unsupported import set_by_arch
from lightseq_fairseq.step.adafactor import Adafactor
from lightseq_fairseq.step.exchange import Ranks
from lightseq_fairseq.step.flat_adam import FlatAdam
from lightseq_fairseq.step.objectives import Objective, declares
from lightseq_fairseq.step.training_step import (
    SCALER,
    STEPS_AHEAD,
    Count,
    StepReport,
    TrainingStep,
    UpdateOptions,
)
from lightseq_fairseq.training.background import WRITER
from lightseq_fairseq.training.freezing import trained
from lightseq_fairseq.training.stopping import STOPPING

logger = logging.getLogger(__name__)

_BUCKETS = 32  # about so many different row counts per side, up to --max-tokens


def _trains_as_fairseqs(task: Any) -> bool:
    """Whether ``task`` (a class) minimises the criterion's loss, summed over an update's batches.

    This also holds for some tasks with a training step of their own, such as fairseq's multilingual
    task, whose sample has one batch per language pair.
    """

    def parts(task: Any) -> tuple[Any, Any]:
        return task.train_step, getattr(task, "_per_lang_pair_train_loss", None)

    adding = [named(x.place) for x in families.tasks().values() if x.adds_losses]
    sums = parts(task) in map(parts, (FairseqTask, *adding))
    return sums and task.optimizer_step is FairseqTask.optimizer_step


def _ignores_pads(cfg: Any) -> bool:
    """Whether the prefix that the criterion ignores may have pads: fairseq counts columns, and our
    step tokens."""
    return getattr(cfg.criterion, "ignore_prefix_size", 0) > 0 and pads_targets_left(cfg.task)


def fallback_reason(trainer: Any) -> str | None:
    """Why a run uses fairseq's own training step, in a few words; None if it does not."""
    cfg, model, criterion = trainer.cfg, trainer.get_model(), trainer.get_criterion()
    task = type(trainer.task)
    # Also subclasses from --user-dir, unless they declare these methods. Test this first: other
    # archs may set options of fallbacks that the command does not have.
    if not declares(model, "packed_logits"):
        return "our step does not support the arch"
    objective = criterion.objective() if declares(criterion, "objective") else None
    reasons = {
        "our step does not support the criterion": objective is None,
        "our step does not support the arch with this criterion": objective is not None
        and not all(hasattr(model, name) for name in objective.calls),
        "the optimizer is not ls_adam or adafactor": not (
            _is_ours(cfg.optimizer) or _is_adafactor(cfg.optimizer)
        ),
        "--zero-sharding os with adafactor": of_ranks(cfg, "zero_sharding") == "os"
        and _is_adafactor(cfg.optimizer),
        "--scale-parameter with reduce_lr_on_plateau": _compounds(cfg),
        "--ignore-prefix-size with --left-pad-target": _ignores_pads(cfg),
        "the task has its own training step": not _trains_as_fairseqs(task),
        "the logs of the task cannot be summed over the ranks": trainer.data_parallel_world_size > 1
        and not task.logging_outputs_can_be_summed(criterion),
    }
    fallbacks = settings.rows("train", FALLBACK)
    found = next((flag for flag, row in fallbacks if is_used(flag, row, cfg)), None)
    if found is not None and set_by_arch(cfg.model, option(found)):
        found = f"the arch sets {found}"
    found = found or next((reason for reason, applies in reasons.items() if applies), None)
    if found is not None:
        return found
    if list(criterion.parameters()):
        return "some parameters belong to the criterion"
    return None if len(flat_buffers(trained(model))) == 1 else "the parameters have several dtypes"


def _updated_by(optimizer: Any) -> FlatAdam | Adafactor:
    in_half = isinstance(optimizer, optim.FP16Optimizer)
    found: FlatAdam | Adafactor = (optimizer.fp32_optimizer if in_half else optimizer).optimizer
    return found


def _ranks(trainer: Any) -> Ranks:
    count, group = trainer.data_parallel_world_size, trainer.data_parallel_process_group
    if count == 1:
        return Ranks()
    settings = trainer.cfg.distributed_training
    return Ranks(
        count, trainer.data_parallel_rank, group, settings.fp32_reduce_scatter,
        settings.zero_sharding == "os",
    )  # fmt: skip


def uses_fp8(cfg: Any) -> bool:
    """Whether the run has --fp8, which ``cli.checks.own_flags`` adds to fairseq's configuration."""
    return getattr(cfg.common, "fp8", False)


def refuse_fp8(trainer: Any) -> None:
    """Raises UserError if the run has --fp8, but its model or GPU cannot use it."""
    cfg = trainer.cfg
    if not uses_fp8(cfg):
        return
    if trainer.cuda and (reason := why_no_fp8(trainer.device)):
        raise UserError(f"--fp8 {reason}: remove --fp8.")
    if not products(trainer.get_model()):
        raise UserError(
            "--fp8 has no product to compute, because --lora-on has adapters on all of them, which "
            "are in bf16: remove --fp8, or name fewer layers."
        )


def refuse_flags(cfg: Any, reason: str | None) -> None:
    """Raises UserError if fairseq's own step runs, for this reason, but a flag needs ours."""
    if reason is not None and uses_fp8(cfg):
        raise UserError(
            f"--fp8 needs our step, but this run uses fairseq's own step ({reason}): remove --fp8."
        )
    if reason is not None and of_ranks(cfg, "zero_sharding") == "os" and _is_ours(cfg.optimizer):
        raise UserError(
            "--zero-sharding os with ls_adam needs our step, but this run uses fairseq's own "
            f"step ({reason}): remove --zero-sharding."
        )


@contextlib.contextmanager
def unsharded(cfg: Any) -> Iterator[None]:
    """Hide --zero-sharding from fairseq, which would shard ls_adam with the package fairscale."""
    settings = cfg.distributed_training
    asked = settings.zero_sharding
    if _is_ours(cfg.optimizer):
        settings.zero_sharding = "none"
    try:
        yield
    finally:
        settings.zero_sharding = asked


def _is_ours(optimizer: Any) -> bool:
    return getattr(optimizer, "_name", None) == "ls_adam"


def _is_adafactor(optimizer: Any) -> bool:
    # Its settings are a Namespace, unlike Adam's.
    return "adafactor" in (getattr(optimizer, "_name", None), getattr(optimizer, "optimizer", None))


def _compounds(cfg: Any) -> bool:
    """Whether each update scales the rate of the one before: fairseq's Adafactor writes the scaled
    rate into the optimizer, and this schedule sets it only after an epoch."""
    scales = _is_adafactor(cfg.optimizer) and cfg.optimizer.scale_parameter
    return scales and getattr(cfg.lr_scheduler, "_name", None) == "reduce_lr_on_plateau"


def granularity(trainer: Any) -> Granularity:
    """How row counts of batches are rounded up."""
    if not trainer.cuda:
        return Granularity()
    most = trainer.cfg.dataset.max_tokens or 0
    fine = LEAST_GRANULARITY * max(1, round(most / _BUCKETS / LEAST_GRANULARITY))
    # fairseq fills batches up to --max-tokens: 90% of them have more than 3/4 of it.
    return Granularity(fine, most * 3 // 4 if most >= _BUCKETS * LEAST_GRANULARITY else 0)


def _reseed(trainer: Any) -> None:
    """Seed torch's generators as fairseq does before each update, but not for 0.4 ms.

    Our step draws nothing from them. But a data loader seeds its workers from them, for example.
    """
    seed = trainer.cfg.common.seed + trainer.get_num_updates()
    torch.default_generator.manual_seed(seed)
    if trainer.cuda:
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def steps_ahead(trainer: Any, batches: int) -> int:
    """How many steps of this many batches may be unfinished when ``train_step`` returns.

    Fewer steps if they are long, since a signal ends training only after them.
    """
    return max(STEPS_AHEAD // max(batches, 1), 2) if trainer.cuda else 0


@contextlib.contextmanager
def _as_in_a_step() -> Iterator[None]:
    """Log what the block logs, and its duration, where fairseq's loop logs a step."""
    with metrics.aggregate("train_inner"), metrics.aggregate("train"):
        _start_watch()
        yield
        metrics.log_stop_time("train_wall")


def _start_watch() -> None:
    metrics.log_start_time("train_wall", priority=800, round=0)


@dataclass
class _Started:
    """A launched step.

    Attributes:
        counts: this rank's, in the order of ``Count``.
        place: of its last batch in the epoch, for the log.
    """

    report: StepReport
    counts: list[float]
    place: int | None


class CapturedTraining:
    """Runs a trainer's steps. Create it after the trainer has loaded its checkpoint.

    Args:
        scales: the result of `scales` in an earlier run; empty if there is none.
    """

    def __init__(self, trainer: Any, scales: Mapping[str, Tensor]) -> None:
        cfg, criterion = trainer.cfg, trainer.get_criterion()
        self.trainer = trainer
        optimizer = trainer.optimizer
        self._scaler = optimizer.scaler if isinstance(optimizer, optim.FP16Optimizer) else None
        ranks = _ranks(trainer)
        self._is_alone = ranks.count == 1
        if not self._is_alone:
            # All ranks must see the same time, to stop together at a time limit. Until a step
            # reports the mean over the ranks, they see the training time before this run.
            trainer._cumulative_training_time = trainer._previous_training_time
        options = UpdateOptions(seed_of_masks(trainer), cfg.optimization.clip_norm, 1e-6)
        scaler = self._scaler
        if scaler is not None:
            options = replace(
                options, clip_eps=0.0, scale_window=scaler.scale_window,
                tolerance=scaler.tolerance, threshold=scaler.threshold or 0.0,
                min_loss_scale=scaler.min_loss_scale,
            )  # fmt: skip
        model = trainer.get_model()
        (low,) = flat_buffers(trained(model))
        self._objective: Objective = criterion.objective()
        # With --fp16 or --bf16, unused parameters have a gradient of zeros, as in fairseq, so they
        # decay. In fp32 they have none.
        if not isinstance(optimizer, optim.FP16Optimizer):
            _updated_by(optimizer).fused.leave_out(self._objective.unused(model))
        self._step = TrainingStep(
            model, low, _updated_by(optimizer), self._objective, options, ranks,
            scales if uses_fp8(cfg) else None,
        )  # fmt: skip
        self._step.set_state(trainer.get_num_updates(), scaler)
        self._rates: dict[int, float] = {}
        self._started: deque[_Started] = deque()

    @_as_in_a_step()
    def train_step(self, samples: Sequence[Any], ends_epoch: bool) -> None:
        """Launch the update by ``samples``, which ``training.batch`` has made.

        Raises:
            FloatingPointError: as in fairseq's trainer, for this step or an earlier one.
            GPUHangs: this step or an earlier one does not finish.
        """
        trainer = self.trainer
        _reseed(trainer)
        if not trainer.model.training:
            trainer.model.train()
            trainer.criterion.train()
            if trainer.cuda:  # steps cannot use the memory that validation left in the cache
                torch.cuda.empty_cache()
        count = trainer.get_num_updates()
        lists = (sample if isinstance(sample, list) else [sample] for sample in samples)
        batches = [x for parts in lists for x in parts if len(x) > 0]  # a rank may have none
        try:
            started = self._start(batches, count)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._recover(error)
            if self._is_alone:
                return
            started = self._start([], count)  # other ranks wait for this one in the collective
        self._started.append(started)
        self._set_num_updates(count + 1)
        self._rates[count + 1] = trainer.get_lr()
        if self._is_alone:
            STOPPING.agree(STOPPING.signal_code())
        self._log_steps(steps_ahead(trainer, len(samples)))
        # A step just logged may have set the reason.
        if ends_epoch or self._is_looked_at(count + 1) or STOPPING.reason is not None:
            self._log_steps()
            self._step.wait()

    def _set_num_updates(self, count: int) -> None:
        """Set the host's count and its learning rate; fairseq's method would log them now."""
        self.trainer._num_updates = count
        self.trainer.lr_scheduler.step_update(count)

    def settle(self) -> None:
        """Wait for all steps, and log them; afterwards the parameters can be read."""
        if self._started:
            with _as_in_a_step():
                self._log_steps()
        self._step.wait()

    def _log_steps(self, ahead: int = 0) -> None:
        """Wait for all steps except the last ``ahead``, and log them."""
        while len(self._started) > ahead:
            self._log(self._started.popleft())

    def _log_line(self, count: int, place: int | None) -> None:
        """Write the line of the log interval that ends with update ``count``, just logged."""
        trainer = self.trainer
        if trainer.cuda_env is not None:  # reserved memory includes that of the graphs
            used = torch.cuda.max_memory_reserved() / 2**30
            free = trainer.cuda_env.total_memory_in_GB - used
            metrics.log_scalar("gb_free", free, priority=1500, round=1, weight=0)
        metrics.log_stop_time("train_wall")
        trainer.progress.log_interval(count, place)
        _start_watch()

    def leave(self) -> None:
        """Restore the state that fairseq's own steps need."""
        self.settle()
        self._step.optimizer.join()

    def gather(self) -> None:
        """Make the optimizer's state readable on rank 0 until `release`; all ranks must call it."""
        self.settle()
        self._step.optimizer.fused.gather()

    def release(self) -> None:
        """Free the memory of `gather`."""
        self._step.optimizer.fused.release()
        self._step.optimizer.state.clear()

    def scales(self) -> dict[str, Tensor]:
        """The scales of fp8 for a checkpoint, after `settle`; empty without --fp8."""
        return self._step.fp8.state()

    def forget_graphs(self) -> None:
        """Free the memory of all graphs; later steps capture new ones."""
        self._step.forget_graphs()

    def _start(self, batches: Sequence[PackedBatch], count: int) -> _Started:
        counts = self._counts(batches)
        given = [count, counts[Count.SAMPLE_SIZE] or 1, *self._rates_at(count), *counts]
        report = self._step.update(batches, given)
        return _Started(report, counts, self.trainer.progress.place)

    def _counts(self, batches: Sequence[PackedBatch]) -> list[float]:
        ntokens = sum(batch.ntokens for batch in batches)
        nsentences = sum(batch.nsentences for batch in batches)
        seconds = self.trainer._local_cumulative_training_time()
        sample_size = self._objective.sample_size(batches)
        signals = STOPPING.signal_code()
        of_device = [0.0] * (len(Count) - Count.SQUARES)  # known on the device only
        return [sample_size, ntokens, nsentences, seconds, signals, *of_device]

    def _rates_at(self, count: int) -> list[float]:
        """Learning rates at this count and the counts before it.

        The device needs an earlier rate if updates were skipped that the host does not yet know of.
        """
        rate = self.trainer.get_lr()
        self._rates[count] = rate
        self._rates.pop(count - KNOWN_RATES, None)
        return [self._rates.get(count - i, rate) for i in range(KNOWN_RATES)]

    def _is_looked_at(self, count: int) -> bool:
        """Whether the host must wait for all steps, because fairseq's loop uses their results.

        At this count it validates, saves or ends training.
        """
        cfg = self.trainer.cfg
        intervals = [cfg.checkpoint.save_interval_updates, cfg.dataset.validate_interval_updates]
        return 0 < cfg.optimization.max_update <= count or any(
            interval > 0 and count % interval == 0 for interval in intervals
        )

    def _log(self, started: _Started) -> None:
        values = started.report.wait()
        trainer, scaler, counts = self.trainer, self._scaler, started.counts
        count = int(values[State.NUM_UPDATES])
        if not self._is_alone:
            counts = values[len(State) :]
            STOPPING.agree(counts[Count.SIGNALS])
            trainer._cumulative_training_time = counts[Count.SECONDS] / self._step.ranks.count
        if scaler is not None:
            for place, name in SCALER.items():
                value = values[place]
                setattr(scaler, name, value if name == "loss_scale" else int(value))
        if values[State.STOPPED] != StopReason.RUNNING:
            self._stop(values)
        if values[State.SKIPPED]:
            logger.info(
                "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: %s",
                values[State.LOSS_SCALE],
            )
            self._set_num_updates(trainer.get_num_updates() - 1)
        else:
            output: dict[str, Any] = {
                "sample_size": int(counts[Count.SAMPLE_SIZE]),
                "ntokens": int(counts[Count.TOKENS]),
                "nsentences": int(counts[Count.SENTENCES]),
                **self._objective.logged(values[State.SUM_0 : len(State)]),
            }
            norm = torch.tensor(values[State.NORM], dtype=torch.float64)
            trainer._reduce_and_log_stats([output], output["sample_size"], norm)
            metrics.log_scalar("num_updates", count, weight=0, priority=200)
            metrics.log_scalar("lr", self._rates[count], weight=0, priority=300)
            if self._step.fp8.is_on:
                cast, saturated = (values[len(State) + x] for x in (Count.CAST, Count.SATURATED))
                share = saturated / max(cast, 1)
                metrics.log_scalar("fp8_sat", share, weight=cast, priority=750, round=9)
        if scaler is not None:
            metrics.log_scalar("loss_scale", scaler.loss_scale, priority=700, round=4, weight=0)
        if not values[State.SKIPPED] and count % trainer.cfg.common.log_interval == 0:
            self._log_line(count, started.place)

    def _stop(self, values: list[float]) -> None:
        trainer = self.trainer
        self._started.clear()
        trainer.set_num_updates(int(values[State.NUM_UPDATES]))
        reason = "gradients are Nan/Inf"
        if values[State.STOPPED] == StopReason.LEAST_SCALE:
            reason = f"Minimum loss scale reached ({trainer.cfg.common.min_loss_scale})"
        trainer.consolidate_optimizer()
        try:
            # As in fairseq, the file does not store the position in the epoch.
            trainer.save_checkpoint(os.path.join(trainer.cfg.checkpoint.save_dir, "crash.pt"), {})
            WRITER.finish()
        except UserError as error:
            raise FloatingPointError(reason) from error
        finally:
            self._step.ranks.wait()  # the first rank to end would end the others
        raise FloatingPointError(reason)  # `divergence` says what to do

    def _recover(self, error: RuntimeError) -> None:
        """Recover from out of memory as fairseq does: log it, drop the batch, continue."""
        self.trainer._log_oom(error)
        logger.warning("attempting to recover from OOM in forward/backward pass")
        self._step.forget_graphs()
        self.trainer.zero_grad()
        if self.trainer.cuda:
            torch.cuda.empty_cache()
