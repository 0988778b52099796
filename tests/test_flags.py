"""docs/flags.md: a row for every setting, and every setting does what its row says.

Honoured in training means: on the captured step, with the losses, log and files of fairseq's own
run of the same command.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cli_runs
import pytest
import torch
import training_runs as runs
from click.testing import Result
from fairseq import options
from fairseq.data import indexed_dataset

from lightseq_fairseq.cli import flags
from lightseq_fairseq.training import fast_path

ROOT = Path(__file__).resolve().parent.parent


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"scripts_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table = _load(ROOT / "scripts" / "flags.py")
SETTINGS = table.settings()


def rows(command: str, kind: str) -> set[str]:
    """Settings of a command with that answer."""
    return {
        name
        for name, row in SETTINGS.items()
        if command in row.commands and table.answer(command, name, row.choices)[0] == kind
    }


def names(line: str) -> set[str]:
    """Settings that a line of probes gives."""
    return {word for word in line.split() if word.startswith("--")}


# ---- the table ----


def test_the_table_is_what_the_script_writes() -> None:
    assert table.TABLE.read_text() == table.text()


@pytest.mark.parametrize("command", table.COMMANDS)
def test_every_setting_has_a_row_with_an_answer(command: str) -> None:
    parser_of, words = table.COMMANDS[command]
    parser = parser_of()
    options.parse_args_and_arch(parser, words.split())
    column = 2 + list(table.COMMANDS).index(command)
    found = {
        name: line.split("|")[column].strip()
        for line in table.TABLE.read_text().splitlines()
        for name in re.findall(r"`([^`]+)`", line.split("|")[1] if line.startswith("|") else "")
    }
    kinds = {table.HONOURED, table.FALLBACK, table.REFUSED, table.UNREAD}
    missing = {
        option
        for action in parser._actions
        for option in action.option_strings or [action.dest]
        if found.get(option) not in kinds
    }
    assert not missing


def test_every_name_in_the_lists_is_a_setting() -> None:
    train = {
        *table.DATA, *table.SEVERAL_RANKS.split(), *table.NOTES, *table.OTHER_LAYERS,
        *fast_path.FALLBACK, *flags.PART_OF, *(w.split()[0] for w in flags.PART_OF.values()),
    }  # fmt: skip
    assert train <= SETTINGS.keys()
    for command in table.COMMANDS:
        own = {name for name, row in SETTINGS.items() if command in row.commands}
        assert {refused.flag for refused in flags.REFUSED[command]} <= own
    everywhere = set().union(*flags.UNREAD.values())
    assert everywhere <= SETTINGS.keys()


# ---- refused, by name, with the reason and the way out ----

REFUSED = {
    "train": [
        "--adaptive-input", "--adaptive-softmax-cutoff 5,7", "--tie-adaptive-weights",
        "--quant-noise-pq 0.1", "--quant-noise-scalar 0.1", "--no-cross-attention",
        "--cross-self-attention", "--offload-activations", "--checkpoint-activations",
        "--base-layers 1", "--char-inputs", "--encoder-xformers-att-config {}",
        "--decoder-xformers-att-config {}", "--pipeline-model-parallel",
        "--quantization-config-path x.yaml", "--amp", "--fp16-adam-stats", "--use-old-adam",
        "--tpu", "--model-parallel-size 2", "--use-plasma-view", "--encoder-layers-to-keep 0",
        "--decoder-layers-to-keep 0", "--cpu-offload", "--zero-sharding os",
    ],
    "generate": ["--pipeline-model-parallel", "--print-step", "--retain-iter-history"],
    "validate": ["--pipeline-model-parallel"],
    "interactive": ["--pipeline-model-parallel", "--score-reference"],
}  # fmt: skip
# Refused for a value, or on a machine without a GPU or a package.
ON_CONDITION = [
    "--activation-fn tanh", "--ddp-backend fully_sharded", "--fp16", "--profile",
    "--write-checkpoints-asynchronously",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    launch("train", data, folder, "", ok=True)
    return folder / "checkpoint_last.pt"


def launch(command: str, data: Path, place: Path, line: str, ok: bool = False) -> Result:
    """``lightseq-<command>``; ``place`` is the folder for checkpoints, or the one to load."""
    own = {
        "train": ["--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir", place],
        "generate": ["--path", place, "--cpu", "--beam", 2, "--max-len-b", 9,
                     "--num-workers", 0],
        "validate": ["--path", place, "--cpu", "--max-tokens", 200, "--num-workers", 0],
        "interactive": ["--path", place, "--cpu", "--input", data.parent / "text" / "test.de",
                        "--beam", 2, "--max-len-b", 9],
    }[command]  # fmt: skip
    result = cli_runs.run(command, data, *map(str, own), *line.split())
    assert not ok or result.exit_code == 0, (result.output, result.exception)
    return result


@pytest.mark.parametrize("command", REFUSED)
def test_every_refused_setting_is_tried(command: str) -> None:
    tried = {line.split()[0] for line in REFUSED[command]}
    assert tried == rows(command, table.REFUSED) - flags.PART_OF.keys()


@pytest.mark.parametrize(
    ("command", "line"),
    [(command, line) for command, lines in REFUSED.items() for line in lines]
    + [("train", line) for line in ON_CONDITION],
)
def test_a_refusal_names_the_setting_the_reason_and_the_way_out(
    data: Path, checkpoint: Path, tmp_path: Path, command: str, line: str
) -> None:
    place = tmp_path / "save" if command == "train" else checkpoint
    result = launch(command, data, place, line)
    assert result.exit_code == 2, (result.output, result.exception)
    (sentence,) = [text for text in result.output.splitlines() if "error:" in text]
    flag = re.escape(line.split()[0])
    assert re.search(rf"{flag}\b.* (\(.+\)|needs a GPU|support)", sentence), sentence
    assert re.search(r"drop |leave it out|use --|--native|pip install", sentence), sentence
    assert not (tmp_path / "save").exists() or not list((tmp_path / "save").glob("*.pt"))


# ---- honoured by fairseq's own step, which the log says ----

BY_FAIRSEQ = {
    "--memory-efficient-bf16": "--memory-efficient-bf16",
    "--memory-efficient-fp16": "--memory-efficient-fp16",
    "--store-ema": "--store-ema",
    "--use-bmuf": "--use-bmuf --average-sync --block-lr 0.5 --block-momentum 0.5 "
    "--global-sync-iter 2 --warmup-iterations 1 --use-nbm",
    "--empty-cache-freq": "--empty-cache-freq 2",
    "--encoder-layerdrop": "--encoder-layerdrop 0.3",
    "--decoder-layerdrop": "--decoder-layerdrop 0.3",
    "alignments": "--load-alignments",
    "batches of bucketed lengths": "--num-batch-buckets 2",
}


@pytest.fixture(scope="module")
def aligned(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same data, the training sentences with word alignments."""
    folder = tmp_path_factory.mktemp("aligned") / "data"
    shutil.copytree(data, folder)
    builder = indexed_dataset.make_builder(str(folder / "train.align.de-en.bin"), "mmap")
    for _ in range(cli_runs.SPLITS["train"]):
        builder.add_item(torch.tensor([0, 0], dtype=torch.int32))
    builder.finalize(str(folder / "train.align.de-en.idx"))
    return folder


