"""Each row of docs/flags.md's table of RoBERTa agrees with a run of the command.

Each line of settings runs with our command and with fairseq's, without dropout. Losses, the shapes
of validated labels and of the model's state must agree, and each setting must change one of them.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.flag_families as flag_families
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
import torch
from helpers.flag_runs import lines, pieces, prove, table

from lightseq_fairseq.base.families import ROBERTA

SETTINGS = table.family_settings(table.OF_ROBERTA)
TASKS = ("masked_lm", "sentence_prediction")
PLAIN: dict[str, dict[str, Any]] = {
    task: {
        **base, "dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "pooler_dropout": 0,
        "max_update": 3, "warmup_updates": None, "lr_scheduler": "fixed", "encoder_layers": 2,
        "disable_validation": None, "no_save": True, "num_workers": 0,
    }
    for task, base in zip(TASKS, (runs.MASKED, runs.CLASSES), strict=True)
}  # fmt: skip
FALLBACK = ["--encoder-layers 3 | --encoder-layerdrop 0.5"]
SHARED = {task: lines(f"RoBERTa, train and validate {task}") for task in TASKS}
TRAINED = {
    task: [*lines("RoBERTa, train: the model"), *SHARED[task], *lines(f"RoBERTa, train {task}")]
    for task in TASKS
}
VALIDATED = {task: [*SHARED[task], *lines(f"RoBERTa, validate {task}")] for task in TASKS}
REFUSED = [
    "--ffn-blocks-to-remove 1", "--ffn-reg-scale-factor 0.1", "--mha-heads-to-keep 1",
    "--mha-reg-scale-factor 0.1", "--quant-noise-pq 0.1", "--quant-noise-scalar 0.1",
    "--spectral-norm-classification-head",
]  # fmt: skip
SMALL = (
    "--arch ls_roberta --encoder-layers 1 --encoder-embed-dim 8 --encoder-ffn-embed-dim 8 "
    "--encoder-attention-heads 1 --max-update 1 --max-tokens 256 --num-workers 0 --cpu"
)
UNREAD = {
    "train masked_lm": "--dataset-impl raw --include-target-tokens --pooler-activation-fn relu "
    "--pooler-dropout 0.5",
    "train sentence_prediction": "--dataset-impl raw --add-prev-output-tokens",
    "validate masked_lm": "--dataset-impl raw --include-target-tokens",
    "validate sentence_prediction": "--dataset-impl raw --add-prev-output-tokens",
}


def test_every_row_has_a_proof() -> None:
    parts = {"--min-params-to-wrap", "--quant-noise-pq-block-size"}
    for column in table.OF_ROBERTA.columns:
        command, task = column.split()
        is_training = command == "train"
        lines = {
            table.WORKS: (TRAINED if is_training else VALIDATED)[task],
            table.FALLBACK: FALLBACK if is_training else [],
            table.REFUSED: REFUSED if is_training else [],
            table.UNREAD: [UNREAD[column]],
        }
        for kind, claimed in lines.items():
            proven = flag_families.named(SETTINGS, *claimed)
            proven |= parts if is_training and kind == table.REFUSED else set()
            rows = {
                name
                for name, row in SETTINGS.items()
                if column in row.commands and table.answer(column, name, row, ROBERTA)[0] == kind
            }
            assert proven == rows, (column, kind)


Run = Callable[[str, bool], Any]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What names in braces stand for: two binarised data folders of each task, GPT-2's encoding,
    and a checkpoint of each task."""
    folder = tmp_path_factory.mktemp("paths")
    found = {name: folder / name for name in ("data", "other", "sentences", "others")}
    raw = folder / "raw"
    parity.write_text(raw / "data")
    parity.write_text(raw / "other", seed=2)
    for file in (raw / "other").iterdir():  # tokens of GPT-2's encoding are numbers
        file.write_text(re.sub(r"\bw(\d)", r"\1", file.read_text()))
    # The labels are classes, and also numbers.
    parity.write_classes(raw / "sentences")
    parity.write_classes(raw / "sentences", numbers=3)
    for part in ("data", "other", *(f"sentences/{x}" for x in ("input0", "input1", "label"))):
        texts = [word for split in ("train", "valid")
                 for word in (f"--{split}pref", raw / part / split)]  # fmt: skip
        words = ["--only-source", "--srcdict", raw / part / "dict.txt", *texts]
        cli_runs.succeed("preprocess", *words, "--destdir", folder / part)
    for numbers in (raw / "sentences" / "label").glob("*.label"):
        shutil.copy(numbers, folder / "sentences" / "label")
    for source, target in (("input0", "input1"), ("input1", "input0"), ("label", "label")):
        shutil.copytree(folder / "sentences" / source, folder / "others" / target)
    # Every third word of GPT-2's encoding continues the word before it.
    found |= {"encoder": folder / "encoder.json", "merges": folder / "merges"}
    coded = {("x" if i % 3 == 0 else "Ġ") + "a" * i: i for i in range(parity.VOCABULARY)}
    found["encoder"].write_text(json.dumps(coded))
    found["merges"].write_text("#version\n")
    found["masked"] = folder / "masked_lm" / "checkpoint_last.pt"
    found["classes"] = folder / "sentence_prediction" / "checkpoint_last.pt"
    saved = "--no-save None"
    flag_families.train(saved, True, found, folder / "masked_lm", PLAIN["masked_lm"])
    flag_families.train(
        f"{{sentences}} {saved} --classification-head-name old --max-positions 12 "
        "--shorten-method truncate",
        True, found, folder / "sentence_prediction", PLAIN["sentence_prediction"],
    )  # fmt: skip
    return found


