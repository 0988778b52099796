"""Loads a checkpoint for an export, or to learn what is in it.

fairseq's own model is built from the checkpoint's options and gets its weights, whichever program
or version wrote the file. So it has current parameter names, float32 weights and complete options.
If the weights do not match the options, the error comes first. The model has no memory of its own:
its weights are read from the checkpoint's file.
"""

from __future__ import annotations

import copy
import re
import textwrap
import zipfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import Family
from lightseq_fairseq.checkpoints import names
from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint
from lightseq_fairseq.layers.adapter import merged


@dataclass
class Trained:
    """A loaded checkpoint, with the model as stock fairseq builds it."""

    checkpoint: dict[str, Any]
    args: Namespace  #: the options, with native fairseq names only
    model: BaseFairseqModel  #: float32, on the CPU; only its parameters have memory
    family: Family  #: of the model
    adapters: dict[str, Tensor]  #: of the file, by name; the model's weights include them


def read(source: Path) -> Trained:
    """Load the model from a checkpoint of this package or of any fairseq version.

    Raises:
        UserError: the file cannot be read, is not a checkpoint, or holds no such model.
    """
    try:
        # Tensors stay in the file until used: the optimizer state is never read.
        state = load_checkpoint(str(source), map_location="cpu", mmap=zipfile.is_zipfile(source))
    except OSError as error:
        raise UserError(
            f"{source} cannot be read ({error.strerror or error}): check its path."
        ) from error
    args, family = _options(state, source)
    adapters = {name: value for name, value in state["model"].items() if ".lora." in name}
    state["model"] = merged(state["model"])
    try:
        source_size, target_size = sizes_of(state["model"])
        task = SimpleNamespace(
            source_dictionary=_stand_in(source_size), target_dictionary=_stand_in(target_size)
        )
        options = copy.copy(args)
        options.load_checkpoint_heads = True  # classification heads
        if has_silu(args):
            options.activation_fn = "relu"  # fairseq cannot build it; the parameters are the same
        with FakeTensorMode():  # shapes without memory
            model = models.build_model(options, task)
        model.upgrade_state_dict(weights := state["model"])
        nn.Module.load_state_dict(model, _in_float32(weights), strict=True, assign=True)
    except Exception as error:  # fairseq and torch raise many types here
        raise UserError(
            f"{source} does not contain the model that its options describe ({short(error)}): use "
            "a checkpoint that training wrote."
        ) from error
    return Trained(state, args, model.eval(), family, adapters)


def _in_float32(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float32, without a copy of those that are; tied ones stay tied."""
    found: dict[tuple[int, torch.Size], Tensor] = {}
    keys = {name: (value.data_ptr(), value.shape) for name, value in weights.items()}
    for name, value in weights.items():
        if keys[name] not in found:
            found[keys[name]] = value.float() if value.is_floating_point() else value
    return {name: found[key] for name, key in keys.items()}


def has_silu(args: Namespace) -> bool:
    return getattr(args, "activation_fn", None) == "silu"


def _options(state: dict[str, Any], source: Path) -> tuple[Namespace, Family]:
    cfg = state.get("cfg") or {}
    found: Any = names.native_cfg({"model": state.get("args") or cfg.get("model")})["model"]
    named = vars(found) if isinstance(found, Namespace) else found or {}
    arch = named.get("arch") or named.get("_name")
    family = families.of_saved(ARCH_MODEL_REGISTRY.get(arch))
    if family is None or not family.exports:
        known = ", ".join(each.name for each in families.FAMILIES if each.exports)
        what = f"a model of --arch {arch}" if arch else "no options of a model"
        raise UserError(
            f"{source} contains {what}, but only models of these kinds can be exported: {known}. "
            "Choose another checkpoint."
        )
    args = Namespace(**named, **{} if "arch" in named else {"arch": arch})
    # These options may be only in the task's section, which CTranslate2 does not read.
    task: Any = cfg.get("task") or {}
    task = vars(task) if isinstance(task, Namespace) else task
    args.task = getattr(args, "task", None) or task.get("_name", family.tasks[0].name)
    record = families.tasks().get(args.task, family.tasks[0])
    for name in (*settings_in(*(record.dictionaries or {}).values(), *record.symbols), "data"):
        setattr(args, name, getattr(args, name, None) or task.get(name))
    for name in ("encoder_embed_path", "decoder_embed_path"):
        if hasattr(args, name):  # pretrained embeddings, not needed any more: may not exist
            setattr(args, name, None)
    return args, family


def settings_in(*names: str) -> list[str]:
    """The settings in the names of dictionary files, such as the languages."""
    return re.findall(r"\{(\w+)\}", " ".join(names))


def sizes_of(weights: dict[str, Any]) -> tuple[int, int]:
    """Sizes of the source and of the target dictionary, according to the model's weights.

    A language model predicts words of its only dictionary, or a part of them. Adaptive inputs have
    an embedding for each band of words. Before fairseq 0.10, RoBERTa's names began with
    "decoder".
    """
    side = "encoder" if any(name.startswith("encoder.") for name in weights) else "decoder"
    bands = rf"{side}\.(sentence_encoder\.)?embed_tokens\.(embeddings\.\d+\.0\.)?weight"
    source = sum(len(value) for name, value in weights.items() if re.fullmatch(bands, name))
    output = "output_projection" if side == "decoder" else "embed_tokens"
    return source, len(weights.get(f"decoder.{output}.weight", range(source)))


def _stand_in(size: int) -> Dictionary:
    """A placeholder dictionary of ``size`` symbols; building a model needs only the size."""
    dictionary = Dictionary()
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary


def short(error: Exception) -> str:
    """The error's text on one line, shortened to 300 characters."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
