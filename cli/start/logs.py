"""What a launcher prints: fairseq's shortened log, with its lines apart from progress bars."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO

LOG_CONFIG = "LIGHTSEQ_LOG_CONFIG"  # environment variable, which spawned ranks see too
_LOGGERS = (
    *(f"fairseq_cli.{name}" for name in ("train", "generate", "interactive", "validate")),
    *("fairseq_cli.eval_lm", "fairseq_cli.preprocess", "fairseq.dataclass.utils"),
)
# Lines before an error for which we have a sentence, by logger.
_BEFORE_ERRORS = {
    "fairseq_cli.hydra_train": "Failed to get config name",
    "torch.multiprocessing.spawn": "Terminating process",
}
_repeated: set[str] = set()  # warnings that `_is_new` has let through


def set_up() -> None:
    """Shortens fairseq's log in this process, and keeps its lines apart from progress bars."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if LOG_CONFIG in os.environ:
            logger.removeFilter(_is_short)
        else:
            logger.addFilter(_is_short)
    for name in _BEFORE_ERRORS:
        logging.getLogger(name).addFilter(_is_not_before_error)
    _repeated.clear()
    logging.getLogger("fairseq.logging.progress_bar").addFilter(_is_new)
    # Before fairseq_cli is imported, whose log handler keeps the stream that it finds.
    if sys.stdout.isatty() and sys.stderr.isatty() and not isinstance(sys.stdout, AboveBars):
        sys.stdout = AboveBars(sys.stdout)


def _is_short(record: logging.LogRecord) -> bool:
    """Log filter: False for fairseq's configuration (15,000 characters), which also precedes some
    errors, and for the list of the model's modules (several lines a layer)."""
    kinds = {kind.__name__ for kind in type(record.msg).__mro__}
    is_long = not kinds.isdisjoint(("DictConfig", "CachedConfig", "Namespace", "Module"))
    return not is_long and not str(record.msg).startswith("Error when composing. Overrides:")


def _is_not_before_error(record: logging.LogRecord) -> bool:
    """Log filter: False for the lines of ``_BEFORE_ERRORS``."""
    return not str(record.msg).startswith(_BEFORE_ERRORS[record.name])


def _is_new(record: logging.LogRecord) -> bool:
    """Log filter: False for a repeated warning, such as that tensorboard is not installed, which
    fairseq gives twice an epoch."""
    if record.levelno < logging.WARNING:
        return True
    message = record.getMessage()
    is_new = message not in _repeated
    _repeated.add(message)
    return is_new


class AboveBars:
    """A terminal's text stream: each write first erases the progress bars of tqdm.

    Otherwise the text would begin in the middle of a bar. A bar draws itself again with its next
    update.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._erased: dict[int, float] = {}  # id of a bar -> time at which it was last drawn
        self._begins_line = True

    def write(self, text: str) -> int:
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is None or not tqdm._instances:  # without a bar, do not wait for its lock
            return self._terminal.write(text)
        with tqdm.get_lock():
            drawn = {id(bar): getattr(bar, "last_print_t", 0.0) for bar in tqdm._instances}
            for bar in tqdm._instances:
                if self._erased.get(id(bar)) != drawn[id(bar)]:
                    bar.clear(nolock=True)
            self._erased = drawn
            if self._begins_line:
                self._terminal.write("\r")  # a bar may leave the cursor in another column
            self._begins_line = text.endswith("\n")
            return self._terminal.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)