def notes(result: Any) -> set[str]:
    """The settings of which a launcher says that they have no effect."""
    return set(re.findall(r"note: (\S+) has no effect", result.stderr))


def data_of(task: str) -> str:
    return {"masked_lm": "data", "sentence_prediction": "sentences"}[task]


# ---- training ----


@pytest.fixture(scope="module")
def trained(
    paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Run]:
    """Runs a training of a task; returns what `flag_families.train` returns."""

    @functools.cache
    def run(task: str, line: str, native: bool) -> dict[str, Any]:
        found = {**paths, "data": paths[data_of(task)]}
        folder = tmp_path_factory.mktemp("run")
        return flag_families.train(line, native, found, folder, PLAIN[task])

    return lambda task: functools.partial(run, task)


@pytest.mark.parametrize(
    ("task", "line"), [(task, line) for task, lines in TRAINED.items() for line in lines]
)
def test_training_does_what_fairseq_does(
    trained: Callable[[str], Run], task: str, line: str
) -> None:
    ours, _ = prove(line, trained(task), flag_families.alike)
    assert ours["losses"] and ours["reasons"] == [] and not ours["error"]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("line", FALLBACK)
def test_fairseqs_step_is_taken_and_does_what_fairseq_does(
    trained: Callable[[str], Run], task: str, line: str
) -> None:
    ours, _ = prove(line, trained(task), flag_families.alike)
    assert ours["reasons"] == [line.split()[-2]] and not ours["error"]


# ---- validation ----


@pytest.fixture
def validated(paths: dict[str, Path]) -> Callable[[str], Run]:
    """Runs lightseq-validate; returns what `validation` collects, its error, and its notes."""

    @functools.cache
    def run(task: str, line: str, native: bool) -> dict[str, Any]:
        words = [word for piece in pieces(line) for word in piece.split()]
        data = "{data}" if not words or words[0].startswith("-") else words.pop(0)
        found = {**paths, "data": paths[data_of(task)]}
        checkpoint = paths["masked" if task == "masked_lm" else "classes"]
        torch.manual_seed(1)  # of a new head
        with flag_families.validation() as shown:
            result = cli_runs.run(
                "validate", data.format(**found), "--task", task, "--path", checkpoint, "--cpu",
                "--batch-size", "8", "--num-workers", "0", *(x.format(**found) for x in words),
                *["--native"] * native,
            )  # fmt: skip
        error = "".join(result.output.splitlines()[-1:]) if result.exit_code else ""
        error = error.partition("error: ")[2] or repr(result.exception) if error else ""
        unused = {"losses": [], "layers": 0, "reasons": []}
        return {**shown, **unused, "error": error, "noted": notes(result)}

    return lambda task: functools.partial(run, task)


