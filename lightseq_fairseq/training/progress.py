"""fairseq's progress bar of an epoch, for lines whose results arrive late.

fairseq's loop writes the line of a log interval when it has launched the last update. The captured
step has no results then, so ``captured`` writes the line when they have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairseq.logging import metrics
from fairseq_cli import train


class EpochProgress:
    """Wraps the bar of an epoch, as fairseq's own wrappers do, and forwards what it lacks.

    Args:
        bar: fairseq's, which may be wrapped by its other wrappers.
        trainer: counts the updates.
    """

    def __init__(self, bar: Any, trainer: Any) -> None:
        self.wrapped_bar, self._trainer = bar, trainer
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
        self.wrapped_bar.print(stats, tag=tag, step=self._trainer.get_num_updates())