def test_every_setting_left_to_fairseqs_step_is_tried() -> None:
    tried = set().union(*map(names, BY_FAIRSEQ.values()))
    others = {*table.SEVERAL_RANKS.split(), *flags.PART_OF, "--profile"}
    assert tried == rows("train", table.FALLBACK) - others


@pytest.mark.parametrize("reason", BY_FAIRSEQ)
def test_fairseqs_step_is_taken_and_the_log_says_why(
    aligned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    caplog.set_level(logging.INFO)
    launch("train", aligned, tmp_path, BY_FAIRSEQ[reason], ok=True)
    assert re.findall(r"training takes fairseq's own steps: (.*)", caplog.text) == [reason]


def test_several_ranks_take_fairseqs_step(data: Path, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log")
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        corpus = runs.corpus(tmp_path / "corpus")
        runs.run_ranks(corpus, tmp_path / "save", 2, **runs.LS, max_update=1, no_save=True)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert "fairseq's own steps: there are several ranks" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("asked", [True, False])
def test_a_profiled_run_takes_fairseqs_step(asked: bool) -> None:
    """A run with --profile needs a GPU."""
    cfg = SimpleNamespace(common=SimpleNamespace(profile=asked))
    assert fast_path.FALLBACK["--profile"](cfg, None) == asked


# ---- no effect, which a note says ----


def unread(command: str) -> list[str]:
    """A command line of all settings that the command does not read, none at its default."""
    parser_of, words = table.COMMANDS[command]
    parser = parser_of()
    options.parse_args_and_arch(parser, words.split())
    line: list[str] = []
    wanted = rows(command, table.UNREAD)
    for action in parser._actions:
        flag = flags.name(action)
        if flag in wanted:
            line.append(flag)
            if action.nargs != 0:
                line.append(VALUES.get(flag) or another(action))
    return line


VALUES = {
    "--update-epoch-batch-itr": "True",
    "--eval-bleu-args": '{"beam":7}',
    "--eval-bleu-detok": "space",
    "--eval-bleu-detok-args": '{"x":7}',
    # The parser adds the settings of the component that is named.
    "--lr-scheduler": "fixed",
    "--tokenizer": "space",
    "--bpe": "bert",
    "--scoring": "bleu",
}


def another(action: argparse.Action) -> str:
    if action.choices:
        return next(str(choice) for choice in action.choices if choice != action.default)
    return "7" if str(action.default) != "7" else "5"


@pytest.mark.parametrize("command", table.COMMANDS)
def test_what_has_no_effect_is_noted_and_has_none(
    data: Path, checkpoint: Path, tmp_path: Path, command: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shown = []
    line = unread(command)
    for words in ("", " ".join(line)):
        caplog.clear()
        place = tmp_path / str(len(words)) if command == "train" else checkpoint
        result = launch(command, data, place, words, ok=True)
        told = result.stdout + "\n".join(r.getMessage() for r in caplog.records)
        # Losses, hypotheses with their scores, references.
        shown.append(
            sorted(re.findall(r"^[HDPST]-\d+\t.*|\b(?:nll_)?loss'?[ :]+[\d.]+", told, re.M))
        )
    noted = set(re.findall(r"note: (\S+) has no effect: fairseq-", result.stderr))
    assert noted == {word for word in line if word.startswith("--")}
    assert shown[0] == shown[1] != []


def test_a_part_without_its_whole_is_noted(data: Path, tmp_path: Path) -> None:
    result = launch(
        "train", data, tmp_path, "--amp-init-scale 4 --ema-decay 0.9 --store-ema", ok=True
    )
    assert "note: --amp-init-scale has no effect without --amp." in result.stderr
    assert "--ema-decay" not in result.stderr


def test_fairseqs_own_runs_are_left_alone(data: Path, tmp_path: Path) -> None:
    result = launch("train", data, tmp_path, "--native --checkpoint-activations --pad 3", ok=True)
    assert "note: --pad" not in result.stderr