@pytest.mark.parametrize(
    ("task", "line"), [(task, line) for task, lines in VALIDATED.items() for line in lines]
)
def test_validation_does_what_fairseq_does(
    validated: Callable[[str], Run], task: str, line: str
) -> None:
    ours, _ = prove(line, validated(task), flag_families.alike)
    # The checkpoint determines the number of positions, and of classes.
    is_of_checkpoint = "--max-positions" in line or "--num-classes" in line
    assert bool(ours["error"]) == is_of_checkpoint
    assert bool(ours["validated"]) != bool(ours["error"])


# ---- refused, and without effect ----


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_names_the_setting_the_reason_and_the_way_out(
    paths: dict[str, Path], tmp_path: Path, line: str
) -> None:
    for task in TASKS:
        result = cli_runs.run(
            "train", paths[data_of(task)], "--task", task, *SMALL.split(),
            "--num-classes" if task == "sentence_prediction" else "--tokens-per-sample", "12",
            "--save-dir", tmp_path / "x", *line.split(),
        )  # fmt: skip
        assert result.exit_code == 2, (result.output, result.exception)
        (sentence,) = (text for text in result.output.splitlines() if "error:" in text)
        assert re.search(rf"{line.split()[0]}\b.* \(.+\): remove it", sentence), sentence
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("column", UNREAD)
def test_what_has_no_effect_is_noted_and_has_none(
    trained: Callable[[str], Run], validated: Callable[[str], Run], paths: dict[str, Path],
    tmp_path: Path, column: str,
) -> None:  # fmt: skip
    command, task = column.split()
    given = UNREAD[column]
    run = (trained if command == "train" else validated)(task)
    for native in (True, False):
        plain, found = (run(line, native) for line in ("", given))
        assert plain["validated"] and flag_families.alike(found, plain)
        assert native or not found["reasons"]
    if command == "validate":
        noted = found["noted"]
    else:  # the launcher is not in these runs
        own = "--num-classes 3" if task == "sentence_prediction" else "--tokens-per-sample 12"
        result = cli_runs.run(
            "train", paths[data_of(task)], "--task", task, *SMALL.split(), *own.split(),
            "--save-dir", tmp_path, *given.split(),
        )  # fmt: skip
        assert result.exit_code == 0, (result.output, result.exception)
        noted = notes(result)
    assert noted == {piece.split()[0] for piece in pieces(given)}


def test_validation_finds_the_task_of_the_data(paths: dict[str, Path]) -> None:
    words = ["--path", paths["classes"], "--cpu", "--num-workers", "0"]
    with flag_families.validation() as shown:
        said = cli_runs.run("validate", paths["sentences"], *words)
    assert said.exit_code == 0 and shown["validated"] and not notes(said)
    said = cli_runs.run("validate", paths["sentences"], *words, "--criterion", "cross_entropy")
    assert "needs the criterion of sentences with labels: set" in said.output.splitlines()[-1]


def test_wrong_masks_are_refused_in_validation(paths: dict[str, Path]) -> None:
    words = ["--task", "masked_lm", "--path", paths["masked"], "--cpu", "--mask-prob", "2"]
    said = cli_runs.run("validate", paths["data"], *words)
    assert "--mask-prob is 2.0: it must be above 0" in said.output.splitlines()[-1]
