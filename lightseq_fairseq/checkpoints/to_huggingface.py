"""Converts models of fairseq to folders of Hugging Face `transformers`."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from lightseq_fairseq.base import dictionaries, families, files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.tokenizer import JSON, is_unnamed, kept
from lightseq_fairseq.checkpoints import (
    counterparts,
    from_huggingface,
    matching,
    own_tokenizer,
    vocabulary,
)
from lightseq_fairseq.checkpoints.correspondence import Counterpart
from lightseq_fairseq.checkpoints.export import find_dictionaries
from lightseq_fairseq.checkpoints.trained import Trained
from lightseq_fairseq.checkpoints.vocabulary import read_json
from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

Tensors = dict[str, Tensor]
_HEADS = "classification_heads."
HEAD = f"{_HEADS}sentence_classification_head"  # the name in `counterparts`
_FIRST_WORDS = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


class _Plan(NamedTuple):
    """What the model becomes with the tokenizer of a folder, or with fairseq's rows.

    Attributes:
        tokenizer: the folder; None: fairseq's rows.
        record, kind: of the model, and its model_type.
        like: the config.json of the folder; {} if it has none.
        args, weights: options and parameters of the model, under fairseq's names.
        rows: of each side, as `_their_rows` returns them.
        whole: the parameters of the folder, if it has rows that the model lacks.
    """

    tokenizer: Path | None
    record: Counterpart
    kind: str
    like: dict[str, Any]
    args: Namespace
    weights: Tensors
    rows: dict[str, list[int | None]]
    whole: Tensors


def write(
    trained: Trained, output: Path, data: str | None, tokenizer: Path | None, beside: Path
) -> str | None:
    """Write the folder ``output``, which ``AutoModel.from_pretrained`` loads.

    Args:
        data: the folder with the dictionaries; None for the folder named in the checkpoint.
        tokenizer: a folder of `transformers` with the tokenizer, whose files are copied, and whose
            rows the embedding gets. Rows of words that the dictionary lacks are those of the
            weights in this folder. None: the folder's that the data folder has, or that of an
            import; without one, rows have fairseq's order, and the tokenizer is made of the file
            that the data folder has.
        beside: the folder of the checkpoint. If it is an import's, it has the tokenizer.

    Returns:
        Why the folder has no tokenizer; None if it has one.

    Raises:
        UserError: no model of `transformers` computes the same, the tokenizer has words that the
            dictionary lacks and the folder no weights, or ``output`` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    places = str(data or settings_of(trained.checkpoint, "task").get("data") or ".")
    of_run = Path(places.partition(os.pathsep)[0])
    words = _words(trained, data)
    why = None
    given = tokenizer or _of_data(of_run)
    imported = None if given else _of_import(of_run, beside)
    try:
        plan = _plan(trained, words, given or imported)
    except UserError as error:
        if imported is None:
            raise
        plan, why = _plan(trained, words, None), str(error)
    tokenizer, record, kind, like, args, weights, rows, whole = plan
    labels = _labels(weights, words.get("label"), like)
    config = {
        **{name: value for name, value in like.items() if name != "torch_dtype"},
        **matching.config(record, args),
        **{record.sides[side][0]: len(order) for side, order in rows.items()},
        **({} if like else _FIRST_WORDS | record.first_words),
        **labels,
        "model_type": kind,
        "architectures": [
            record.types[kind] + (record.classifier if labels else record.classes[0])
        ],
        "dtype": "float32",
    }
    languages = [getattr(trained.args, f"{side}_lang", None) for side in ("source", "target")]
    if len(rows) > 1 and all(languages):
        config["langs"] = languages
    model = _theirs(record, weights, rows, whole, config)
    with files.placed(output) as place:
        place.mkdir()
        for path in vocabulary.files_of(tokenizer) if tokenizer else ():
            shutil.copyfile(path, place / path.name)
        for side in record.sides if tokenizer else ():
            named = ["" if row is None else words[side][row] for row in rows[side]]
            vocabulary.add(place, record, named)
        if tokenizer is None and why is None:
            try:
                own_tokenizer.write(place, of_run, args, words, args.max_positions)
            except UserError as error:
                why = str(error)
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        (place / "config.json").write_text(f"{text}\n")
        try:
            save_file(model, place / "model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(place / "config.json", place / "model.safetensors")
    return why


def _plan(trained: Trained, words: dict[str, list[str]], tokenizer: Path | None) -> _Plan:
    """What the model becomes.

    Args:
        words: of the dictionaries, in the order of their rows.

    Raises:
        UserError: as `write`.
    """
    like = {}
    if tokenizer is not None and (tokenizer / "config.json").exists():
        like = read_json(tokenizer / "config.json")
    args = copy.copy(trained.args)
    with_positions(args, trained.model)
    weights = trained.model.state_dict()
    preferred = like.get("model_type")
    if trained.family is families.LANGUAGE_MODEL and preferred not in counterparts.XGLM.types:
        _use_embeddings_of_gpt2(args, weights)
    record, kind = matching.of_settings(trained.family, args, preferred)
    for name, side in record.tables.items():
        if name in weights and len(weights[name]) != len(words[side]):
            raise UserError(
                f"The dictionary has {len(words[side])} words, but the model has "
                f"{len(weights[name])}: set --data to the folder with the run's dictionaries."
            )
    rows = {side: _their_rows(words[side], record, side, tokenizer) for side in record.sides}
    whole: Tensors = {}
    if tokenizer is not None and any(None in order for order in rows.values()):
        whole = _whole(record, tokenizer, weights)
    return _Plan(tokenizer, record, kind, like, args, weights, rows, whole)


def with_positions(args: Any, model: Any) -> None:
    """Set the numbers of positions in a model's options as the model has them."""
    positions = model.max_positions()
    first, last = positions if isinstance(positions, tuple) else (positions, positions)
    args.max_positions = args.max_source_positions = first
    args.max_target_positions = last


def _of_data(data: Path) -> Path | None:
    """The folder of the tokenizer in a data folder, if it is that of a model of `transformers`."""
    folder = kept(data)
    return folder if folder is not None and (folder / "config.json").is_file() else None


def _of_import(data: Path, beside: Path) -> Path | None:
    """The folder of an import with a tokenizer: the data folder, or the one of the checkpoint.

    None if the data folder has a tokenizer in a folder of its own, which is then the model's.
    """
    if kept(data) is not None:
        return None
    sides = [side for record in counterparts.COUNTERPARTS for side in record.sides.values()]
    tokenizers = {JSON, *(file for _, file in sides)}
    for folder in (data, beside):
        is_model = (folder / "config.json").is_file()
        if is_model and any((folder / name).is_file() for name in tokenizers):
            return folder
    return None


def _use_embeddings_of_gpt2(args: Any, weights: Tensors) -> None:
    """Changes a language model, in place, to one that computes the same without fairseq's scale of
    embeddings and with a table of positions."""
    tokens, output = counterparts.DECODER_TABLES
    if tokens not in weights:  # adaptive inputs, which GPT-2 lacks
        return
    if not args.no_scale_embedding:
        scale = args.decoder_embed_dim**0.5
        weights[tokens] = weights[tokens] * scale
        if args.share_decoder_input_output_embed:
            weights[output] = weights[tokens]
            for name in ("decoder.layer_norm.weight", "decoder.layer_norm.bias"):
                if name in weights:
                    weights[name] = weights[name] / scale
        args.no_scale_embedding = True
    if not args.decoder_learned_pos:
        shape = args.max_target_positions + 2, args.decoder_embed_dim
        weights["decoder.embed_positions.weight"] = SinusoidalPositionalEmbedding.get_embedding(
            *shape, padding_idx=1
        )
        args.decoder_learned_pos = True


def _words(trained: Trained, data: str | None) -> dict[str, list[str]]:
    """The words of the dictionaries "source", "target" and "label", in the order of their rows."""
    found = find_dictionaries(trained, data)
    if "label" not in found.names:
        return found.words
    labels = Dictionary.load(str(found.folder / found.names["label"]))
    return {**found.words, "label": dictionaries.labels(labels)}


def _their_rows(
    symbols: list[str], record: Counterpart, side: str, tokenizer: Path | None
) -> list[int | None]:
    """fairseq's rows in the order of Hugging Face's, None for a word that fairseq's dictionary
    lacks; rows of new words come last."""
    if tokenizer is None:
        return list(range(len(symbols)))
    known = vocabulary.of_folder(tokenizer, record, side)
    row_of = {word: row for row, word in enumerate(symbols)}
    theirs = [w for n, w in sorted((n, w) for w, n in zip(known.words, known.ids) if n is not None)]
    lacking = [word for word in theirs if word not in row_of]
    if not lacking:
        new = sorted(row_of[word] for word in row_of.keys() - set(known.words))
        return [*(row_of[word] for word in theirs), *new]
    if not from_huggingface.has_weights(tokenizer):
        raise UserError(
            f"The tokenizer in {tokenizer} has {len(lacking)} words that the dictionary of the "
            f"model lacks, such as {lacking[0]}: use the tokenizer that the dictionary was made "
            "of, or the folder of the model that it was made of, which has the rows of all words."
        )
    # Names of rows without a word are numbers of other rows here.
    row_of = {word: row for word, row in row_of.items() if not is_unnamed(word)}
    new = sorted(row_of[word] for word in row_of.keys() - set(known.words))
    used = max(number for number, word in enumerate(theirs) if not is_unnamed(word)) + 1
    found = [row_of.get(word) for word in theirs]
    return [*found[:used], *new, *found[used + len(new) :]]


def _whole(record: Counterpart, folder: Path, weights: Tensors) -> Tensors:
    """The parameters of a folder, whose tables have rows that fit the model's.

    Raises:
        UserError: they are of another model.
    """
    whole = from_huggingface.parameters(record, folder)
    for name in record.tables:
        if name in whole and name in weights and whole[name].shape[1:] != weights[name].shape[1:]:
            raise UserError(
                f"The dictionary of the model lacks words of the tokenizer in {folder}, whose "
                f"weights are of another model (an embedding of {list(whole[name].shape)}, not of "
                f"{list(weights[name].shape)}): use the folder that the model was made of."
            )
    return whole


def _restored(value: Tensor, order: list[int | None], whole: Tensor) -> Tensor:
    """A table of all words, of which the model has only some; the others' rows are `whole`'s."""
    table = torch.empty(len(order), *value.shape[1:], dtype=value.dtype)
    table[: len(whole)] = whole[: len(order)]
    known = [(number, row) for number, row in enumerate(order) if row is not None]
    numbers, rows = (list(each) for each in zip(*known))
    table[numbers] = value[rows]
    return table


def _theirs(
    record: Counterpart, weights: Tensors, rows: dict[str, list[int | None]],
    whole: Tensors, config: dict[str, Any],
) -> Tensors:  # fmt: skip
    """The parameters under Hugging Face's names, with its rows; each has its own memory.

    whole: the tables of the rows that the model lacks.
    """
    model: Tensors = {}
    heads = any(name.startswith(_HEADS) for name in weights)
    first = weights[record.tied[0]].data_ptr() if config["tie_word_embeddings"] else None
    seen: set[int] = set()
    for ours, value in weights.items():
        pointer = value.data_ptr()
        theirs = record.theirs(re.sub(rf"^{_HEADS}\w+", HEAD, ours))
        if (
            ours.endswith((".version", "_float_tensor"))
            or (record.fused and re.search(r"\.[kv]_proj\.", ours))  # stored with q
            or (ours in record.tied[1:] and pointer == first)
            or (heads and record.optional and ours.startswith(record.optional))
        ):
            continue
        if theirs is None:
            raise UserError(
                f"The model has the parameter {ours}, which Hugging Face's class lacks: "
                "export it with --to safetensors."
            )
        if ours in record.tables:
            order = rows[record.tables[ours]]
            if None in order:
                named = ours if ours in whole else next(x for x in record.tied if x in whole)
                value = _restored(value, order, whole[named])
            elif order != list(range(len(value))):
                value = value[order]
        if ours.endswith("embed_positions.weight"):
            value = value[record.first_position :]
        if record.fused and record.fused in theirs:
            value = torch.cat([weights[ours.replace("q_proj", f"{part}_proj")] for part in "qkv"])
        if record.transposed and re.search(record.transposed, theirs):
            value = value.t()
        model[theirs] = value.clone() if pointer in seen else value.contiguous()
        seen.add(pointer)
    for theirs in record.sinusoids:
        first, table = record.table_of_positions
        model[theirs] = table(config["max_position_embeddings"] + first, config["d_model"])
    if record.own_bias:
        model[record.logits_bias] = model[record.logits_bias].unsqueeze(0)
    elif record.logits_bias:
        model[record.logits_bias] = torch.zeros(1, len(rows["source"]))
    if record.types_table:
        model[record.types_table] = torch.zeros(1, next(iter(model.values())).shape[1])
    return model


def _labels(weights: Tensors, labels: list[str] | None, like: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json for a classification head; {} if there is none.

    Args:
        labels: of the data; None: those in ``like``, the config.json of an import.
    """
    heads = {name.split(".")[1]: len(weights[name]) for name in weights if name.startswith(_HEADS)}
    if not heads:
        return {}
    if len(heads) > 1:
        raise UserError(
            f"The model has several classification heads ({', '.join(heads)}), but a model of "
            "Hugging Face has one: export it with --to safetensors."
        )
    (count,) = heads.values()
    known = list((like.get("id2label") or {}).values())
    labels = labels or (
        known if len(known) == count else [f"LABEL_{number}" for number in range(count)]
    )
    return {"id2label": dict(enumerate(labels)), "label2id": {w: n for n, w in enumerate(labels)}}
