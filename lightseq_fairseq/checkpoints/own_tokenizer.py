"""Writes a tokenizer of Hugging Face `transformers` for a model whose data have one tokenizer file.

The file is a model of sentencepiece or a tokenizer.json. `transformers` itself converts a model of
sentencepiece. Only the ids change here: they become rows of fairseq's dictionary.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightseq_fairseq.base import tokenizer
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints.vocabulary import read_json

_FIRST = ("<s>", "<pad>", "</s>", "<unk>")
_UNKNOWN = _FIRST.index("<unk>")
_WORD, _CHAR, _UNIGRAM = 3, 4, 1  # TrainerSpec.ModelType of sentencepiece


def write(
    place: Path, data: Path, args: Namespace, words: dict[str, list[str]], positions: int
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which ``AutoTokenizer`` loads.

    Args:
        place: the folder to write to.
        data: the data folder.
        args: options of the trained model.
        words: of the dictionaries, in the order of their rows.
        positions: of the model.

    Raises:
        UserError: there is no tokenizer that computes the same, or a package is missing.
    """
    folder = tokenizer.kept(data)
    if folder is None:
        raise UserError(
            f"{data} has no tokenizer: its text was split before lightseq-preprocess. For a "
            "tokenizer, split raw text by lightseq-preprocess --sentencepiece MODEL"
        )
    source, target = (tokenizer.of_folder(folder, side) for side in tokenizer.SIDES)
    if source != target or words.get("target", words["source"]) != words["source"]:
        raise UserError(
            "source and target have different words. For a tokenizer, use one model of "
            "sentencepiece or one tokenizer.json for both"
        )
    ends = _ends(args, source)
    path = source.path
    spm = path.suffix != ".json"
    whole = _converted(path) if spm else read_json(path)
    _renumber(whole, words["source"], spm)
    if spm and args.task == "language_modeling":
        # The pipeline of transformers decodes the new tokens alone, and adds them to the prompt:
        # their first space must stay.
        steps = whole["decoder"]["decoders"]
        whole["decoder"]["decoders"] = [step for step in steps if step["type"] != "Strip"]
    try:
        from tokenizers import Tokenizer as Backend
        from tokenizers.normalizers import Sequence, Strip
        from tokenizers.processors import TemplateProcessing
    except ImportError as error:
        raise UserError(
            "a package is not installed. Run pip install tokenizers and export again with --force"
        ) from error

    backend: Any = Backend.from_str(json.dumps(whole))
    backend.no_truncation()
    backend.no_padding()
    strip, given = Strip(), backend.normalizer  # lightseq-preprocess strips lines
    backend.normalizer = strip if given is None else Sequence([strip, given])
    single, pair = ends
    backend.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(place / "tokenizer.json"))
    unknown = whole["model"].get("unk_token") or "<unk>"
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": unknown},
        **({"mask_token": "<mask>"} if "<mask>" in words["source"] else {}),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": positions,
        # "</s>" in a text is text, as in lightseq-preprocess; only RoBERTa's <mask> is no text.
        "split_special_tokens": "<mask>" not in words["source"],
        "padding_side": "left" if args.task == "language_modeling" else "right",
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (place / "tokenizer_config.json").write_text(f"{text}\n")


def _ends(args: Namespace, source: tokenizer.Tokenizer) -> tuple[str, str]:
    """The template of one text and of two, with the special words that the task adds."""
    if args.task == "translation":
        single = f"{source.source('')} $A </s>".strip()
        return single, f"{single} $B </s>"
    if args.task == "language_modeling":
        first = "<s>" if getattr(args, "add_bos_token", False) else "</s>"
        return f"{first} $A", f"{first} $A </s> $B"
    if args.task in ("masked_lm", "denoising"):
        return "<s> $A </s>", "<s> $A </s> </s> $B </s>"
    if args.task == "sentence_prediction":
        first = "<s> " if args.init_token == 0 else ""
        between = "</s> " if args.separator_token == 2 else ""
        return f"{first}$A </s>", f"{first}$A </s> {between}$B </s>"
    raise UserError(
        f"the task {args.task} adds words, such as languages, that this command cannot write. "
        "Begin with a model of transformers (lightseq-import) for a tokenizer"
    )


def _converted(path: Path) -> Any:
    """The content of a tokenizer.json that splits text as a model of sentencepiece does."""
    try:
        from transformers.convert_slow_tokenizer import SpmConverter, import_protobuf

        proto = import_protobuf().ModelProto()
        convert: Callable[..., Any] = SpmConverter.build_tokenizer_from_spm_proto
    except (ImportError, AttributeError) as error:
        raise UserError(
            "a model of sentencepiece needs packages that are not installed. Run "
            "pip install 'transformers>=5.17' protobuf and export again with --force"
        ) from error
    proto.ParseFromString(path.read_bytes())
    kind = proto.trainer_spec.model_type
    if kind == _WORD or proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(
            "the model of sentencepiece has model_type=word or treat_whitespace_as_suffix, which "
            "the package tokenizers does not support. Train one without these options"
        )
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if kind in (_UNIGRAM, _CHAR):
        return json.loads(convert(proto, pieces).to_str())
    return json.loads(convert(proto, {name: row for row, (name, _) in enumerate(pieces)}).to_str())


def _renumber(whole: Any, words: list[str], spm: bool) -> None:
    """Replace the ids in the content of a tokenizer.json, in place, by rows of a dictionary."""
    rows = {word: row for row, word in enumerate(words)}

    def row(piece: str, number: int) -> int:
        word = tokenizer.name(piece, number)
        if word not in rows:
            raise UserError(
                f"the dictionary lacks words of the tokenizer, such as {word}. For a tokenizer, "
                "remove --srcdict and --tgtdict from lightseq-preprocess"
            )
        return rows[word]

    special = [word for word in (*_FIRST, "<mask>") if word in rows]
    more = {each["content"]: each for each in whole["added_tokens"]}
    for each in more.values():
        each["id"] = row(each["content"], each["id"])
    for word in special:
        marks = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
        entry = {"id": rows[word], "content": word, "lstrip": word == "<mask>", **marks}
        more.setdefault(word, entry)
    whole["added_tokens"] = sorted(more.values(), key=lambda each: each["id"])
    model = whole["model"]
    if isinstance(model["vocab"], dict):
        named = {piece: row(piece, number) for piece, number in model["vocab"].items()}
        model["vocab"] = named | {word: each["id"] for word, each in more.items()}
        if spm:
            model["unk_token"] = "<unk>"
        return
    # Unigram: a row's number is its place. The penalty of unknown characters depends on the lowest
    # score, so rows that the tokenizer lacks get this score.
    lowest = min(score for _, score in model["vocab"])
    table = [[word, lowest] for word in words]
    for number, (piece, score) in enumerate(model["vocab"]):
        if number != model["unk_id"]:
            table[row(piece, number)] = [piece, score]
    model["vocab"] = table
    if model["unk_id"] is not None:  # fairseq looks such characters up, and finds <unk>
        model["unk_id"] = _UNKNOWN
