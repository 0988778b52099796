"""Converts models of Hugging Face `transformers` to checkpoints of fairseq, and the reverse.

`counterparts` has the correspondence of settings and parameters, `vocabulary` that of rows.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightseq_fairseq.base import dictionaries, files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import counterparts, saving, vocabulary
from lightseq_fairseq.checkpoints.counterparts import Counterpart
from lightseq_fairseq.checkpoints.export import Dictionaries, Trained
from lightseq_fairseq.checkpoints.vocabulary import Vocabulary, read_json

Tensors = dict[str, Tensor]
_HEADS = "classification_heads."
_HEAD = f"{_HEADS}sentence_classification_head"  # the name in `counterparts`
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NEVER_COPIED = ("*.safetensors", "*.bin", "*.index.json", "*.msgpack", "*.h5", "*.pt", ".*")


class Imported(NamedTuple):
    """A model of `transformers` as fairseq has it.

    Attributes:
        state: the checkpoint.
        vocabularies: of "source" and, if it is another one, of "target".
    """

    state: dict[str, Any]
    vocabularies: dict[str, Vocabulary]


def to_native(folder: Path) -> Imported:
    """The checkpoint of fairseq that computes the same as a folder of `transformers`.

    Tensors stay in the files of the folder until they are read.

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
        record = counterparts.of_config(config)
        args = Namespace(
            arch=record.arch, task=record.task, **counterparts.settings(record, config)
        )
        model = _ours(record, _read(folder))
    except UserError as error:
        raise UserError(f"{folder} cannot be converted: {error}") from error
    if all(table in model for table in counterparts.DECODER_TABLES):
        first, second = (model[table] for table in counterparts.DECODER_TABLES)
        args.share_decoder_input_output_embed = torch.equal(first, second)
    args.source_lang, args.target_lang = config.get("langs", (None, None))
    ARCH_CONFIG_REGISTRY[record.arch](args)
    known: dict[str, Vocabulary] = {}
    for name, side in record.tables.items():
        if name in model:
            if side not in known:
                known[side] = vocabulary.of_folder(folder, record, side, len(model[name]))
            model[name] = _our_rows(model[name], known[side])
    _complete(record, args, model, known, folder)
    loaded = {f"{side}_dictionary": each.dictionary() for side, each in known.items()}
    loaded.setdefault("target_dictionary", loaded["source_dictionary"])
    digests = dictionaries.digests(SimpleNamespace(**loaded))
    return Imported(saving.without_optimizer(args, model, digests), known)


def _read(folder: Path) -> Tensors:
    """The parameters in the files of a folder, which stay there until they are used."""
    for name in _WEIGHTS:
        if (folder / name).exists():
            return _read_file(folder / name)
        if (folder / f"{name}.index.json").exists():
            parts = sorted(set(read_json(folder / f"{name}.index.json")["weight_map"].values()))
            if missing := [part for part in parts if not (folder / part).exists()]:
                raise UserError(
                    f"its part {missing[0]} is missing, of {len(parts)} parts: copy it there, too."
                )
            return {
                key: value for part in parts for key, value in _read_file(folder / part).items()
            }
    raise UserError(f"it has neither {' nor '.join(_WEIGHTS)}.")


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
            if value.any():
                raise UserError(f"its {theirs} is not zero, which fairseq's model lacks.")
        elif not record.ignored or not re.fullmatch(record.ignored, full):
            if (ours := record.ours(theirs)) is None:
                raise UserError(f"it has the parameter {theirs}, which fairseq's model lacks.")
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


def _our_rows(table: Tensor, known: Vocabulary) -> Tensor:
    if known.ids == list(range(len(table))):
        return table
    return table[[known.spare if number is None else number for number in known.ids]]


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
                f"config.json describes {list(value.shape)}."
            )


