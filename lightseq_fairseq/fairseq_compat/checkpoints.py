"""Checkpoints: safe loading (``weights_only``), without 0.12.2's dead parameters, and saving
without uninitialised memory in the file."""

from __future__ import annotations

import argparse
import collections
import errno
import logging
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import omegaconf
import torch
from fairseq import registry
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters

from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.fairseq_compat.layers import DEAD_PARAMETERS
from lightseq_fairseq.fairseq_compat.overlay import Overlay

logger = logging.getLogger(__name__)


def torch_persistent_save(
    original: Callable[..., None], obj: Any, filename: Any, async_write: bool = False
) -> None:
    # fairseq writes to <name>.tmp first. Two runs in the same folder would overwrite each other's
    # file, a symbolic link of that name is followed, and a failed write leaves the file behind.
    if async_write or not PathManager.supports_rename(filename):
        original(obj, filename, async_write)
    else:
        with files.atomic_writer(filename) as file:
            torch.save(obj, file)


_BUFFER = "_float_tensor"  # marks a module's dtype; fairseq saves it and never initialises it


def with_new_buffer(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # The buffer is uninitialised memory: the files of two identical runs would differ.
    original(self, *args, **kwargs)
    if _BUFFER in self._buffers:  # newer versions have no such buffer
        self._buffers[_BUFFER].zero_()


def upgrade_state_dict_named(
    original: Callable[..., Any], self: Any, state_dict: dict[str, Any], name: str
) -> Any:
    # fairseq replaces the buffer from the file by a new, uninitialised one: set it to zero.
    upgraded = original(self, state_dict, name)
    buffer = state_dict.get(f"{name}.embed_positions.{_BUFFER}")
    if buffer is not None:
        buffer.zero_()
    return upgraded


def load_checkpoint(file: Any, map_location: Any = None, **options: Any) -> Any:
    """``torch.load`` of a fairseq checkpoint, converted so that this fairseq can use it.

    It removes dead parameters of 0.12.2 (`drop_dead_parameters`) and settings of newer versions.

    Raises:
        UserError: as for ``read_checkpoint``, or the file is a checkpoint of the original LightSeq,
            or holds only weights.
    """
    checkpoint = read_checkpoint(file, map_location, **options)
    if is_original_lightseq(checkpoint["model"]):
        raise UserError(
            f"{_name(file)} is a checkpoint of the original LightSeq: convert it to a checkpoint "
            "of fairseq with lightseq-import."
        )
    # Every fairseq checkpoint has one of these keys.
    if not {"optimizer_history", "best_loss"} & checkpoint.keys():
        raise UserError(
            f"{_name(file)} is not a fairseq checkpoint, because it contains weights but no "
            "options of a model: use a checkpoint that training wrote."
        )
    drop_dead_parameters(checkpoint)
    _drop_unknown_settings(checkpoint.get("cfg"))
    return checkpoint


def read_checkpoint(file: Any, map_location: Any = None, **options: Any) -> Any:
    """``torch.load`` of a checkpoint with ``weights_only=True``, with fairseq's types allowed.

    Types passed to ``torch.serialization.add_safe_globals`` are allowed as well.

    Raises:
        UserError: the file holds an object of a type that is not allowed (the message names it),
            is a text file, is truncated or corrupt, or holds no model.
    """
    checkpoint = _load(file, map_location, _checkpoint_globals(), options)
    if not isinstance(checkpoint, dict) or "model" not in checkpoint:
        raise UserError(
            f"{_name(file)} is not a fairseq checkpoint, because it contains no model: check the "
            "path."
        )
    return checkpoint


def open_checkpoint(path: str) -> Any:
    """As ``read_checkpoint``, but the tensors of a zip archive stay in the file until used."""
    return read_checkpoint(path, map_location="cpu", mmap=zipfile.is_zipfile(path))


def settings_of(checkpoint: dict[str, Any], section: str) -> dict[str, Any]:
    """The settings of a checkpoint's task or model; the name is ``_name``, ``task`` or ``arch``."""
    # Checkpoints of fairseq 0.10.2 or older have args instead of cfg.
    found: Any = checkpoint.get("args") or (checkpoint.get("cfg") or {}).get(section) or {}
    return vars(found) if isinstance(found, argparse.Namespace) else dict(found)


def is_original_lightseq(model: dict[str, Any]) -> bool:
    """Whether a state dict is from the original LightSeq, whose layers are flat vectors."""
    return any(name.endswith(".para") for name in model)


def _drop_unknown_settings(cfg: Any) -> None:
    """Removes settings that only a newer fairseq knows from the configuration, in place.

    fairseq-validate builds the task and the criterion of the checkpoint. 0.12 raises an error on a
    setting that they do not have; newer versions drop it, as this function does.
    """
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    if not isinstance(cfg, dict):
        return  # of fairseq 0.10.2 or older
    criteria = registry.REGISTRIES["criterion"]["dataclass_registry"]
    for section, classes in (("task", TASK_DATACLASS_REGISTRY), ("criterion", criteria)):
        settings = cfg.get(section)
        if not isinstance(settings, dict):
            continue  # a task without a dataclass has a Namespace
        known = classes.get(settings.get("_name"))
        if known is not None:
            for name in settings.keys() - known.__dataclass_fields__.keys():
                value = settings.pop(name)
                logger.info(
                    "ignored %s.%s = %s of the checkpoint, which this fairseq does not know",
                    section, name, value,
                )  # fmt: skip


def _load_from_rank(file: Any, map_location: Any = None, **options: Any) -> Any:
    return _load(file, map_location, _checkpoint_globals() + _rank_globals(), options)


# Since torch 2.6 torch.load refuses a fairseq checkpoint ("Weights only load failed"), because it
# contains an argparse.Namespace. Other ranks also call torch.load, on the checkpoint from rank 0.
TORCH = Overlay(torch, load=load_checkpoint)
TORCH_OF_RANKS = Overlay(torch, load=_load_from_rank)


def _load(file: Any, map_location: Any, allowed: list[Any], options: dict[str, Any]) -> Any:
    # On exit, safe_globals removes all types it was given, even those that the user had allowed
    # before. So give it only the types that are missing.
    known = torch.serialization.get_safe_globals()
    missing = [kind for kind in allowed if kind not in known]
    try:
        with torch.serialization.safe_globals(missing):
            return torch.load(file, map_location, **{**options, "weights_only": True})
    except Exception as error:
        # For a truncated archive torch seeks to a negative position, which gives EINVAL.
        failed_to_read = isinstance(error, OSError) and error.errno != errno.EINVAL
        if failed_to_read or isinstance(error, MemoryError):
            raise
        refused = re.search(r"GLOBAL (\S+) (?:was not|whose module)", str(error))
        if isinstance(error, pickle.UnpicklingError) and refused is not None:
            raise UserError(
                f"{_name(file)} contains {refused[1]}, which is not part of a fairseq checkpoint "
                "and could run code when it is loaded: if you trust the file, save it again "
                "without that object."
            ) from None
        if _is_text(file):
            raise UserError(
                f"{_name(file)} is a text file, not a checkpoint: check the path."
            ) from None
        raise UserError(
            f"{_name(file)} is truncated or corrupt: restore it, or use an earlier checkpoint."
        ) from None


def _is_text(file: Any) -> bool:
    """Whether a file begins like text; False for an empty file and a truncated archive."""
    if isinstance(file, (str, os.PathLike)):
        with open(file, "rb") as opened:
            return _is_text(opened)
    file.seek(0)
    beginning = file.read(1000).decode(errors="ignore")
    is_archive = beginning.startswith("PK")
    return (
        bool(beginning.strip())
        and not is_archive
        and all(c.isprintable() or c.isspace() for c in beginning)
    )


def _name(file: Any) -> str:
    if isinstance(file, (str, os.PathLike)):
        return os.fspath(file)
    return str(getattr(file, "name", "the checkpoint that rank 0 sent"))


def _checkpoint_globals() -> list[Any]:
    """Types in checkpoints of fairseq 0.6 to today, besides tensors and containers."""
    allowed: list[Any] = [argparse.Namespace]
    # Before 0.9 the meters were pickled as objects (extra_state["train_meters"]). Files that we
    # make from such a checkpoint (an average, an export) use today's names of these classes.
    for meter in (meters.AverageMeter, meters.TimeMeter, meters.StopwatchMeter):
        allowed += [meter, (meter, f"fairseq.meters.{meter.__name__}")]
    # A metric can be a numpy scalar. numpy 2 has moved the functions that rebuild it, so files use
    # either path.
    allowed += [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}]
    functions: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
    for rebuild in functions:
        for package in ("numpy.core", "numpy._core"):
            allowed.append((rebuild, f"{package}.multiarray.{rebuild.__name__}"))
    return allowed


