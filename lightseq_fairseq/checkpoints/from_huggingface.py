"""Converts models of Hugging Face `transformers` to checkpoints of fairseq.

`counterparts` has the correspondence of settings and parameters, `vocabulary` that of rows.
"""

from __future__ import annotations

import copy
import re
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import models
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightseq_fairseq.base import dictionaries, tokenizer
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import (
    counterparts,
    generation_settings,
    matching,
    new_rows,
    saving,
    vocabulary,
)
from lightseq_fairseq.checkpoints.correspondence import Counterpart
from lightseq_fairseq.checkpoints.vocabulary import Vocabulary, read_json

Tensors = dict[str, Tensor]
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_SIDES = ("source", "target")
# The setting of the number of positions, and the tokens of a block in a run without that flag.
_POSITIONS = {
    "masked_lm": ("max_positions", 512),
    "language_modeling": ("max_target_positions", 1024),
}
_CLASSES = "classification_heads.sentence_classification_head.out_proj.weight"
_INDEX = ".index.json"
# The bias of a logit whose probability is 0 in float32. Label smoothing adds all logits to the
# loss, so a larger one would hide the loss of a small vocabulary.
_NEVER = -100.0


class Imported(NamedTuple):
    """A model of `transformers` as fairseq has it.

    Attributes:
        state: the checkpoint.
        vocabularies: of "source" and, if it is another one, of "target".
        classes: of the classification head; 0 without one.
        flags: of lightseq-train for the task of the model; empty for pairs without languages. The
            caller fills in {folder} and {languages}.
    """

    state: dict[str, Any]
    vocabularies: dict[str, Vocabulary]
    classes: int
    flags: str


def write(
    folder: Path, place: Path, output: Path, languages: dict[str, str], texts: Sequence[Path]
) -> tuple[Imported, dict[str, str]]:
    """Write what `to_native` makes: model.pt, dictionaries, the tokenizer and languages.txt.

    Args:
        place: a new folder. output: where it will be, for the checkpoint.

    Returns:
        The model, and the name of the dictionary of each side.
    """
    imported = to_native(folder, place, languages, texts)
    state, vocabularies = imported.state, imported.vocabularies
    args = state["args"]
    args.data = str(output.resolve())
    names = {side: f"dict.{getattr(args, f'{side}_lang', None)}.txt" for side in vocabularies}
    if len(names) == 1:
        names = {"source": "dict.txt"}
    saving.save(saving.own_storage(state), str(place / "model.pt"))
    for side, known in vocabularies.items():
        known.dictionary().save(str(place / names[side]))
        if len(names) == 1 and args.task == "translation" and not known.languages:
            for name in tokenizer.SIDES:  # a search with this folder reads one of each side
                shutil.copyfile(place / names[side], place / f"dict.{name}.txt")
        if known.languages:
            text = "".join(f"{language}\n" for language in known.languages)
            (place / "languages.txt").write_text(text, encoding="utf-8")
    return imported, names


