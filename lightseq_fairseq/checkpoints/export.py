"""Trained models for other programs: stock fairseq, CTranslate2, and whoever reads safetensors.

Whichever program or version wrote the checkpoint, fairseq's own Transformer is built from its
options and takes its weights. So every export has today's names, float32 and complete options, and
a file whose weights are not those of its options is found before anything is written.
"""

from __future__ import annotations

import copy
import json
import shutil
import textwrap
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightseq_fairseq.checkpoints import names  # isort: skip  (prepares fairseq for the imports below)

from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel

from lightseq_fairseq.checkpoints import dictionaries, files, saving
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint


@dataclass
class Trained:
    """What a checkpoint holds, as stock fairseq has it."""

    checkpoint: dict[str, Any]
    args: Namespace  #: the options, native names throughout
    model: TransformerModel  #: float32, on the CPU


def read(source: Path) -> Trained:
    """The translation Transformer of a checkpoint of this package or of any fairseq.

    Raises:
        UserError: the file cannot be read, is no checkpoint, or holds no such model.
    """
    try:
        with source.open("rb") as file:
            state = load_checkpoint(file, map_location="cpu")
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror or error})") from error
    args = _options(state, source)
    try:
        sizes = {side: _rows(state["model"], side) for side in ("encoder", "decoder")}
        task = SimpleNamespace(
            source_dictionary=_stand_in(sizes["encoder"]),
            target_dictionary=_stand_in(sizes["decoder"]),
        )
        model = TransformerModel.build_model(args, task)
        model.load_state_dict(state["model"], strict=True)
    except Exception as error:  # of any layer of fairseq's and torch's
        raise UserError(
            f"{source} does not hold the model that its options describe ({_short(error)})"
        ) from error
    return Trained(state, args, model.eval())


def _options(state: dict[str, Any], source: Path) -> Namespace:
    cfg = state.get("cfg") or {}
    found: Any = names.native_cfg({"model": state.get("args") or cfg.get("model")})["model"]
    named = vars(found) if isinstance(found, Namespace) else found or {}
    arch = named.get("arch") or named.get("_name")
    if not isinstance(found, Namespace) or ARCH_MODEL_REGISTRY.get(arch) is not TransformerModel:
        what = f"of --arch {arch}" if arch else "without the options of one"
        raise UserError(
            f"{source} holds a model {what}: fairseq's Transformer for translation is what can be "
            "exported"
        )
    args = copy.copy(found)
    # The command line may have left these to the task, where CTranslate2 does not look.
    task: Any = cfg.get("task") or {}
    task = vars(task) if isinstance(task, Namespace) else task
    for name in ("source_lang", "target_lang", "data"):
        setattr(args, name, getattr(args, name, None) or task.get(name))
    args.task = getattr(args, "task", None) or task.get("_name", "translation")
    # Files with initial values, which may be gone and matter no more.
    args.encoder_embed_path = args.decoder_embed_path = None
    return args


def _rows(weights: dict[str, Any], side: str) -> int:
    return len(weights[f"{side}.embed_tokens.weight"])


