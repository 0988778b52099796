"""Checkpoints: names that stock fairseq knows, in files that are whole or not there.

A file never mentions this package. Whatever is saved under ``ls_`` names bears the native ones,
and ``use_ls_models`` maps a native Transformer back to ours when it is loaded for translation.
"""

from __future__ import annotations

import logging
import shutil
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# First of all that concerns fairseq: it prepares fairseq for being imported and registers ours.
from lightseq_fairseq.fairseq_compat import prepared  # noqa: F401  isort: skip
from lightseq_fairseq.plugins.transformer import LSTransformerModel  # isort: skip
from lightseq_fairseq.plugins.multilingual import LSMultilingualTransformerModel  # isort: skip

from fairseq import utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.file_io import PathManager
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.multilingual_transformer import MultilingualTransformerModel
from fairseq.models.transformer import TransformerModel
from fairseq.optim import OPTIMIZER_REGISTRY

from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.files import write_atomically
from lightseq_fairseq.plugins.unsupported import unsupported_option

logger = logging.getLogger(__name__)

_PREFIX = "ls_"
_OWN_SETTINGS = ("pack_tokens",)  # of lightseq-train, which fairseq does not know
_REGISTRIES = {
    "arch": ARCH_MODEL_REGISTRY,
    "criterion": CRITERION_REGISTRY,
    "optimizer": OPTIMIZER_REGISTRY,
}


def native_name(kind: str, name: str) -> str:
    """What fairseq calls the component that we call ``name``; other names come back unchanged.

    Args:
        kind: "arch", "criterion" or "optimizer".
        name: as on the command line, ``ls_transformer_iwslt_de_en`` for example.
    """
    registry = _REGISTRIES[kind]
    stripped = name[len(_PREFIX) :]
    if name.startswith(_PREFIX) and name in registry and stripped in registry:
        return stripped
    # An architecture of the user's own: the file holds every option it has set, and fairseq's base
    # architecture fills in only what is missing.
    for model, native in (
        (LSTransformerModel, "transformer"),
        (LSMultilingualTransformerModel, "multilingual_transformer"),
    ):
        if kind == "arch" and issubclass(registry.get(name, object), model):
            return native
    return name


def native_cfg(cfg: Any) -> Any:
    """A copy of a configuration in which every ``ls_`` name is fairseq's, without our settings.

    Args:
        cfg: fairseq's configuration as nested dicts, in which Namespaces may stand for sections
            (``cfg["model"]`` of an architecture from the command line), or one section of it.
    """
    return _renamed(cfg, "")


def _renamed(node: Any, kind: str) -> Any:
    if isinstance(node, Namespace):
        return Namespace(**_renamed(vars(node), kind))
    if not isinstance(node, dict):
        return node
    renamed = {}
    for key, value in node.items():
        if key in _OWN_SETTINGS:
            continue
        if isinstance(value, str):
            of_kind = kind if key == "_name" else key
            renamed[key] = native_name(of_kind, value) if of_kind in _REGISTRIES else value
        else:
            renamed[key] = _renamed(value, "arch" if key == "model" else str(key))
    return renamed


def uses_ls(cfg: Any) -> bool:
    """Whether architecture, criterion or optimizer of a fairseq configuration is one of ours."""
    for kind, section in (
        ("arch", "model"),
        ("criterion", "criterion"),
        ("optimizer", "optimizer"),
    ):
        node = getattr(cfg, section, None)
        name = getattr(node, "_name", None) or getattr(node, kind, None)
        if name and native_name(kind, name) != name:
            return True
    return False


def ls_arch(args: Namespace) -> tuple[str | None, str | None]:
    """The ``ls_`` architecture for the options of a native model.

    Args:
        args: the model's Namespace in a checkpoint; ``_name`` or ``arch`` is its architecture.

    Returns:
        (name, None) where ours can honour every option, (None, sentence) where the sentence names
        one that it cannot, and (None, None) for a model that is no fairseq Transformer.
    """
    arch = getattr(args, "_name", None) or getattr(args, "arch", None) or ""
    name = _PREFIX + arch
    model = ARCH_MODEL_REGISTRY.get(arch)
    ours = model is TransformerModel or model is MultilingualTransformerModel
    if not ours or name not in ARCH_MODEL_REGISTRY:
        return None, None
    reason = unsupported_option(args)
    return (None, reason) if reason else (name, None)


def use_ls_models() -> None:
    """From now on fairseq builds our model for checkpoints of its own Transformer.

    What ours cannot honour stays native, and one line says why. An architecture that the caller
    overrides explicitly is respected. Calling it twice is harmless.
    """
    patching.apply("our models")


def use_native_models() -> None:
    """From now on fairseq builds its own model for checkpoints that name ours.

    fairseq-train writes those where --user-dir has brought it our parts. Calling it twice is
    harmless.
    """
    patching.apply("fairseq's models")


def load_for_ls_models(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """fairseq's ``load_checkpoint_to_cpu`` after `use_ls_models`."""
    return _load(_use_ls_model, original, *args, **options)


def load_for_native_models(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The same after `use_native_models`."""
    return _load(_use_native_model, original, *args, **options)


def _load(
    choose: Callable[[Namespace, dict[str, Any], str], None], original: Callable[..., Any],
    path: str, arg_overrides: Any = None, load_on_all_ranks: bool = False,
) -> Any:  # fmt: skip
    state = original(path, arg_overrides, load_on_all_ranks)
    args: Any = state.get("args") or getattr(state.get("cfg"), "model", None)
    # A model configured by a dataclass is none of fairseq's Transformers.
    if isinstance(args, Namespace) and not {"_name", "arch"} & set(arg_overrides or ()):
        choose(args, state, path)
    return state


def _use_ls_model(args: Namespace, state: dict[str, Any], path: str) -> None:
    name, reason = ls_arch(args)
    if reason:
        logger.info("%s keeps fairseq's own layers: %s", path, reason)
    if name:
        args._name = args.arch = name
        # What the model's builder compares with the dictionaries it is given.
        args.dictionaries = (state.get("extra_state") or {}).get("dictionaries")


def _use_native_model(args: Namespace, state: dict[str, Any], path: str) -> None:
    for key in ("_name", "arch"):
        if isinstance(name := getattr(args, key, None), str):
            setattr(args, key, native_name("arch", name))


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


# How to go on after a checkpoint that training could not write.
RESUME = (
    "; the checkpoints saved before are intact, so make room and run the same command to continue"
)


def save(state: Any, path: str, advice: str = "") -> None:
    """``torch.save`` to a local file that is replaced as a whole or not at all.

    Args:
        advice: what the error says behind the reason.

    Raises:
        UserError: the file cannot be written (no space, no permission); ``path`` is as before.
    """
    write_atomically(path, lambda file: torch.save(state, file), advice)


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
    with open(source, "rb") as file:
        write_atomically(target, lambda out: shutil.copyfileobj(file, out, 1 << 24), RESUME)
    return True