def to_native(
    folder: Path, place: Path, languages: dict[str, str], texts: Sequence[Path]
) -> Imported:
    """The checkpoint of fairseq that computes the same as a folder of `transformers`.

    Tensors stay in the files of the folder until they are read.

    Args:
        place: a new folder, which gets the tokenizer of the result, and its config.json.
        languages, texts: as for `new_rows.change`; empty: all rows stay.

    Raises:
        UserError: the folder is incomplete, or no model of fairseq computes the same.
    """
    if not (folder / "config.json").exists():
        raise UserError(
            f"{folder} has no config.json: choose a folder that save_pretrained of transformers "
            "wrote, or the copy of a repository of Hugging Face."
        )
    config = read_json(folder / "config.json")
    try:
        record = matching.of_config(config)
        args = Namespace(arch=record.arch, task=record.task, **matching.settings(record, config))
    except UserError as error:
        raise UserError(f"{folder} cannot be converted: {error}") from error
    if record is counterparts.MBART and _tokenizer(folder, config).startswith("MBart50"):
        record = counterparts.MBART50
    args.source_lang = args.target_lang = None
    model = parameters(record, folder)
    if len(record.sides) > 1:  # FSMT's field says only whether all tables are one
        first, second = (model.get(table) for table in counterparts.DECODER_TABLES)
        is_one = first is None or second is None or torch.equal(first, second)
        args.share_decoder_input_output_embed = is_one
        args.source_lang, args.target_lang = _languages(folder, config)
    ARCH_CONFIG_REGISTRY[record.arch](args)
    for path in vocabulary.files_of(folder):
        shutil.copyfile(path, place / path.name)
    known: dict[str, Vocabulary] = {}
    rows: list[int] | None = None
    for name, side in record.tables.items():
        if name in model:
            if rows is None and (languages or texts):
                vocabulary.of_folder(folder, record, side, len(model[name]))  # or a UserError
                rows = new_rows.change(place, record, len(model[name]), languages, texts)
            if rows is not None:
                model[name] = model[name][rows]
            if side not in known:
                words = folder if rows is None else place
                known[side] = vocabulary.of_folder(words, record, side, len(model[name]))
            model[name] = _our_rows(model[name], known[side], name == record.own_bias)
    _complete(record, args, model, known, folder)
    loaded = {f"{side}_dictionary": each.dictionary() for side, each in known.items()}
    loaded.setdefault("target_dictionary", loaded["source_dictionary"])
    digests = dictionaries.digests(SimpleNamespace(**loaded))
    if record.task == "translation" and record is not counterparts.MBART:  # which needs --langs
        args.generation = generation_settings.of_folder(place, record, known)
    classes = len(model.get(_CLASSES, ()))
    flags = _flags(record, args, config, classes) if not known["source"].languages else record.flags
    flags = f" {flags}" if flags else ""
    return Imported(saving.without_optimizer(args, model, digests), known, classes, flags)


def _flags(record: Counterpart, args: Namespace, config: dict[str, Any], classes: int) -> str:
    """Flags of lightseq-train for the task of a model without languages."""
    if classes:
        # `transformers` trains a head of one output on numbers, too.
        numbers = classes == 1 or config.get("problem_type") == "regression"
        flags = f"--task sentence_prediction --num-classes {classes}"
        return f"{flags} --regression-target" if numbers else flags
    if record.task not in _POSITIONS:  # translation, the default
        return ""
    setting, usual = _POSITIONS[record.task]
    positions = getattr(args, setting)
    flags = f"--task {record.task}"
    return f"{flags} --tokens-per-sample {positions}" if positions < usual else flags


def parameters(record: Counterpart, folder: Path) -> Tensors:
    """The parameters in a folder of `transformers` under fairseq's names, with its rows.

    Raises:
        UserError: it has no weights, or a file of them cannot be read.
    """
    try:
        return _ours(record, _read(folder))
    except UserError as error:
        raise UserError(f"{folder} cannot be converted: {error}") from error


def has_weights(folder: Path) -> bool:
    """Whether a folder contains weights in one of the formats that are read here."""
    return any((folder / f"{name}{more}").exists() for name in _WEIGHTS for more in ("", _INDEX))


def _tokenizer(folder: Path, config: dict[str, Any]) -> str:
    """The class of the tokenizer of a folder, "" if it names none."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    return str(settings.get("tokenizer_class") or config.get("tokenizer_class") or "")


def _languages(folder: Path, config: dict[str, Any]) -> Sequence[str]:
    """The languages of a model with two vocabularies, after which its dictionaries are called."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    found: list[Any] = config.get("langs") or [settings.get(f"{side}_lang") for side in _SIDES]
    return found if all(found) else _SIDES


def _read(folder: Path) -> Tensors:
    """The parameters in the files of a folder, which stay there until they are used."""
    for name in _WEIGHTS:
        if (folder / name).exists():
            return _read_file(folder / name)
        if (folder / f"{name}{_INDEX}").exists():
            parts = sorted(
                set(read_json(folder / f"{name}{_INDEX}").get("weight_map", {}).values())
            )
            if missing := [part for part in parts if not (folder / part).exists()]:
                raise UserError(
                    f"its part {missing[0]} is missing, of {len(parts)} parts: copy it there, too."
                )
            return {
                key: value for part in parts for key, value in _read_file(folder / part).items()
            }
    raise UserError(f"it has neither {' nor '.join(_WEIGHTS)}: copy the weights there.")