def _stand_in(size: int) -> Dictionary:
    """A dictionary of that many symbols: a model asks no more of one."""
    dictionary = Dictionary()
    for number in range(size - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary


def find_dictionaries(trained: Trained, data: str | None) -> dict[str, Path]:
    """The files of the "source" and the "target" dictionary, which belong to the model.

    Args:
        data: the folder to look in; None for the one that the checkpoint names. Languages that the
            checkpoint does not name come from the files there, as in fairseq, and join its options.

    Raises:
        UserError: no such file, another dictionary, or a task with other dictionaries.
    """
    args = trained.args
    if args.task != "translation":
        raise UserError(
            f"the model was trained with --task {args.task}, whose dictionaries are its own: "
            "export it with --to fairseq, without --data"
        )
    places = data or args.data or "."  # a list in old checkpoints
    folder = Path(utils.split_paths(places)[0] if isinstance(places, str) else places[0])
    advice = "name the folder with the run's dictionaries, as in --data data-bin"
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: {advice}")
    if not (args.source_lang and args.target_lang):
        args.source_lang, args.target_lang = data_utils.infer_language_pair(str(folder))
    if not (args.source_lang and args.target_lang):
        raise UserError(
            f"neither the checkpoint nor the files in {folder} name the two languages: {advice}"
        )
    paths, loaded = {}, {}
    for side, language, part in (
        ("source", args.source_lang, "encoder"),
        ("target", args.target_lang, "decoder"),
    ):
        path = paths[side] = folder / f"dict.{language}.txt"
        try:
            dictionary = loaded[f"{side}_dictionary"] = Dictionary.load(str(path))
        except Exception as error:  # fairseq raises that itself for what it cannot decode
            raise UserError(f"{path} cannot be read ({_short(error)}): {advice}") from error
        rows = _rows(trained.checkpoint["model"], part)
        if len(dictionary) != rows:
            raise UserError(
                f"{path} makes {len(dictionary)} symbols and the model has {rows}: {advice}"
            )
    extra_state = trained.checkpoint.get("extra_state") or {}
    dictionaries.check(SimpleNamespace(**loaded), extra_state.get("dictionaries"))
    return paths


def to_fairseq(trained: Trained, output: Path) -> None:
    """Write a checkpoint for stock fairseq and for CTranslate2's FairseqConverter.

    It is to translate with and to train further, without the optimizer's state.

    Raises:
        UserError: ``output`` cannot be written, and is not there.
    """
    state = {**trained.checkpoint, "args": None, "last_optimizer_state": None}
    state["model"] = trained.model.state_dict()
    if trained.checkpoint.get("args"):  # from before fairseq 0.10.2
        state["args"] = trained.args
    else:
        state["cfg"] = {**names.native_cfg(state["cfg"]), "model": trained.args}
    saving.save(state, str(output))


def to_ctranslate2(
    trained: Trained, paths: dict[str, Path], output: Path, quantization: str | None
) -> None:
    """Write the folder ``output`` with CTranslate2's model, by its ``FairseqConverter``.

    Args:
        paths: from ``find_dictionaries``.
        quantization: the type of CTranslate2's to store weights in; None keeps float32.

    Raises:
        UserError: CTranslate2 has no such model, or as for ``to_fairseq``.
    """
    from ctranslate2.converters import FairseqConverter

    # The converter reads the options and the weights, and its torch.load refuses what else a
    # checkpoint holds: meters of --eval-bleu count in numpy arrays.
    bare = {key: trained.checkpoint.get(key) for key in ("args", "cfg", "model")}
    with files.placed(output) as place, torch.serialization.safe_globals([Namespace]):
        source = place.with_suffix(".pt")
        to_fairseq(replace(trained, checkpoint=bare), source)
        try:
            converter = FairseqConverter(str(source), str(paths["source"].parent))
            converter.convert(str(place), quantization=quantization)
        except OSError:
            raise
        except Exception as error:  # of any kind: its checks, and attributes that it does not find
            raise UserError(f"CTranslate2 cannot convert this model ({_short(error)})") from error


def to_safetensors(trained: Trained, paths: dict[str, Path], output: Path) -> None:
    """Write the folder ``output``: model.safetensors, config.json and the dictionaries.

    A tensor with several names is there once, as ``safetensors.torch.load_model`` expects it.

    Args:
        paths: from ``find_dictionaries``.

    Raises:
        UserError: as for ``to_fairseq``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    config = {
        "arch": trained.args.arch,
        "dictionaries": {side: path.name for side, path in paths.items()},
        "options": vars(trained.args),
    }
    with files.placed(output) as place:
        place.mkdir()
        for path in paths.values():
            shutil.copyfile(path, place / path.name)
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        (place / "config.json").write_text(f"{text}\n")
        weights = place / "model.safetensors"
        try:
            save_model(trained.model, str(weights))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(place / "config.json", weights)  # safetensors' own is the user's alone


def _short(error: Exception) -> str:
    """Its text on one line, without the end of a long list."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