def _rank_globals() -> list[Any]:
    """Types that rank 0 adds when it sends a checkpoint: the configuration as omegaconf objects."""
    return [
        distributed_utils._TensorPlaceholder,
        omegaconf.DictConfig,
        omegaconf.ListConfig,
        omegaconf.AnyNode,
        omegaconf.base.Metadata,
        omegaconf.base.ContainerMetadata,
        (Any, "typing.Any"),
        collections.defaultdict,
        dict,
        list,
        int,
    ]


def drop_dead_parameters(checkpoint: dict[str, Any]) -> None:
    """Removes the dead parameters of an unrepaired 0.12.2 from a checkpoint, in place.

    They are removed from the model, its moving average (EMA) and Adam's state. They have no
    gradient, but they count in Adam's numbering and, in fp16 runs, in Adam's flat vectors.
    """
    model = checkpoint["model"]
    dead = _dead_names(model)
    if not dead:
        return
    # A state dict lists names in the order of parameters(), but tied weights twice. The second
    # names come after the encoder's layers, so places up to the last dead parameter are the same.
    names = [name for name in model if not name.endswith((".version", "._float_tensor"))]
    places = {place for place, name in enumerate(names) if name in dead}
    sizes = [model[name].numel() for name in names[: max(places) + 1]]
    optimizer = checkpoint.get("last_optimizer_state")
    if isinstance(optimizer, dict) and len(optimizer.get("param_groups", ())) == 1:
        _drop_from_optimizer(optimizer, places, sizes)
    extra_state = checkpoint.get("extra_state") or {}
    for tensors in (model, extra_state.get("ema"), extra_state.get("ema_fp32_params")):
        for name in dead:
            (tensors or {}).pop(name, None)


