"""Every setting that docs/flags.md answers with "works" in generate, validate and interactive.

Each line of settings runs with our model and with fairseq's (--native). What they print about the
sentences, their logs and their requests to fairseq agree, and each setting changes some of them.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import pytest
import torch
from helpers.flag_runs import Proofs, launch, lines, names, prove, proven, rows, table
from helpers.flag_training import messages, user_module, watched
from helpers.searches import difference_of_lines

from lightseq_fairseq.fairseq_compat.overlay import Overlay

# Names in braces are those of the fixture `places`; {save} is a new folder for each run.
# tests/flags/test_generation_flags.py tests more searches for generate.
LINES = {command: lines(command) for command in ("generate", "interactive", "validate")}
LANGUAGE_MODEL = "--lm-path {model} --lm-weight 0.7"
SHARDS = "--checkpoint-shard-count 2"
HALF = ["--fp16", "--memory-efficient-fp16"]
BF16 = ["--bf16", "--memory-efficient-bf16"]
DROPOUT = [
    "--model-overrides {'dropout':0.3} | --retain-dropout --seed 3",
    "--model-overrides {'dropout':0.3} --retain-dropout --seed 3 | "
    "--retain-dropout-modules TransformerEncoderBase",
]
# Command -> the words that each of its runs gets
BARE = {
    "generate": "{data} --path {checkpoint} --cpu",
    "validate": "{data} --path {checkpoint} --cpu",
    "interactive": "{data} --path {checkpoint} --cpu --input {text}/test.de",
}
PROVEN: Proofs = {
    (command, table.WORKS): (proven(*lines, BARE[command]) | names(*HALF, *BF16))
    & rows(command, table.WORKS)
    for command, lines in LINES.items()
}
PROVEN["generate", table.WORKS] |= proven(LANGUAGE_MODEL, SHARDS)
PROVEN["interactive", table.WORKS] |= proven(SHARDS)
for _command in ("generate", "interactive"):
    PROVEN[_command, table.FALLBACK] = proven(*DROPOUT) - {"--seed"}
Places = dict[str, Path]

# Some target words are punctuation or have subword marks.
SIGNS = {"v1": ",", "v2": "v2@@", "v3": "?", "v4": "v4-v4", "v5": "!", "v6": "v6@@"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Data, the same data with the languages swapped, two models, and other files."""
    folder = tmp_path_factory.mktemp("places")
    text, data, turned = (folder / name for name in ("text", "data", "reversed"))
    cli_runs.write_text(text)
    for split in cli_runs.SPLITS:
        lines = (text / f"{split}.en").read_text().splitlines()
        signed = [" ".join(SIGNS.get(word, word) for word in line.split()) for line in lines]
        (text / f"{split}.en").write_text("\n".join(signed) + "\n")
        (text / f"{split}.align").write_text("0-0\n" * len(lines))
    prefixes = " ".join(f"--{split}pref {text}/{split}" for split in cli_runs.SPLITS)
    line = f"-s de -t en --align-suffix align --destdir {data} {prefixes}"
    cli_runs.succeed("preprocess", *line.split())
    line = f"-s en -t de --srcdict {data}/dict.en.txt --tgtdict {data}/dict.de.txt "
    cli_runs.succeed("preprocess", *line.split(), "--destdir", turned, *prefixes.split())
    for split, language in (("test", "de"), ("test", "en"), ("valid", "de"), ("valid", "en")):
        raw = (text / f"train.{language}").read_text().splitlines(keepends=True)[:6]
        (turned / f"{split}.en-de.{language}").write_text("".join(raw))
    learned = "--max-update 30 --lr 0.02 --lr-scheduler fixed --dropout 0 --max-tokens 100"
    launch("train", data, folder, learned, ok=True)
    # Another model, under the file name that --checkpoint-suffix selects.
    launch("train", data, folder / "x", learned + " --seed 5", ok=True)
    for path in (folder / "checkpoint_last.pt", folder / "x" / "checkpoint_last.pt"):
        state = torch.load(path, weights_only=False)
        # As fairseq writes it, which takes the languages from the names of the data's files.
        state["cfg"]["task"].update(source_lang=None, target_lang=None)
        torch.save(state, path)
    shutil.copy(folder / "x" / "checkpoint_last.pt", folder / "checkpoint_last_x.pt")
    (folder / "codes").write_text("#version: 0.2\nv 1\n")
    return {
        "text": text, "data": data, "reversed": turned, "codes": folder / "codes",
        "user": user_module(folder), "checkpoint": folder / "checkpoint_last.pt",
        "other": folder / "x" / "checkpoint_last.pt",
    }  # fmt: skip


