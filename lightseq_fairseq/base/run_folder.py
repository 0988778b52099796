"""The folder of a run: commands and Python accept it where they read a checkpoint."""

from __future__ import annotations

import os

from lightseq_fairseq.base.errors import UserError

_BEST_FIRST = ("checkpoint_best.pt", "checkpoint_last.pt")


def checkpoint_in(path: str) -> str:
    """The best checkpoint, or else the last one, if ``path`` is the folder of a run; else ``path``.

    Raises:
        UserError: the folder has neither.
    """
    if not os.path.isdir(path):
        return path
    for name in _BEST_FIRST:
        if os.path.isfile(os.path.join(path, name)):
            return os.path.join(path, name)
    raise UserError(
        f"The folder {path} has no {' or '.join(_BEST_FIRST)}: use a checkpoint file, or the "
        "--save-dir of a training run."
    )