def _dead_names(model: dict[str, Any]) -> set[str]:
    dead = set()
    for name in model:
        layer, _, parameter = name.rpartition(".")
        if parameter in DEAD_PARAMETERS and f"{layer}.self_attn.q_proj.weight" in model:
            dead.add(name)
    return dead


def _drop_from_optimizer(optimizer: dict[str, Any], dead: set[int], sizes: list[int]) -> None:
    """Removes dead parameters from the optimizer state, in place.

    dead: their places among the parameters. sizes: elements of each parameter up to the last dead.
    """
    group, state = optimizer["param_groups"][0], optimizer["state"]
    if len(group["params"]) > 1:  # one entry per parameter
        kept = [number for place, number in enumerate(group["params"]) if place not in dead]
        optimizer["state"] = {new: state[old] for new, old in enumerate(kept) if old in state}
        group["params"] = list(range(len(kept)))
        return
    for moments in state.values():  # one vector per moment, all parameters concatenated
        for name, moment in moments.items():
            if torch.is_tensor(moment) and moment.dim() == 1 and moment.numel() > sum(sizes):
                head = moment[: sum(sizes)].split(sizes)
                live = [piece for place, piece in enumerate(head) if place not in dead]
                moments[name] = torch.cat([*live, moment[sum(sizes) :]])
