"""Tokenizers, BPE and scorers, with the settings of each.

Sentences are translated by our model and by fairseq's. The printed text, the encoded sentences and
the calls to packages agree, and each setting changes some of them. Packages that are not installed
have stand-ins. In training these settings are only saved in the checkpoint.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import pytest
import sacrebleu
import torch
from fairseq import file_utils
from fairseq.registry import REGISTRIES
from fairseq.tasks.translation import TranslationTask
from helpers.flag_runs import Proofs, launch, pieces, prove, proven, table

from lightseq_fairseq.base import tokenizer
from lightseq_fairseq.plugins.settings import ENCODING as OF_ENCODING

PIECES = ["w1", "w2"]
# Package -> the answers of its stand-in
PACKAGES: dict[str, dict[str, Any]] = {
    "fastBPE": {"fastBPE.return_value.apply.return_value": ["w1 w2"]},
    "tokenizers": {
        "ByteLevelBPETokenizer.return_value.encode.return_value.ids": [5, 6],
        "ByteLevelBPETokenizer.return_value.decode.return_value": "text",
        "Tokenizer.from_file.return_value.encode.return_value.tokens": PIECES,
        "Tokenizer.from_file.return_value.encode.return_value.ids": [5, 6],
        "Tokenizer.from_file.return_value.decoder.decode.return_value": "text",
    },
    "transformers": {
        "BertTokenizer.return_value.tokenize.return_value": PIECES,
        "BertTokenizer.return_value.convert_tokens_to_string.return_value": "text",
        "BertTokenizer.return_value.clean_up_tokenization.return_value": "text",
    },
    "sentencepiece": {
        "SentencePieceProcessor.return_value.Encode.return_value": PIECES,
        "SentencePieceProcessor.return_value.EncodeAsPieces.return_value": PIECES,
    },
    "editdistance": {"eval.return_value": 1},
    "bert_score": {"score.return_value": (None, None, torch.ones(1))},
}
# Component -> its settings. {codes} is a file of subword-nmt's, {encoder} and {merges} are GPT-2's,
# {folder} has a tokenizer.json.
COMPONENTS = {
    "--tokenizer moses": "--moses-no-dash-splits --moses-no-escape",
    "--bpe fastbpe": "--bpe-codes {codes}",
    "--bpe subword_nmt": "--bpe-codes {codes} --bpe-separator ##",
    "--bpe hf_byte_bpe": "--bpe-merges {codes} --bpe-vocab {codes} --bpe-add-prefix-space",
    "--bpe bert": "--bpe-vocab-file {codes} --bpe-cased",
    "--bpe gpt2": "--gpt2-encoder-json {encoder} --gpt2-vocab-bpe {merges}",
    "--bpe sentencepiece": "--sentencepiece-model {codes} --sentencepiece-enable-sampling "
    "--sentencepiece-alpha 0.5",
    "--bpe byte_bpe": "--sentencepiece-model-path {codes}",
    "--bpe tokenizer_folder": "--tokenizer-folder {folder}",
}
SCORERS = {
    "--scoring sacrebleu": "--sacrebleu-tokenizer none --sacrebleu-lowercase "
    "--sacrebleu-char-level",
    "--scoring wer": "--wer-tokenizer 13a --wer-remove-punct --wer-char-level --wer-lowercase",
    "--scoring bert_score": "--bert-score-lang de",
}
ENCODING = set(OF_ENCODING.split())
LINES = [f"{component} {settings}" for component, settings in COMPONENTS.items()]
SCORING = [f"{component} {settings}" for component, settings in SCORERS.items()]
# For a binarised test set, whose sentences are not encoded.
DECODING = [" ".join(x for x in pieces(line) if x.split()[0] not in ENCODING) for line in LINES]
PROVEN: Proofs = {
    ("train", table.WORKS): proven(*LINES, *SCORING),
    ("interactive", table.WORKS): proven(*LINES),
    ("generate", table.WORKS): proven(*DECODING, *SCORING),
    ("generate", table.UNREAD): ENCODING,
}
LANGUAGES = "-s de -t en "
FAILED = "failed:"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of words that tokenizers treat specially, data of digits, and a model for each."""
    place = tmp_path_factory.mktemp("place")
    for name, words in (("words", ["Ab@@", "c##", ",", "d'e", "F.", "x-y"]), ("numbers", "123456")):
        cli_runs.write_text(place / name / "text", words=6)
        for file in (place / name / "text").iterdir():
            text = re.sub(r"[vw](\d)", lambda m: words[int(m[1])], file.read_text())  # noqa: B023
            file.write_text(text)
        prefixes = (f"--{split}pref {place}/{name}/text/{split}" for split in cli_runs.SPLITS)
        line = f"{LANGUAGES} --padding-factor 1 --destdir {place}/{name}/data {' '.join(prefixes)}"
        cli_runs.succeed("preprocess", *line.split())
        launch("train", place / name / "data", place / name, "", ok=True)
    (place / "codes").write_text("#version: 0.2\na b</w>\n")
    (place / "other").write_text("#version: 0.2\nx y</w>\n")
    letters = [chr(i) for i in range(33, 127)] + ["Ġ", "ab"]
    (place / "encoder").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (place / "folder").mkdir()
    (place / "folder/tokenizer.json").write_text("{}")
    (place / "merges").write_text("#version: 0.2\na b\n")
    (place / "words" / "text" / "test.de").write_text("ab-cd it's & ab , x-y\nab c##\n")
    return place


