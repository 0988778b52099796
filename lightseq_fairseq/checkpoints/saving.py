"""A state of training, or a model, into a file that is whole or not there."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.fairseq_compat import prepared  # noqa: F401  isort: skip

from fairseq import utils
from fairseq.file_io import PathManager

from lightseq_fairseq.checkpoints import files

# How to go on after a checkpoint that training could not write.
RESUME = (
    "; the checkpoints saved before are intact, so make room and run the same command to continue"
)


def own_storage(state: Any) -> Any:
    """The same nested state with every tensor that is part of a larger one copied out of it.

    ``torch.save`` writes the storage behind a tensor, all of it: a parameter taken out of such a
    file would drag the flat buffer along for ever. Tied tensors stay one.
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


def save(state: Any, path: str, advice: str = "") -> None:
    """``torch.save`` to a local file that is replaced as a whole or not at all.

    Args:
        advice: what the error says behind the reason.

    Raises:
        UserError: the file cannot be written (no space, no permission); ``path`` is as before.
    """
    with files.replaced(path, advice) as file:
        torch.save(state, file)


def copy(source: str, target: str, overwrite: bool = False) -> bool:
    """``fairseq.file_io.PathManager.copy``, with ``target`` replaced as a whole or not at all.

    A real copy and no hard link: stock fairseq, to which a user may return, overwrites
    checkpoint_last.pt in place, and an epoch's checkpoint of the same inode would change with it.

    Raises:
        UserError: as for ``save``.
    """
    if PathManager.path_requires_pathmanager(source) or PathManager.path_requires_pathmanager(
        target
    ):
        return bool(PathManager.copy(source, target, overwrite))
    with open(source, "rb") as file, files.replaced(target, RESUME) as copied:
        shutil.copyfileobj(file, copied, 1 << 24)
    return True
