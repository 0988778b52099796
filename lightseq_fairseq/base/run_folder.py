"""The folder of a run: commands and Python accept it where they read a checkpoint."""

from __future__ import annotations

import os

from lightseq_fairseq.base.errors import UserError

_BEST_FIRST = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt")  # lightseq-import's is last


def checkpoint_in(path: str) -> str:
    """The checkpoint that commands read for ``path``.

    In the folder of a run, it is the best one, or else the last; in that of an import, its model.

    Raises:
        UserError: the folder has neither.
    """
    if not os.path.isdir(path):
        return path
    for name in _BEST_FIRST:
        if os.path.isfile(os.path.join(path, name)):
            return os.path.join(path, name)
    if os.path.isfile(os.path.join(path, "config.json")):
        raise UserError(
            f"{path} is a folder of transformers: convert it with lightseq-import, and use the "
            "folder that it writes."
        )
    raise UserError(
        f"The folder {path} has no {' or '.join(_BEST_FIRST[:2])}: use a checkpoint file, or the "
        "--save-dir of a training run."
    )