@dataclass
class Shown:
    """What a command shows.

    Attributes:
        told: the fields of each printed line about a sentence, a score or a loss, and of the log.
        asked: see `flag_training.Trace`.
        files: the files that it writes.
        error: how it failed, or "".
    """

    told: list[list[str]] = field(default_factory=list)
    asked: dict[str, list[Any]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    error: str = ""

    def agrees(self, other: Shown, tolerance: float = 2e-3) -> bool:
        return (self.asked, self.files, self.error) == (
            other.asked, other.files, other.error
        ) and not difference_of_lines(self.told, other.told, tolerance)  # fmt: skip


def shown(command: str, places: Places, line: str, native: bool) -> Shown:
    """What ``lightseq-<command>`` shows; ``line`` may begin with a data folder."""
    with tempfile.TemporaryDirectory() as folder:
        return _shown(command, {**places, "save": Path(folder)}, line, native)


def _shown(command: str, places: Places, line: str, native: bool) -> Shown:
    for name, path in places.items():
        line = line.replace(f"{{{name}}}", str(path))
    data = places["data"]
    if line and not line.startswith("-"):
        first, _, line = line.partition(" ")
        data = Path(first)
    found = Shown()
    processes = mock.patch.object(
        torch.multiprocessing, "start_processes", side_effect=RuntimeError("several processes")
    )
    with messages() as records, watched(found.asked), processes:
        result = launch(command, data, places["checkpoint"], line + " --native" * native)
    if result.exit_code:
        found.error = f"{result.stderr[-500:]} {result.exception}"
    # W- lines hold times.
    told = re.findall(r"^(?:[STHDPA]-\d+\t|Generate ).*", result.stdout, re.MULTILINE)
    for record in records:
        message = record.getMessage()
        if record.pathname.endswith("progress_bar.py"):
            told += re.findall(r"\b\w*loss [\d.]+|\bbleu [\d.]+", message)
            told.append(re.sub(r"\d[\d.e-]*", "#", message))  # includes speeds
        elif record.levelno >= logging.WARNING or message.startswith("example "):
            told.append(message)
    found.told = [re.split(r"[\t ]+", text) for text in told]
    found.files = sorted(path.name for path in places["save"].iterdir())
    return found


Run = Callable[[str, bool], Shown]


@pytest.fixture(scope="module")
def runs(places: Places) -> Callable[[str], Run]:
    @functools.cache
    def of(command: str, line: str, native: bool) -> Shown:
        return shown(command, places, line, native)

    return lambda command: functools.partial(of, command)


@pytest.mark.parametrize(
    ("command", "line"), [(command, line) for command, lines in LINES.items() for line in lines]
)
def test_ours_does_what_fairseq_does(runs: Callable[[str], Run], command: str, line: str) -> None:
    ours, _ = prove(line, runs(command), Shown.agrees)
    assert ours.told and not ours.error


@pytest.mark.parametrize("command", BARE)
def test_what_each_run_is_given(places: Places, command: str) -> None:
    module = importlib.import_module(f"fairseq_cli.{command}")
    with_gpu = Overlay(torch, cuda=Overlay(torch.cuda, is_available=lambda: True))

    def run(line: str, native: bool) -> tuple[bool, list[str]]:
        for name, path in places.items():
            line = line.replace(f"{{{name}}}", str(path))
        with mock.patch.object(module, "torch", with_gpu), watched({}):
            result = cli_runs.run(command, *line.split(), *["--native"] * native)
        found = re.findall(r"^H-\d+|\bloss \d", result.stdout, re.MULTILINE)
        return result.exit_code == 0, found

    ours, _ = prove(BARE[command], run, operator.eq)
    assert ours[0] and ours[1]


def test_language_model(places: Places, tmp_path: Path) -> None:
    text, data = places["text"], places["data"]
    # fairseq looks here for the language model's dictionary
    shutil.copy(data / "dict.en.txt", data / "dict.txt")
    cli_runs.succeed(
        "preprocess", "--only-source", "--srcdict", data / "dict.txt", "--destdir",
        tmp_path / "data", "--trainpref", text / "train.en", "--validpref", text / "valid.en",
    )  # fmt: skip
    size = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-layers 1"
    schedule = "--optimizer adam --lr 0.05 --max-update 20 --max-tokens 100 --tokens-per-sample 20"
    cli_runs.succeed(
        "train", tmp_path / "data", *f"--task language_modeling --arch transformer_lm {size} "
        f"{schedule} --decoder-attention-heads 2 --sample-break-mode eos --cpu --num-workers 0 "
        f"--no-epoch-checkpoints --save-dir {tmp_path}".split(),
    )  # fmt: skip
    places = {**places, "model": tmp_path / "checkpoint_last.pt"}
    ours, _ = prove(LANGUAGE_MODEL, functools.partial(shown, "generate", places), Shown.agrees)
    assert ours.told and not ours.error


@pytest.mark.parametrize("command", ["generate", "interactive"])
def test_shards(places: Places, tmp_path: Path, command: str) -> None:
    """fairseq uses the last shard as the model, unless fairscale has written the shards."""
    for number, name in enumerate(("checkpoint", "other")):
        shutil.copy(places[name], tmp_path / f"model_part{number}.pt")
    shutil.copy(places["checkpoint"], tmp_path / "model.pt")
    places = {**places, "checkpoint": tmp_path / "model.pt"}
    ours, _ = prove(SHARDS, functools.partial(shown, command, places), Shown.agrees)
    assert ours.told and not ours.error


@pytest.mark.parametrize("line", DROPOUT)
@pytest.mark.parametrize("command", ["generate", "interactive"])
def test_retained_dropout(runs: Callable[[str], Run], command: str, line: str) -> None:
    ours, _ = prove(line, runs(command), Shown.agrees)
    assert ours.told and not ours.error


@pytest.mark.parametrize("line", HALF)
@pytest.mark.parametrize("command", LINES)
def test_half_precision(
    places: Places, runs: Callable[[str], Run], command: str, line: str
) -> None:
    half = torch.nn.Module.half
    with mock.patch.object(torch.nn.Module, "half", autospec=True, side_effect=half) as spy:
        ours, theirs = (shown(command, places, line, native) for native in (False, True))
    models = [type(call.args[0]).__name__ for call in spy.call_args_list]
    assert models == ["LSTransformerModel", "TransformerModel"]
    exact = scores(runs(command)("", True))
    errors = []
    for found in map(scores, (ours, theirs)):
        # In 16-bit precision beam search may drop a nearly equal hypothesis; then all later words
        # differ.
        same_words = found.keys() & exact.keys()
        assert len(same_words) > len(exact) / 2
        errors.append(max(abs(a - b) for k in same_words for a, b in zip(found[k], exact[k])))
    assert errors[0] <= 2 * errors[1] + 1e-3  # losses are printed with three decimals


@pytest.mark.parametrize("line", BF16)
@pytest.mark.parametrize("command", ["generate", "interactive"])
def test_bf16(places: Places, runs: Callable[[str], Run], command: str, line: str) -> None:
    """Our models translate in bf16; fairseq's models ignore --bf16."""
    exact, ours = (
        scores(x) for x in (runs(command)("", False), shown(command, places, line, False))
    )
    errors = [abs(a - b) for k in ours.keys() & exact.keys() for a, b in zip(ours[k], exact[k])]
    assert len(ours.keys() & exact.keys()) > len(exact) / 2
    assert 1e-4 < max(errors) < 0.1
    assert scores(shown(command, places, line, True)) == scores(runs(command)("", True))


def scores(found: Shown) -> dict[str, list[float]]:
    """The scores of each position, keyed by sentence and words, and the losses, keyed by name."""
    words = {line[0][2:]: line for line in found.told if line[0].startswith("H-")}
    positions = {
        " ".join((line[0], *words[line[0][2:]][2:])): line[1:]
        for line in found.told
        if line[0].startswith("P-")
    }
    losses = {line[0]: line[1:] for line in found.told if line[0].endswith("loss")}
    return {key: [float(x) for x in values] for key, values in (positions | losses).items()}
