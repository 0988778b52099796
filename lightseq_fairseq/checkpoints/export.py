"""Exports trained models to other programs: stock fairseq, CTranslate2, readers of safetensors."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq import utils
from fairseq.data import Dictionary, data_utils
from fairseq.models import FairseqLanguageModel

from lightseq_fairseq.base import dictionaries, families, files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import languages, names, saving
from lightseq_fairseq.checkpoints.trained import Trained, has_silu, settings_in, short, sizes_of
from lightseq_fairseq.fairseq_compat.checkpoints import settings_of


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
    advice = (
        "set --data to the folder with the run's dictionaries, which lightseq-preprocess wrote."
    )
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
    elif settings_in(*names_of.values()) and (folder / "dict.txt").exists():
        names_of = dict.fromkeys(names_of, "dict.txt")  # written by lightseq-import
    elif settings_in(*names_of.values()):
        if not (args.source_lang and args.target_lang):
            args.source_lang, args.target_lang = data_utils.infer_language_pair(str(folder))
        if not (args.source_lang and args.target_lang):
            raise UserError(
                f"Neither the checkpoint nor the files in {folder} name the two languages: {advice}"
            )
    files_of = {side: name.format(**vars(args)) for side, name in names_of.items()}
    if getattr(args, "regression_target", False):
        files_of.pop("label", None)
    sizes = dict(zip(("source", "target"), sizes_of(trained.checkpoint["model"])))
    loaded = {}
    for side, name in files_of.items():
        path = folder / name
        try:
            dictionary = loaded[f"{side}_dictionary"] = Dictionary.load(str(path))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({short(error)}): {advice}") from error
        if several:
            languages.add_tokens(dictionary, settings, several)
        for symbol in task.symbols:
            for language in _languages(args, folder) if settings_in(symbol) else [""]:
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


def _languages(args: Namespace, folder: Path) -> list[str]:
    """The languages whose tokens the task adds to the dictionary, in their order."""
    if not getattr(args, "add_lang_token", True):
        return []
    found: list[str] = (args.langs or "").split(",")
    return found if args.langs else sorted(x.name for x in folder.iterdir() if x.is_dir())


def to_fairseq(trained: Trained, output: Path) -> None:
    """Write a checkpoint for stock fairseq and for CTranslate2's FairseqConverter.

    It has no optimizer state. It can be used as any checkpoint, and to start further training.

    Raises:
        UserError: stock fairseq cannot compute the model, or ``output`` cannot be written; it is
            unchanged then.
    """
    _check_stock(trained)
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
    _check_stock(trained)
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
        if output_layer.out_features != sizes_of(trained.checkpoint["model"])[0]:
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
            of_languages = task is not None and bool(settings_in(*task.symbols))
            of_languages |= getattr(trained.args, "lang_tok_replacing_bos_eos", False)
            converter = FairseqConverter(
                str(source), str(found.folder), no_default_special_tokens=of_languages
            )
            converter.convert(str(place), quantization=quantization)
        except OSError:
            raise
        except Exception as error:  # of any type: its own checks, or an AttributeError
            raise UserError(
                f"CTranslate2 cannot convert this model ({short(error)}): export it with --to "
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


def _check_stock(trained: Trained) -> None:
    """Raises UserError if stock fairseq cannot compute the model."""
    what = None
    if not trained.family.native:
        what = f"model that computes the same as {trained.family.name}"
    elif has_silu(trained.args):
        what = "--activation-fn silu"
    if what is not None:
        raise UserError(
            f"fairseq has no {what}: export this model with --to huggingface or --to safetensors."
        )
