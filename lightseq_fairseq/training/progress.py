"""fairseq's progress bar of an epoch, for lines whose results arrive late.

fairseq's loop writes the line of a log interval when it has launched the last update. The captured
step has no results then, so ``captured`` writes the line when they have arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from fairseq.logging import metrics, progress_bar
from fairseq_cli import train


class EpochProgress:
    """Wraps the bar of an epoch, as fairseq's own wrappers do, and forwards what it lacks.

    Args:
        bar: fairseq's, which may be wrapped by its other wrappers.
        trainer: counts the updates.
        is_due: whether a terminal that has a bar shows the line of the epoch that ends, too.
    """

    def __init__(self, bar: Any, trainer: Any, is_due: Callable[[], bool] = lambda: True) -> None:
        self.wrapped_bar, self._trainer, self._is_due = bar, trainer, is_due
        while hasattr(bar, "wrapped_bar"):
            bar = bar.wrapped_bar
        self._innermost = bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped_bar, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapped_bar)

    @property
    def place(self) -> int | None:
        """The place of the current batch in the epoch, which lines of some formats contain."""
        return getattr(self._innermost, "i", None)

    def log_interval(self, updates: int, place: int | None) -> None:
        """Write the line of the log interval that ends with this update, and begin the next one.

        place: the value of `place` when the update was launched.
        """
        now, self._innermost.i = self.place, place
        stats = train.get_training_stats(metrics.get_smoothed_values("train_inner"))
        self.log(stats, tag="train_inner", step=updates)
        metrics.reset_meters("train_inner")
        self._innermost.i = now

    def print(self, stats: Any, tag: str | None = None, step: int | None = None) -> None:
        """Write the line of an epoch; ``step`` lacks updates that fairseq has not logged."""
        has_bar = isinstance(self._innermost, progress_bar.TqdmProgressBar)
        with _only_in_files() if has_bar and not self._is_due() else nullcontext():
            self.wrapped_bar.print(stats, tag=tag, step=self._trainer.get_num_updates())


@contextmanager
def _only_in_files() -> Iterator[None]:
    """Within the block, the lines of bars are marked for `cli.start.logs`."""

    def mark(record: logging.LogRecord) -> bool:
        record.only_in_files = True
        return True

    progress_bar.logger.addFilter(mark)
    try:
        yield
    finally:
        progress_bar.logger.removeFilter(mark)
