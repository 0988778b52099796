"""Chooses the model that fairseq builds for a checkpoint: ours or fairseq's own, independent of
which one the file names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from omegaconf import DictConfig, open_dict

from lightseq_fairseq.checkpoints.names import ls_arch, native_name
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.layers.adapter import merged
from lightseq_fairseq.plugins.flat_model import with_dictionaries

logger = logging.getLogger(__name__)


@contextmanager
def building(native: bool) -> Iterator[None]:
    """Within the block fairseq builds our model, or with ``native`` its own, for any checkpoint."""
    ours = load_for_native_models if native else load_for_ls_models
    target = "fairseq.checkpoint_utils:load_checkpoint_to_cpu"
    with patching.within(target, ours, by="checkpoints.models"):
        yield


def load_for_ls_models(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """fairseq's ``load_checkpoint_to_cpu``, so that our model is built for its own Transformer.

    If our model does not support an option, fairseq's own is built, and one log line says why. An
    architecture that the caller overrides explicitly is kept.
    """
    return _load(_use_ls_model, original, *args, **options)


def load_for_native_models(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """fairseq's ``load_checkpoint_to_cpu``, so that its own model is built for ours.

    fairseq-train with our plugins in --user-dir writes checkpoints that name our architectures.
    """
    return _load(_use_native_model, original, *args, **options)


def _load(
    choose: Callable[[Any, dict[str, Any], str], None], original: Callable[..., Any],
    path: str, arg_overrides: Any = None, load_on_all_ranks: bool = False,
) -> Any:  # fmt: skip
    state = original(path, arg_overrides, load_on_all_ranks)
    state["model"] = merged(state["model"])
    args: Any = state.get("args") or getattr(state.get("cfg"), "model", None)
    if args is not None and not {"_name", "arch"} & set(arg_overrides or ()):
        choose(args, state, path)
    return state


def _use_ls_model(args: Any, state: dict[str, Any], path: str) -> None:
    name, reason = ls_arch(args)
    if reason:
        logger.info("%s runs with fairseq's own layers: %s", path, reason)
    if name:
        _rename(args, lambda _: name)
        # build_model compares these digests with the task's dictionaries.
        holder = with_dictionaries(args)
        with open_dict(holder) if isinstance(holder, DictConfig) else nullcontext():
            holder.dictionaries = (state.get("extra_state") or {}).get("dictionaries")


def _use_native_model(args: Any, state: dict[str, Any], path: str) -> None:
    _rename(args, lambda name: native_name("arch", name))


def _rename(args: Any, renamed: Callable[[str], str]) -> None:
    for key in ("_name", "arch"):  # a Namespace from before fairseq 0.10 has only the second
        if isinstance(name := getattr(args, key, None), str):
            setattr(args, key, renamed(name))