def _read_file(path: Path) -> Tensors:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return dict(torch.load(path, "cpu", weights_only=True, mmap=zipfile.is_zipfile(path)))
    except ImportError as error:
        raise UserError(f"{path.name} needs a package: run pip install safetensors.") from error
    except Exception as error:  # of any type, from a truncated file
        raise UserError(f"{path.name} is truncated or corrupt: copy it again.") from error


def _ours(record: Counterpart, weights: Tensors) -> Tensors:
    """The parameters under fairseq's names, with Hugging Face's rows."""
    model: Tensors = {}
    types = None
    for theirs, value in weights.items():
        full = theirs if theirs.startswith(record.base) else record.base + theirs
        if full == record.types_table:
            types = value[0]
        elif record.logits_bias and theirs.endswith(record.logits_bias):
            if record.own_bias:
                model[record.own_bias] = value[0]
            elif value.any():
                raise UserError(
                    f"its {theirs} is not zero, but fairseq's model has no bias of the logits: it "
                    "cannot compute the same."
                )
        elif full in record.sinusoids:
            _, table = record.table_of_positions
            if not torch.allclose(value.float(), table(*value.shape), atol=1e-3):
                raise UserError(
                    f"its {theirs} is no table of sinusoids, as our model has: it cannot compute "
                    "the same."
                )
        elif not record.ignored or not re.fullmatch(record.ignored, full):
            if (ours := record.ours(theirs)) is None:
                raise UserError(f"its parameter {theirs} is in no model of fairseq.")
            if record.transposed and re.search(record.transposed, theirs):
                value = value.t()
            if record.fused and record.fused in theirs:
                for part, piece in zip("qkv", value.chunk(3)):
                    model[ours.replace("q_proj", f"{part}_proj")] = piece
            else:
                model[ours] = value
    for name in [name for name in model if name.endswith("embed_positions.weight")]:
        if types is not None and types.any():
            model[name] = model[name] + types
        if record.first_position:
            model[name] = torch.nn.functional.pad(model[name], (0, 0, record.first_position, 0))
    return model


def _our_rows(table: Tensor, known: Vocabulary, is_bias: bool) -> Tensor:
    if known.ids == list(range(len(table))):
        return table
    rows = table[[known.spare if number is None else number for number in known.ids]]
    if is_bias:  # the words that only fairseq has get no probability
        rows[[row for row, number in enumerate(known.ids) if number is None]] = _NEVER
    return rows


def _complete(
    record: Counterpart, args: Namespace, model: Tensors, known: dict[str, Vocabulary], folder: Path
) -> None:
    """Adds the parameters that only fairseq stores, and checks the shapes of all, in place."""
    present = [name for name in record.tied if name in model]
    sides = [known.get(side, known["source"]).dictionary() for side in ("source", "target")]
    task = SimpleNamespace(source_dictionary=sides[0], target_dictionary=sides[1])
    with FakeTensorMode():  # shapes without memory
        expected = models.build_model(copy.copy(args), task).state_dict()
    for name, value in expected.items():
        if name in record.tied and name not in model and present:
            model[name] = model[present[0]]
        elif name.endswith(".version"):
            model[name] = torch.tensor([3.0])
        elif name.endswith("_float_tensor"):
            model[name] = torch.zeros(1)
        elif name not in model and record.optional and name.startswith(record.optional):
            model[name] = torch.full(value.shape, float("layer_norm.weight" in name))
        if name not in model or model[name].shape != value.shape:
            has = f"has {list(model[name].shape)}" if name in model else "is missing"
            raise UserError(
                f"{folder} cannot be converted: {record.theirs(name) or name} {has}, but its "
                f"config.json describes {list(value.shape)}: use the config.json of these weights."
            )
