"""Converts models of fairseq to folders of Hugging Face `transformers`."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from lightseq_fairseq.base import dictionaries, families, files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import counterparts, matching, vocabulary
from lightseq_fairseq.checkpoints.correspondence import Counterpart
from lightseq_fairseq.checkpoints.export import find_dictionaries
from lightseq_fairseq.checkpoints.trained import Trained
from lightseq_fairseq.checkpoints.vocabulary import read_json

Tensors = dict[str, Tensor]
_HEADS = "classification_heads."
HEAD = f"{_HEADS}sentence_classification_head"  # the name in `counterparts`
_FIRST_WORDS = {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_NEVER_COPIED = (".safetensors", ".bin", ".index.json", ".msgpack", ".h5", ".pt", ".gitattributes")


def write(trained: Trained, output: Path, data: str | None, tokenizer: Path | None) -> None:
    """Write the folder ``output``, which ``AutoModel.from_pretrained`` loads.

    Args:
        data: the folder with the dictionaries; None for the folder named in the checkpoint.
        tokenizer: a folder of `transformers` with the tokenizer, whose files are copied, and whose
            rows the embedding gets; None: rows have fairseq's order.

    Raises:
        UserError: no model of `transformers` computes the same, the tokenizer has words that the
            dictionary lacks, or ``output`` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

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
    words = _words(trained, data)
    for name, side in record.tables.items():
        if name in weights and len(weights[name]) != len(words[side]):
            raise UserError(
                f"The dictionary has {len(words[side])} words, but the model has "
                f"{len(weights[name])}: set --data to the folder with the run's dictionaries."
            )
    rows = {side: _their_rows(words[side], record, side, tokenizer) for side in record.sides}
    labels = _labels(weights, words.get("label"))
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
    model = _theirs(record, weights, rows, config)
    with files.placed(output) as place:
        place.mkdir()
        for path in tokenizer.iterdir() if tokenizer else ():
            if path.is_file() and not path.name.endswith(_NEVER_COPIED):
                shutil.copyfile(path, place / path.name)
        for side in record.sides if tokenizer else ():
            vocabulary.add(place, record, [words[side][row] for row in rows[side]])
        text = json.dumps(config, indent=2, sort_keys=True, default=str)
        (place / "config.json").write_text(f"{text}\n")
        try:
            save_file(model, place / "model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(place / "config.json", place / "model.safetensors")


def with_positions(args: Any, model: Any) -> None:
    """Set the numbers of positions in a model's options as the model has them."""
    positions = model.max_positions()
    first, last = positions if isinstance(positions, tuple) else (positions, positions)
    args.max_positions = args.max_source_positions = first
    args.max_target_positions = last


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
    new = sorted(row_of[word] for word in row_of.keys() - set(known.words))
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
            value = value if order == list(range(len(value))) else value[order]
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


def _labels(weights: Tensors, labels: list[str] | None) -> dict[str, Any]:
    """The fields of config.json for a classification head; {} if there is none."""
    heads = {name.split(".")[1]: len(weights[name]) for name in weights if name.startswith(_HEADS)}
    if not heads:
        return {}
    if len(heads) > 1:
        raise UserError(
            f"The model has several classification heads ({', '.join(heads)}), but a model of "
            "Hugging Face has one: export it with --to safetensors."
        )
    labels = labels or [f"LABEL_{number}" for number in range(*heads.values())]
    return {"id2label": dict(enumerate(labels)), "label2id": {w: n for n, w in enumerate(labels)}}
