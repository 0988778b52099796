"""Exports trained models to other programs: stock fairseq, CTranslate2, readers of safetensors.

The export builds fairseq's own model from the checkpoint's options and loads its weights, whichever
program or version wrote the file. So every export has current parameter names, float32 weights and
complete options. If the weights do not match the options, the error comes before anything is
written.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import textwrap
import zipfile
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import models, utils
from fairseq.data import Dictionary, data_utils
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel, FairseqLanguageModel

from lightseq_fairseq.base import dictionaries, families, files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import Family
from lightseq_fairseq.checkpoints import languages, names, saving
from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint, settings_of


@dataclass
class Trained:
    """A loaded checkpoint, with the model as stock fairseq builds it."""

    checkpoint: dict[str, Any]
    args: Namespace  #: the options, with native fairseq names only
    model: BaseFairseqModel  #: float32, on the CPU
    family: Family  #: of the model


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
    try:
        source_size, target_size = _sizes(state["model"])
        task = SimpleNamespace(
            source_dictionary=_stand_in(source_size), target_dictionary=_stand_in(target_size)
        )
        options = copy.copy(args)
        options.load_checkpoint_heads = True  # classification heads
        model = models.build_model(options, task)
        model.load_state_dict(state["model"], strict=True)
    except Exception as error:  # fairseq and torch raise many types here
        raise UserError(
            f"{source} does not contain the model that its options describe ({_short(error)}): use "
            "a checkpoint that training wrote."
        ) from error
    return Trained(state, args, model.eval(), family)


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
    for name in (*_settings_in(*(record.dictionaries or {}).values(), *record.symbols), "data"):
        setattr(args, name, getattr(args, name, None) or task.get(name))
    for name in ("encoder_embed_path", "decoder_embed_path"):
        if hasattr(args, name):  # pretrained embeddings, not needed any more: may not exist
            setattr(args, name, None)
    return args, family


def _settings_in(*names: str) -> list[str]:
    """The settings in the names of dictionary files, such as the languages."""
    return re.findall(r"\{(\w+)\}", " ".join(names))


def _sizes(weights: dict[str, Any]) -> tuple[int, int]:
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


class Dictionaries(NamedTuple):
    """The dictionary files of a model.

    Attributes:
        folder: the data folder.
        names: for "source", "target" and "label", the file's path in the folder.
        words: for each, the word of each row, with those that the task adds.
    """

    folder: Path
    names: dict[str, str]
    words: dict[str, list[str]]


def find_dictionaries(trained: Trained, data: str | None) -> Dictionaries:
    """The model's dictionary files; only models for translation have a "target".

    Args:
        data: the folder to search; None for the folder named in the checkpoint. If the checkpoint
            does not name the languages, they are inferred from the files there, as in fairseq, and
            added to ``trained.args``.

    Raises:
        UserError: a file is missing or is not the model's dictionary, or the model was trained with
            a task that is not known here.
    """
    args = trained.args
    task = families.tasks().get(args.task)
    if task is None or task.dictionaries is None:
        raise UserError(
            f"The model was trained with --task {args.task}, which has dictionaries of another "
            "kind: export it with --to fairseq, without --data."
        )
    places = data or args.data or "."  # args.data is a list in old checkpoints
    folder = Path(utils.split_paths(places)[0] if isinstance(places, str) else places[0])
    advice = "set --data to the folder with the run's dictionaries, as in --data data-bin."
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: {advice}")
    settings = settings_of(trained.checkpoint, "task")
    several = languages.languages_of(settings) if task.name == languages.TASK else []
    if several:
        args.source_lang, args.target_lang = languages.pairs_of(settings)[0].split("-")
    names_of = task.dictionaries
    fixed = Path(settings.get("fixed_dictionary") or "")
    if several and data is None and fixed.is_file():
        folder, names_of = fixed.parent, dict.fromkeys(names_of, fixed.name)
    elif _settings_in(*names_of.values()) and (folder / "dict.txt").exists():
        names_of = dict.fromkeys(names_of, "dict.txt")  # written by lightseq-import
    elif _settings_in(*names_of.values()):
        if not (args.source_lang and args.target_lang):
            args.source_lang, args.target_lang = data_utils.infer_language_pair(str(folder))
        if not (args.source_lang and args.target_lang):
            raise UserError(
                f"Neither the checkpoint nor the files in {folder} name the two languages: {advice}"
            )
    files_of = {side: name.format(**vars(args)) for side, name in names_of.items()}
    if getattr(args, "regression_target", False):
        files_of.pop("label", None)
    sizes = dict(zip(("source", "target"), _sizes(trained.checkpoint["model"])))
    loaded = {}
    for side, name in files_of.items():
        path = folder / name
        try:
            dictionary = loaded[f"{side}_dictionary"] = Dictionary.load(str(path))
        except Exception as error:  # fairseq raises a bare Exception if it cannot decode the file
            raise UserError(f"{path} cannot be read ({_short(error)}): {advice}") from error
        if several:
            languages.add_tokens(dictionary, settings, several)
        for symbol in task.symbols:
            for language in args.langs.split(",") if _settings_in(symbol) else [""]:
                dictionary.add_symbol(symbol.format(langs=language))
        rows = sizes.get(side)
        if rows is not None and len(dictionary) != rows:
            raise UserError(
                f"{path} has {len(dictionary)} words, but the model has {rows}: {advice}"
            )
    extra_state = trained.checkpoint.get("extra_state") or {}
    dictionaries.check(SimpleNamespace(**loaded), extra_state.get("dictionaries"))
    words = {side: loaded[f"{side}_dictionary"].symbols for side in files_of}
    return Dictionaries(folder, files_of, words)


def to_fairseq(trained: Trained, output: Path) -> None:
    """Write a checkpoint for stock fairseq and for CTranslate2's FairseqConverter.

    It has no optimizer state. It can be used as any checkpoint, and to start further training.

    Raises:
        UserError: stock fairseq cannot compute the model, or ``output`` cannot be written; it is
            unchanged then.
    """
    if not trained.family.native:
        raise UserError(
            f"fairseq has no model that computes the same as {trained.family.name}: export this "
            "one with --to huggingface or --to safetensors."
        )
    state = {**trained.checkpoint, "args": None, "last_optimizer_state": None}
    state["model"] = trained.model.state_dict()
    if trained.checkpoint.get("args"):  # from fairseq 0.10.2 or older
        state["args"] = trained.args
    else:
        cfg = state["cfg"] = names.native_cfg(state["cfg"])
        if isinstance(cfg["model"], Namespace):
            cfg["model"] = trained.args
    saving.save(state, str(output))


def to_ctranslate2(
    trained: Trained, found: Dictionaries, output: Path, quantization: str | None
) -> None:
    """Write the folder ``output`` with CTranslate2's model, by its ``FairseqConverter``.

    Args:
        found: from ``find_dictionaries``.
        quantization: CTranslate2's name of the type to store weights in; None keeps float32.

    Raises:
        UserError: CTranslate2 does not support the model, or as for ``to_fairseq``.
    """
    from ctranslate2.converters import FairseqConverter

    if trained.family.not_ctranslate2:
        raise UserError(trained.family.not_ctranslate2)
    if getattr(trained.model, "classification_heads", None):
        raise UserError(
            "CTranslate2 has no classification heads: export this model with --to fairseq or --to "
            "safetensors."
        )
    if isinstance(trained.model, FairseqLanguageModel):
        output_layer = trained.model.decoder.output_projection
        if output_layer is None:
            raise UserError(
                "CTranslate2 has no adaptive softmax: export this model with --to safetensors."
            )
        if output_layer.out_features != _sizes(trained.checkpoint["model"])[0]:
            raise UserError(
                "CTranslate2's language models predict all words of the dictionary, but this one "
                "was trained with --output-dictionary-size: export it with --to safetensors."
            )
    # The converter needs only the options and the weights. Its torch.load refuses other parts of a
    # checkpoint, such as the numpy arrays in the meters of --eval-bleu.
    bare = {"args": trained.args, "cfg": None, "model": trained.checkpoint["model"]}
    with files.placed(output) as place, torch.serialization.safe_globals([Namespace]):
        source = place.with_suffix(".pt")
        to_fairseq(replace(trained, checkpoint=bare), source)
        try:
            # Tokens of languages, which end a source and begin and end a target, are the caller's.
            task = families.tasks().get(trained.args.task)
            of_languages = task is not None and bool(_settings_in(*task.symbols))
            of_languages |= getattr(trained.args, "lang_tok_replacing_bos_eos", False)
            converter = FairseqConverter(
                str(source), str(found.folder), no_default_special_tokens=of_languages
            )
            converter.convert(str(place), quantization=quantization)
        except OSError:
            raise
        except Exception as error:  # of any type: its own checks, or an AttributeError
            raise UserError(
                f"CTranslate2 cannot convert this model ({_short(error)}): export it with --to "
                "fairseq or --to safetensors."
            ) from error


def to_safetensors(trained: Trained, found: Dictionaries, output: Path) -> None:
    """Write the folder ``output``: model.safetensors, config.json and the dictionaries.

    Tied tensors are stored once, as ``safetensors.torch.load_model`` expects.

    Args:
        found: from ``find_dictionaries``.

    Raises:
        UserError: as for ``to_fairseq``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    config = {
        "arch": trained.args.arch,
        "dictionaries": found.names,
        "options": vars(trained.args),
    }
    with files.placed(output) as place:
        place.mkdir()
        for name in found.names.values():
            (place / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(found.folder / name, place / name)
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        (place / "config.json").write_text(f"{text}\n")
        weights = place / "model.safetensors"
        try:
            save_model(trained.model, str(weights))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(place / "config.json", weights)  # safetensors writes with mode 600


def _short(error: Exception) -> str:
    """The error's text on one line, shortened to 300 characters."""
    return textwrap.shorten(str(error), 300, placeholder=" ...") or type(error).__name__
