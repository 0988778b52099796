"""What a launcher logs on the terminal: the lines that a person reads, apart from progress bars.

``--log-level debug`` shows all lines. A file gets all of them: that of a training run (see
`training.report`), of Hydra, or of fairseq's ``--log-file``.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from lightseq_fairseq.cli.words.argv import is_native

LEVEL = "LIGHTSEQ_LOG_LEVEL"  # environment variable, which spawned ranks see too
LEVELS = ("debug", "info", "warning", "error")

# Logger, or a parent of it -> how the messages begin that the terminal does not show.
# Lines before an error for which we have a sentence, and a false one.
_NEVER = {
    # and --sacrebleu: our BLEU is sacrebleu's
    "fairseq_cli.generate": "If you are using BPE|BLEU score is being computed by splitting",
    "fairseq.nan_detector": "Detected nan/inf|gradients: |norms: ",  # all numbers of the model
    "fairseq.dataclass.utils": "Error when composing. Overrides:",  # and the whole configuration
    "fairseq_cli.hydra_train": "Failed to get config name",
    "torch.multiprocessing.spawn": "Terminating process",
}
# Below warnings. The report of a run says the same in one line, or only a developer needs it.
_DETAILS = {
    "fairseq.checkpoint_utils": "Preparing to save",
    "fairseq.data": "",
    "fairseq.distributed": "",
    # A fine-tuned model has a new head.
    "fairseq.models.bart.model": "Overwriting ",
    "fairseq.models.roberta.model": "Overwriting ",
    "fairseq.tasks": "(?!example )",  # --eval-bleu-print-samples
    "fairseq.trainer": "begin training|detected shared|Finished saving|loading train data|"
    "No existing|Preparing to load|Saving checkpoint",
    "fairseq.utils": "",
    "fairseq_cli.generate": "NOTE: hypothesis",  # scores are in base 2, as docs say of the H- lines
    "fairseq_cli.train": "begin validation|criterion: |end of epoch|max tokens|model: |num. |"
    "Start iterating|task: |training on",
    "fairseq_cli.train.lightseq": "command: ",
    "lightseq_fairseq.fairseq_compat.layers": "cuDNN attention is off",
    "lightseq_fairseq.memory.graphs": "captured ",
}


def set_up() -> None:
    """Keeps the lines of the log apart from progress bars."""
    # Before fairseq_cli is imported, whose log handler keeps the stream that it finds.
    if sys.stdout.isatty() and sys.stderr.isatty() and not isinstance(sys.stdout, AboveBars):
        sys.stdout = AboveBars(sys.stdout)


def emit(original: Callable[..., None], handler: Any, record: logging.LogRecord) -> None:
    """``logging.StreamHandler.emit``, only for lines that are shown; files get all lines."""
    if type(handler) is not logging.StreamHandler or is_shown(record):
        original(handler, record)


def is_shown(record: logging.LogRecord) -> bool:
    """Whether the terminal shows a line.

    Only ``--log-level debug`` shows the configuration (15,000 characters) and the modules of the
    model (several lines a layer). A native run shows all other lines of fairseq.
    """
    level = logging.getLevelName(os.environ.get(LEVEL, "info").upper())
    if level == logging.DEBUG:
        return True
    kinds = {kind.__name__ for kind in type(record.msg).__mro__}
    if not kinds.isdisjoint(("DictConfig", "CachedConfig", "Namespace", "Module")):
        return False
    if record.levelno < level or _is_in(_NEVER, record) or hasattr(record, "only_in_files"):
        return False
    return record.levelno >= logging.WARNING or is_native() or not _is_in(_DETAILS, record)


def _is_in(table: Mapping[str, str], record: logging.LogRecord) -> bool:
    """Whether a table has the line: the entry of the logger, or else of its nearest parent."""
    names = [*itertools.accumulate(record.name.split("."), "{}.{}".format)]
    nearest = next((table[name] for name in reversed(names) if name in table), None)
    return nearest is not None and re.match(nearest, record.getMessage()) is not None


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