def to_huggingface(
    trained: Trained, found: Dictionaries, output: Path, tokenizer: Path | None
) -> None:
    """Write the folder ``output``, which ``AutoModel.from_pretrained`` loads.

    Args:
        found: from `export.find_dictionaries`.
        tokenizer: a folder of `transformers` with the tokenizer, whose files are copied, and whose
            rows the embedding gets; None: rows have fairseq's order.

    Raises:
        UserError: no model of `transformers` computes the same, the tokenizer has words that the
            dictionary lacks, or ``output`` cannot be written.
    """
    from safetensors.torch import save_file

    like = {}
    if tokenizer is not None and (tokenizer / "config.json").exists():
        like = read_json(tokenizer / "config.json")
    args = copy.copy(trained.args)
    positions: Any = trained.model.max_positions()
    first, last = positions if isinstance(positions, tuple) else (positions, positions)
    args.max_positions = args.max_source_positions = first
    args.max_target_positions = last
    record, kind = counterparts.of_settings(trained.family, args, like.get("model_type"))
    rows = {side: _their_rows(found.words[side], record, side, tokenizer) for side in record.sides}
    weights = trained.model.state_dict()
    labels = _labels(weights, found)
    config = {
        **{name: value for name, value in like.items() if name != "torch_dtype"},
        **counterparts.config(record, args),
        **{record.sides[side][0]: len(order) for side, order in rows.items()},
        **({} if like else {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}),
        **labels,
        "model_type": kind,
        "architectures": [
            record.types[kind] + (record.classifier if labels else record.classes[0])
        ],
        "dtype": "float32",
    }
    if len(rows) > 1:
        config["langs"] = [args.source_lang, args.target_lang]
    model = _theirs(record, weights, rows, config)
    with files.placed(output) as place:
        if tokenizer is None:
            place.mkdir()
        else:
            shutil.copytree(tokenizer, place, ignore=shutil.ignore_patterns(*_NEVER_COPIED))
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        (place / "config.json").write_text(f"{text}\n")
        save_file(model, place / "model.safetensors", {"format": "pt"})
        shutil.copymode(place / "config.json", place / "model.safetensors")


def _their_rows(
    symbols: list[str], record: Counterpart, side: str, tokenizer: Path | None
) -> list[int]:
    """fairseq's rows in the order of Hugging Face's; rows of new words come last."""
    if tokenizer is None:
        return list(range(len(symbols)))
    known = vocabulary.of_folder(tokenizer, record, side)
    row_of = {word: row for row, word in enumerate(symbols)}
    pairs = [(number, word) for word, number in zip(known.words, known.ids) if number is not None]
    if missing := [word for _, word in pairs if word not in row_of]:
        raise UserError(
            f"The tokenizer in {tokenizer} has {len(missing)} words that the dictionary of the "
            f"model lacks, such as {missing[0]}: use the tokenizer that the dictionary was made "
            "of, or remove --tokenizer."
        )
    new = [row for row, word in enumerate(symbols) if word not in set(known.words)]
    return [row_of[word] for _, word in sorted(pairs)] + new


def _theirs(
    record: Counterpart, weights: Tensors, rows: dict[str, list[int]], config: dict[str, Any]
) -> Tensors:
    """The parameters under Hugging Face's names, with its rows; each has its own memory."""
    model: Tensors = {}
    heads = any(name.startswith(_HEADS) for name in weights)
    first = weights[record.tied[0]].data_ptr() if config["tie_word_embeddings"] else None
    seen: set[int] = set()
    for ours, value in weights.items():
        pointer = value.data_ptr()
        if ours.endswith((".version", "_float_tensor")) or (
            ours in record.tied[1:] and pointer == first
        ):
            continue
        if heads and record.optional and ours.startswith(record.optional):
            continue
        if ours in record.tables and (order := rows[record.tables[ours]]) != list(
            range(len(value))
        ):
            value = value[order]
        if ours.endswith("embed_positions.weight"):
            value = value[record.first_position :]
        theirs = record.theirs(re.sub(rf"^{_HEADS}\w+", _HEAD, ours))
        if theirs is None:  # k and v, which are stored with q
            continue
        if record.fused and record.fused in theirs:
            value = torch.cat([weights[ours.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        if record.transposed and re.search(record.transposed, theirs):
            value = value.t()
        model[theirs] = value.clone() if pointer in seen else value.contiguous()
        seen.add(pointer)
    for theirs in record.sinusoids:
        rows_and_width = config["max_position_embeddings"] + 2, config["d_model"]
        model[theirs] = SinusoidalPositionalEmbedding.get_embedding(*rows_and_width, padding_idx=1)
    if record.logits_bias:
        model[record.logits_bias] = torch.zeros(1, len(rows["source"]))
    if record.types_table:
        model[record.types_table] = torch.zeros(1, next(iter(model.values())).shape[1])
    return model


def _labels(weights: Tensors, found: Dictionaries) -> dict[str, Any]:
    """The fields of config.json for a classification head; {} if there is none."""
    heads = {name.split(".")[1]: len(weights[name]) for name in weights if name.startswith(_HEADS)}
    if not heads:
        return {}
    if len(heads) > 1:
        raise UserError(
            f"The model has several classification heads ({', '.join(heads)}), but a model of "
            "Hugging Face has one: export it with --to safetensors."
        )
    labels = [f"LABEL_{number}" for number in range(*heads.values())]
    if "label" in found.names:
        labels = dictionaries.labels(Dictionary.load(str(found.folder / found.names["label"])))
    return {"id2label": dict(enumerate(labels)), "label2id": {w: n for n, w in enumerate(labels)}}
