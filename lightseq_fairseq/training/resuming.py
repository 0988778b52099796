"""A resumed run stops, and changes its learning rate, when an uninterrupted run would.

fairseq's checkpoints lack a part of the state of ``--patience`` and of two schedules. Our files
have it in ``extra_state``, where fairseq ignores it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fairseq import trainer as native
from fairseq.logging import metrics
from fairseq.optim.lr_scheduler import (
    cosine_lr_scheduler,
    polynomial_decay_schedule,
    reduce_lr_on_plateau,
    tri_stage_lr_scheduler,
)
from fairseq_cli import train

from lightseq_fairseq.training import freezing, lora
from lightseq_fairseq.training.stopping import STOPPING

_KEPT = "lightseq_stopping"  # the key in extra_state
_PATIENCE = ("best", "num_runs")  # attributes of fairseq's function `should_stop_early`


class ResumableTrainer(native.Trainer):
    """``fairseq.trainer.Trainer`` with ``--freeze`` and ``--lora-rank``, whose ranks agree on
    signals, and whose checkpoints have the state of all schedules and of ``--patience``."""

    # The epoch within which the run resumes, and the state of its schedule; None once it begins.
    _within: tuple[int, dict[str, Any]] | None = None

    def __init__(self, cfg: Any, task: Any, model: Any, *others: Any) -> None:
        """Raises UserError if --freeze or --lora-on does not fit the model."""
        lora.add(model, cfg.common)
        freezing.freeze(model, getattr(cfg.common, "freeze", None))
        super().__init__(cfg, task, model, *others)

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        STOPPING.begin(self.cfg.checkpoint)

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        output = super().train_step(samples, raise_oom)
        if self.data_parallel_world_size == 1:
            STOPPING.agree(STOPPING.signal_code())
        return output

    def _aggregate_logging_outputs(self, outputs: Any, *sums: Any, ignore: bool = False) -> Any:
        outputs, sums = super()._aggregate_logging_outputs(
            outputs, *sums, STOPPING.signal_code(), ignore=ignore
        )
        STOPPING.agree(float(sums[-1]))
        return outputs, sums[:-1]

    def state_dict(self) -> dict[str, Any]:
        """fairseq's training state, with what it lacks of schedule and ``--patience``."""
        state: dict[str, Any] = super().state_dict()
        kept = _read(*_lacking(self.lr_scheduler))
        if self.cfg.checkpoint.patience > 0:
            kept |= _read(train.should_stop_early, _PATIENCE)
        if kept:
            state["extra_state"][_KEPT] = kept
        return state

    def load_checkpoint(
        self,
        filename: str,
        reset_optimizer: bool = False,
        reset_lr_scheduler: bool = False,
        optimizer_overrides: Any = None,
        reset_meters: bool = False,
    ) -> Any:
        """Load all training state; see ``fairseq.trainer.Trainer.load_checkpoint``.

        As in fairseq, --reset-meters and --reset-optimizer forget the best validation loss, and
        with it the state of --patience; --reset-lr-scheduler and --reset-optimizer forget the
        state of the schedule.
        """
        extra_state = super().load_checkpoint(
            filename, reset_optimizer, reset_lr_scheduler, optimizer_overrides, reset_meters
        )
        if extra_state is None:
            return extra_state
        if (wall := metrics.get_meter("default", "wall")) is not None:
            wall.start()  # a loaded meter does not run: fairseq logs wall 0
        kept = extra_state.pop(_KEPT, {})
        position = extra_state["train_iterator"]
        begins_epoch = position.get("version", 1) >= 2 and position["iterations_in_epoch"] == 0
        if not reset_optimizer and not reset_meters:
            _write(train.should_stop_early, _PATIENCE, kept)
        if begins_epoch and not reset_meters:
            # fairseq begins an epoch with empty meters, but a log interval goes on into it.
            interval = extra_state.get("metrics", {}).get("train_inner")
            metrics.load_state_dict({} if interval is None else {"train_inner": interval})
        if not reset_optimizer and not reset_lr_scheduler:
            _write(*_lacking(self.lr_scheduler), kept)
            self.lr_step_update()
            if begins_epoch:
                # fairseq saves before it passes the validation loss to the schedule.
                self.lr_step(position["epoch"] - 1, extra_state.get("val_loss"))
            else:
                self._within = position["epoch"], kept
        return extra_state

    def get_lr(self) -> Any:
        """The current learning rate; infinite if the run has resumed within an epoch.

        fairseq compares it with --stop-min-lr when a run begins, but otherwise only at the end of
        an epoch.
        """
        return super().get_lr() if self._within is None else math.inf

    def lr_step_begin_epoch(self, epoch: int) -> Any:
        """Adjust the learning rate at the beginning of an epoch."""
        rate = super().lr_step_begin_epoch(epoch)
        if self._within is not None and self._within[0] == epoch:
            # The epoch has begun in an earlier run, perhaps with another rate.
            _write(*_lacking(self.lr_scheduler), self._within[1])
            rate = self.lr_step_update()
        self._within = None
        return rate


