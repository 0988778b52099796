"""Saves a training state or a model to a file atomically."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from fairseq import utils
from fairseq.file_io import PathManager
from torch import Tensor

from lightseq_fairseq.base import files

# Advice for the error message if training could not write a checkpoint.
RESUME = (
    "; earlier checkpoints are intact: fix the cause, then run the same command again to resume"
)


def own_storage(state: Any) -> Any:
    """The same nested state, with a copy of each tensor that is a view of a larger storage.

    ``torch.save`` writes the whole storage of a tensor. A parameter loaded from such a file would
    keep the whole flat buffer alive. Tied tensors stay tied.
    """
    copies: dict[Any, Tensor] = {}

    def own(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
            return tensor
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.clone()
        return copies[key]

    return utils.apply_to_sample(own, state)


def without_optimizer(
    args: Any, model: dict[str, Tensor], dictionaries: dict[str, str] | None = None
) -> dict[str, Any]:
    """A checkpoint that fairseq can read, and with which a run can begin.

    Args:
        args: the options, a Namespace.
        dictionaries: their digests, see `base.dictionaries`; None: they are not known.
    """
    return {
        "args": args,
        "model": model,
        "optimizer_history": [
            {
                "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {},
                "num_updates": 0,
            }
        ],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 0, "version": 2},
            **({"dictionaries": dictionaries} if dictionaries else {}),
        },
        "last_optimizer_state": None,
    }


def save(state: Any, path: str, advice: str = "") -> None:
    """``torch.save`` to a local file, which is replaced atomically.

    Args:
        advice: text that the error message adds after the reason.

    Raises:
        UserError: the file cannot be written (no space, no permission); ``path`` is unchanged.
    """
    with files.atomic_writer(path, advice) as file:
        torch.save(state, file)


def copy(source: str, target: str, overwrite: bool = False) -> bool:
    """``fairseq.file_io.PathManager.copy``, but ``target`` is replaced atomically.

    This makes a real copy, not a hard link: stock fairseq, which may resume the run, overwrites
    checkpoint_last.pt in place, and would change an epoch's checkpoint with the same inode.

    Raises:
        UserError: as for ``save``.
    """
    if any(map(PathManager.path_requires_pathmanager, (source, target))):
        return bool(PathManager.copy(source, target, overwrite))
    with open(source, "rb") as file, files.atomic_writer(target, RESUME) as copied:
        shutil.copyfileobj(file, copied, 1 << 24)
    return True
