"""What a training run tells about itself: log lines before its first update, with each validation
and after its last update, and the file with the whole log.

Rank 0 writes them. They need no number that the host would have to wait for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from logging.handlers import MemoryHandler
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data import LanguagePairDataset, MonolingualDataset, RoundRobinZipDatasets
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.tasks.denoising import DenoisingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.multilingual_masked_lm import MultiLingualMaskedLMTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

from lightseq_fairseq.training import divergence, resuming
from lightseq_fairseq.training.progress import EpochProgress

# fairseq's --log-file receives the lines of this logger.
logger = logging.getLogger("fairseq_cli.train.lightseq")

FILE = "lightseq-train.log"  # in the folder of checkpoints; users redirect output to train.log
_FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S"  # fairseq's

_BETWEEN_EPOCHS = 5  # seconds between the lines of two epochs without validation and saving
_MANY = 30_000_000  # parameters: an update of 4096 tokens takes ten seconds on two cores

_PAIRS, _BLOCKS = "sentence pairs", "blocks of text"
_SAMPLES = {  # class of the data set or of the task -> what its samples are
    LanguagePairDataset: _PAIRS,
    RoundRobinZipDatasets: _PAIRS,
    TranslationMultiSimpleEpochTask: _PAIRS,
    MonolingualDataset: _BLOCKS,
    DenoisingTask: _BLOCKS,
    MaskedLMTask: _BLOCKS,
    MultiLingualMaskedLMTask: _BLOCKS,
}


class Report:
    """The lines of one run; its methods wrap functions of ``fairseq_cli.train``."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._ended: str | None = None  # why there is nothing to train
        self._diverged = False  # a validation loss was NaN
        self._step = ""  # the last line about the step
        self._tokens = 0.0
        self._updates = 0
        self._before = (0.0, 0)  # `_of_epoch` before `train`: from an earlier run
        self._seconds = 0.0  # of training, without validation and saving
        self._first = 0  # the updates of the checkpoint with which the run begins
        self._saved = 0  # the updates of the last checkpoint
        self._file: MemoryHandler | None = None
        self._began = self._next = 0.0  # time of the first line, and of the next one about progress
        self._done = 0.0  # `_part_done` by an earlier run
        self._shown = 0.0  # time of the last line of an epoch on the terminal
        self._validated = False  # since that line

    @contextmanager
    def written(self, folder: str) -> Iterator[None]:
        """Within the block, the whole log goes to `FILE` in ``folder``, too.

        The file is made when training begins, so that a command that fails before leaves nothing.
        """
        file = logging.FileHandler(os.path.join(folder, FILE), encoding="utf-8", delay=True)
        file.setFormatter(logging.Formatter(*_FORMAT))
        self._file = MemoryHandler(1 << 20, sys.maxsize, file, flushOnClose=False)
        logging.root.addHandler(self._file)
        logger.info("command: %s", shlex.join(sys.argv))
        try:
            yield
        finally:
            logging.root.removeHandler(self._file)
            self._file.close()
            file.close()

    def load_checkpoint(
        self, original: Callable[..., Any], settings: Any, trainer: Any, **others: Any
    ) -> Any:
        """fairseq's ``load_checkpoint``; logs why a run that has ended trains no further, or
        that its schedule or its checkpoints end before it."""
        extra_state, epochs = original(settings, trainer, **others)
        self._trainer, self._first = trainer, trainer.get_num_updates()
        self._note_saving()
        self._ended = resuming.ended(trainer, epochs)
        if self._ended is not None:
            self._log(f"nothing to train: {self._ended}; for a new run, set another --save-dir")
        else:
            notes = resuming.idle(trainer, epochs), resuming.unsaved(trainer, epochs)
            self._log(*(f"note: {note}" for note in notes if note is not None))
        return extra_state, epochs

    def train(self, original: Callable[..., Any], cfg: Any, trainer: Any, *others: Any) -> Any:
        """fairseq's ``train``, for one epoch; logs the first lines, and the step if it changed."""
        if self._ended is not None:
            return [None], True
        if not self._step:
            self._began = time.perf_counter()
            self._next = self._began + 60
            self._done = _part_done(cfg, trainer, others[-1])
            self._log(*_settings(cfg, trainer, others[-1]))
            if self._file is not None:
                self._file.capacity = 0  # from now on, it keeps no lines
                self._log(f"log: {os.path.join(cfg.checkpoint.save_dir, FILE)} has all lines")
        step = f"step: {_step(trainer)}"
        if step != self._step:
            self._log(step)
            self._step = step
        self._before = _of_epoch()
        began = time.perf_counter()
        try:
            return original(cfg, trainer, *others)
        except FloatingPointError as error:
            # A checkpoint is of no use if the first update after it fails.
            at_once = 0 < self._first == trainer.get_num_updates()
            raise divergence.explained(error, trainer, self._diverged or at_once) from error
        finally:
            self._seconds += time.perf_counter() - began

    def progress_bar(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """fairseq's ``progress_bar``; that of an epoch of training is also the trainer's."""
        bar = original(*arguments, **keywords)
        if "prefix" in keywords:  # validation
            return bar
        self._trainer.progress = EpochProgress(bar, self._trainer, self._is_due)
        return self._trainer.progress

    def _is_due(self) -> bool:
        """Whether a terminal shows the line of the epoch that ends: of tiny data, not each one."""
        now = time.perf_counter()
        is_saved = self._saved == self._trainer.get_num_updates()
        if not (self._validated or is_saved or now >= self._shown + _BETWEEN_EPOCHS):
            return False
        self._shown, self._validated = now, False
        return True

    def validate_and_save(self, original: Callable[..., Any], *arguments: Any) -> Any:
        """fairseq's ``validate_and_save``, which it calls after each update."""
        began = time.perf_counter()
        losses, should_stop = original(*arguments)
        now = time.perf_counter()
        self._seconds -= now - began
        self._validated |= losses != [None]
        if not self._diverged and any(loss != loss for loss in losses):  # NaN alone differs
            self._diverged = True
            self._log(
                "note: the validation loss is NaN: training has diverged, and its checkpoints are "
                "of no use from now on: docs/faq.md (My loss is NaN)"
            )
        if not should_stop and (losses != [None] or now >= self._next):
            self._log(*self._progress(arguments[0], arguments[3], now))
            self._next = 2 * now - self._began
        if should_stop:  # without validation and saving, nothing has waited for the last results
            getattr(self._trainer, "settle", lambda: None)()
        is_end_of_epoch = arguments[-1]
        if is_end_of_epoch or should_stop:  # fairseq then resets the meters of the epoch
            tokens, updates = _of_epoch()
            self._tokens += tokens - self._before[0]
            self._updates += updates - self._before[1]
        return losses, should_stop

    def _progress(self, cfg: Any, epoch: Any, now: float) -> Iterator[str]:
        """The line about progress, if the run has a limit."""
        done = _part_done(cfg, self._trainer, epoch)
        if self._done < done < 1:
            left = (now - self._began) * (1 - done) / (done - self._done)
            yield (
                f"progress: update {self._trainer.get_num_updates():,}, epoch {epoch.epoch}, "
                f"{done:.1%} of the run, about {timedelta(seconds=round(left))} left"
            )

    def _note_saving(self) -> None:
        """From now on, note the updates of each checkpoint of the trainer."""
        trainer, save = self._trainer, self._trainer.save_checkpoint
        self._saved = trainer.get_num_updates()

        def save_checkpoint(*arguments: Any, **keywords: Any) -> Any:
            self._saved = trainer.get_num_updates()
            return save(*arguments, **keywords)

        trainer.save_checkpoint = save_checkpoint

    def interrupted(self) -> None:
        """Log what is lost if training ends now."""
        if self._trainer is not None:
            updates = self._trainer.get_num_updates()
            lost = updates - self._saved
            what = f"{lost:,} since the last checkpoint are lost"
            if not self._saved:
                what = "all are lost, because there is no checkpoint yet"
            self._log(f"interrupted at update {updates:,}: {what}")

    def end(self, cfg: Any) -> None:
        """Log the last lines, if there was an update. Call it when the checkpoints are on disk."""
        if self._updates == 0:
            return
        speed = self._tokens / self._seconds
        self._log(
            f"trained: {self._updates:,} update{'s' * (self._updates > 1)}, {self._tokens:,.0f} "
            f"target tokens in {self._seconds:,.1f} s: {speed:,.0f} tokens/s without validation "
            "and saving",
            f"peak memory: {_peak_memory(self._trainer.device)}",
            f"checkpoints: {_checkpoints(cfg.checkpoint, self._trainer.checkpoint_suffix)}",
        )

    def _log(self, *lines: str) -> None:
        if self._trainer.is_data_parallel_master:
            for line in lines:
                logger.info(line)


def _of_epoch() -> tuple[float, int]:
    """(target tokens, updates) in fairseq's meters of the epoch; they count all ranks."""
    meter = metrics.get_meter("train", "wpb")
    return (0.0, 0) if meter is None else (float(meter.sum), int(meter.count))


def _part_done(cfg: Any, trainer: Any, epoch: Any) -> float:
    """The part of the run that is done, by the nearest of its limits; 0 without a limit."""
    limits = cfg.optimization
    parts = (
        (trainer.get_num_updates(), limits.max_update),
        (epoch.epoch - 1 + epoch.iterations_in_epoch / len(epoch), limits.max_epoch),
        (trainer.cumulative_training_time() / 3600, limits.stop_time_hours),
    )
    return max((done / limit for done, limit in parts if limit > 0), default=0.0)


def _settings(cfg: Any, trainer: Any, epoch: Any) -> Iterator[str]:
    """The lines about model, data, precision and optimizer; ``epoch`` is fairseq's iterator."""
    parameters = list(trainer.get_model().parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    arch = getattr(cfg.model, "arch", None) or cfg.model._name
    yield f"model: {arch}, {count:,} parameters" + f", {trained:,} trained" * (trained < count)
    yield f"data: {_data(cfg, trainer, epoch)}"
    yield f"precision: {_precision(cfg.common)} on {_device(trainer.device)}"
    yield (
        f"optimizer: {cfg.optimizer._name}, criterion {cfg.criterion._name}, schedule "
        f"{cfg.lr_scheduler._name}, learning rate {', '.join(map(str, cfg.optimization.lr))}"
    )
    if trainer.device.type == "cpu" and count > _MANY:
        yield (
            "note: a CPU trains so large a model slowly, with seconds or minutes an update: use a "
            "GPU, or a smaller model (docs/train.md, Amount of data)"
        )


def _data(cfg: Any, trainer: Any, epoch: Any) -> str:
    dataset = trainer.task.datasets[cfg.dataset.train_subset]
    parts = dataset.datasets.values() if isinstance(dataset, RoundRobinZipDatasets) else [dataset]
    owners = type(dataset), type(trainer.task)
    kinds = (kind for cls, kind in _SAMPLES.items() if any(issubclass(x, cls) for x in owners))
    count = f"{sum(map(len, parts)):,} {next(kinds, 'samples')}"
    ranks = trainer.data_parallel_world_size
    return (
        f"{_languages(trainer.task)}{count}, "
        f"{len(epoch):,} batch{'es' * (len(epoch) != 1)} an epoch"
        f"{f' and rank ({ranks} ranks)' * (ranks > 1)}{_dictionaries(trainer.task)}"
    )


def _languages(task: Any) -> str:
    pairs = getattr(task, "lang_pairs", None)  # of fairseq's multilingual tasks
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    source, target = (getattr(settings, f"{side}_lang", None) for side in ("source", "target"))
    if pairs is None and source and target:
        pairs = [f"{source}-{target}"]
    return f"{', '.join(pairs)}; " if pairs else ""


def _dictionaries(task: Any) -> str:
    by_language = getattr(task, "dicts", None)  # of fairseq's multilingual tasks
    found = dict(by_language) if isinstance(by_language, dict) else {}
    for side in ("source", "target") if not found else ():
        with contextlib.suppress(NotImplementedError):  # raised by FairseqTask's default property
            found[side] = getattr(task, f"{side}_dictionary")
    present = {name: words for name, words in found.items() if words is not None}
    if not present:
        return ""
    first, *others = present.values()
    if all(words == first for words in others):
        return f"; one dictionary of {len(first):,} words"
    sizes = (f"{name} {len(words):,}" for name, words in present.items())
    return f"; words in the dictionaries: {', '.join(sizes)}"


def _precision(common: Any) -> str:
    for kind in ("fp16", "bf16"):
        if getattr(common, f"memory_efficient_{kind}"):
            return f"{kind} alone"
        if getattr(common, kind):
            products = ", products in fp8" * getattr(common, "fp8", False)
            return f"{kind} with fp32 master weights{products}"
    return "fp16 by torch.amp" if common.amp else "fp32"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads > 1)}"


def _step(trainer: Any) -> str:
    step_taken = getattr(trainer, "step_taken", None)
    return "fairseq's own (a native run)" if step_taken is None else str(step_taken())


def _peak_memory(device: torch.device) -> str:
    if device.type == "cuda":
        # fairseq's own step at times resets torch's peaks to the current values. Reserved memory
        # is seldom released, unlike allocated memory, so its peak is kept.
        return f"{torch.cuda.max_memory_reserved(device) / 2**30:.2f} GiB of the GPU"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return f"{peak / 2**30:.2f} GiB of this process"


def _checkpoints(settings: Any, suffix: str) -> str:
    if settings.no_save:
        return "none, because of --no-save"
    folder = os.path.abspath(settings.save_dir)
    best = getattr(checkpoint_utils.save_checkpoint, "best", None)
    score = "" if best is None else f" ({settings.best_checkpoint_metric} {best:g})"
    names = {
        f"checkpoint_last{suffix}.pt": "" if not settings.no_last_checkpoints else None,
        f"checkpoint_best{suffix}.pt": score,
    }
    found = [
        name + note
        for name, note in names.items()
        if note is not None and PathManager.exists(os.path.join(folder, name))
    ]
    return f"{folder}{': ' * bool(found)}{', '.join(found)}"