@contextmanager
def watched(place: Path) -> Iterator[list[str]]:
    """Stand-ins for packages; at the end the list holds the calls to them and the files that were
    read."""
    told: list[str] = []
    tokenizer._opened.cache_clear()
    packages = {name: mock.MagicMock(**answers) for name, answers in PACKAGES.items()}

    def cached_path(path: str) -> str:
        told.append(f"reads {path}")
        return str(place / ("merges" if "bpe" in path else "encoder")) if "://" in path else path

    with (
        mock.patch.dict(sys.modules, packages),
        mock.patch.object(file_utils, "cached_path", cached_path),
        mock.patch.object(sacrebleu, "corpus_bleu", side_effect=sacrebleu.corpus_bleu) as bleu,
    ):
        yield told
    told += [str(call) for package in (*packages.values(), bleu) for call in package.mock_calls]
    # With --native, nobody asks which word a tokenizer adds before a source.
    told[:] = [call for call in told if ".encode('')" not in call]


def words(place: Path, line: str) -> list[str]:
    for name in ("codes", "encoder", "merges", "folder"):
        line = line.replace(f"{{{name}}}", str(place / name))
    return [*LANGUAGES.split(), *line.split()]


def shown(command: str, place: Path, line: str, native: bool) -> list[str]:
    """What a command prints about the sentences, how it encodes them, and its calls to packages."""
    lines_of = TranslationTask.get_interactive_tokens_and_lengths
    data = place / ("numbers" if "gpt2" in line or "hf_byte" in line else "words") / "data"
    with watched(place) as told:

        def read(task: Any, lines: Any, encode: Any) -> Any:
            told.extend(encode(text) for text in lines)
            return lines_of(task, lines, encode)

        with mock.patch.object(TranslationTask, "get_interactive_tokens_and_lengths", read):
            line = " ".join(words(place, line)) + " --native" * native
            result = launch(command, data, data.parent / "checkpoint_last.pt", line)
    if result.exit_code:
        return [f"{FAILED} {result.stderr} {result.exception}"]
    told += re.findall(r"^(?:[STHD]-\d+\t|Generate ).*", result.stdout, re.MULTILINE)
    # Our scores equal fairseq's up to rounding.
    return [re.sub(r"(\t-?\d+\.\d{3})\d+", r"\1", text) for text in told]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        *itertools.product(["interactive"], LINES),
        *itertools.product(["generate"], [*DECODING, *SCORING]),
    ],
)
def test_ours_does_what_fairseq_does(place: Path, command: str, line: str) -> None:
    ours, _ = prove(line, functools.partial(shown, command, place), operator.eq)
    assert ours and not ours[0].startswith(FAILED)


@pytest.mark.parametrize(
    ("line", "more"), [pair for pair in zip(DECODING, LINES, strict=True) if len(set(pair)) > 1]
)
def test_binarised_sentences_are_not_encoded(place: Path, line: str, more: str) -> None:
    assert shown("generate", place, more, False) == shown("generate", place, line, False)


@pytest.mark.parametrize("number", range(len(COMPONENTS)))
def test_training_keeps_them_in_the_checkpoint(place: Path, tmp_path: Path, number: int) -> None:
    chosen = [LINES[number], SCORING[number % len(SCORING)]]
    with watched(place):
        line = " ".join([*words(place, " ".join(chosen)), "--max-update 1"])
        launch("train", place / "words" / "data", tmp_path, line, ok=True)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    for component, *settings in map(pieces, chosen):
        kind, name = component.removeprefix("--").split()
        kept, default = state["cfg"][kind], REGISTRIES[kind]["dataclass_registry"][name]()
        assert kept["_name"] == name
        for setting in settings:
            flag, _, value = " ".join(words(place, setting)[4:]).removeprefix("--").partition(" ")
            attribute = flag.replace("-", "_")
            assert str(kept[attribute]) == (value or "True") != str(getattr(default, attribute))