def ended(trainer: Any, epochs: Any) -> str | None:
    """Why a run that resumes had ended, and the remedy; None if it trains on.

    fairseq says nothing after --max-epoch. Else its loop would make one more update, or with
    --patience one more epoch. It reports --stop-min-lr itself.

    epochs: fairseq's iterator of epochs.
    """
    limits, patience = trainer.cfg.optimization, trainer.cfg.checkpoint.patience
    updates, epoch = trainer.get_num_updates(), epochs.next_epoch_idx - 1
    hours = trainer._previous_training_time / 3600
    if 0 < limits.max_update <= updates:
        has, flag, limit = f"the checkpoint has {updates} updates", "max-update", limits.max_update
    elif 0 < limits.max_epoch <= epoch:
        # fairseq's line "Loaded checkpoint" has the epoch that comes next.
        has, flag, limit = f"the run has finished epoch {epoch}", "max-epoch", limits.max_epoch
    elif 0 < limits.stop_time_hours < hours:
        has = f"the checkpoint has {hours:g} hours of training"
        flag, limit = "stop-time-hours", limits.stop_time_hours
    elif 0 < patience <= getattr(train.should_stop_early, "num_runs", 0):
        has = f"the last {patience} validations have not improved"
        flag, limit = "patience", patience
    else:
        return None
    raised = f"--{flag}"
    end = _end(trainer.lr_scheduler)
    if end is not None and end.update <= updates:
        raised += f" and, if the command has it, {end.flag} (at update {end.update:.0f} {end.what})"
    return f"{has}, and --{flag} is {limit:g}; to train on, raise {raised}"


def idle(trainer: Any, epochs: Any) -> str | None:
    """A note if the schedule ends before the run, or has ended with learning rate 0; else None.

    epochs: fairseq's iterator of epochs.
    """
    end, updates = _end(trainer.lr_scheduler), trainer.get_num_updates()
    if end is None:
        return None
    begins = f"{end.what} from update {end.update:.0f} on ({end.flag})"
    if end.update <= updates:
        is_idle = native.Trainer.get_lr(trainer) == 0
        return f"{begins}, so training changes nothing: raise {end.flag}" if is_idle else None
    last, limit = _last(trainer.cfg.optimization, len(epochs))
    if not end.stays or last <= end.update:
        return None
    to, lower = (f" to {limit}", f", or lower {limit.split()[0]}") if limit else ("", "")
    return f"{begins}, but the run goes on{to}: raise {end.flag}{lower}"


def unsaved(trainer: Any, epochs: Any) -> str | None:
    """A note if no checkpoint will have the last epochs of the run, else None.

    fairseq saves at the end of a run that --max-update ends, but not at that of --max-epoch.
    epochs: fairseq's iterator of epochs.
    """
    saving, limits = trainer.cfg.checkpoint, trainer.cfg.optimization
    every, count = saving.save_interval, limits.max_epoch
    by_updates = _last(limits, len(epochs))[1].startswith("--max-update")
    if saving.no_save or saving.save_interval_updates > 0 or by_updates or not count % every:
        return None
    kept = f"the last checkpoint is that of epoch {count // every * every}"
    return (
        f"{kept if count >= every else 'no checkpoint is written'}, because the run ends with "
        f"epoch {count} (--max-epoch) and --save-interval is {every}: lower --save-interval"
    )


def _last(limits: Any, batches: int) -> tuple[float, str]:
    """At least how many updates a run makes if it is not stopped, and the limit that ends it.

    batches: those of an epoch.
    """
    found = [(math.inf, "")]
    if limits.max_update > 0:
        found.append((limits.max_update, f"--max-update {limits.max_update}"))
    if limits.max_epoch > 0:
        each = [batches // count for count in limits.update_freq[: limits.max_epoch]]
        updates = sum(each) + (limits.max_epoch - len(each)) * each[-1]
        found.append((updates, f"--max-epoch {limits.max_epoch}"))
    return min(found)


class _End(NamedTuple):
    """The end of a schedule: its update, the flag that moves it, and what happens there."""

    update: float
    flag: str
    what: str
    stays: bool = True  # the learning rate that it has there


def _end(schedule: Any) -> _End | None:
    """The end of a schedule that a flag of its own sets; None if it has none.

    Without these flags, cosine and tri_stage end at --max-update.
    """
    cfg: Any = getattr(schedule, "cfg", None)  # manual has none
    if isinstance(schedule, polynomial_decay_schedule.PolynomialDecayLRSchedule):
        what = f"the learning rate is {cfg.end_learning_rate:g}"
        return _End(cfg.total_num_update, "--total-num-update", what)
    if isinstance(schedule, tri_stage_lr_scheduler.TriStageLRSchedule) and not cfg.phase_ratio:
        update = cfg.warmup_steps + cfg.hold_steps + cfg.decay_steps
        return _End(update, "--decay-steps", f"the learning rate is {schedule.final_lr:g}")
    if isinstance(schedule, cosine_lr_scheduler.CosineLRSchedule) and cfg.lr_period_updates > 0:
        update = cfg.warmup_updates + cfg.lr_period_updates
        return _End(update, "--lr-period-updates", "the learning rate rises again", False)
    return None


def _lacking(schedule: Any) -> tuple[Any, tuple[str, ...]]:
    """An object and its attributes that ``schedule.state_dict`` lacks, but later rates need."""
    if isinstance(schedule, reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule):
        return schedule.lr_scheduler, ("num_bad_epochs",)
    if isinstance(schedule, polynomial_decay_schedule.PolynomialDecayLRSchedule):
        # The rate from which it decays. After --force-anneal it is the one at the epoch's begin.
        return schedule, ("lr",) * (schedule.cfg.force_anneal is not None)
    return schedule, ()


def _read(owner: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _write(owner: Any, names: tuple[str, ...], values: dict[str, Any]) -> None:
    for name in names:
        if name in values:
            setattr(owner, name, values[name])
