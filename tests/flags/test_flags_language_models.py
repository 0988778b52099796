"""Each row of docs/flags.md's table of language models agrees with a run of the command.

Each line of settings runs with our command and with fairseq's, without dropout. Results, logs and
requests to torch must agree, and each setting must change one of them.
"""

from __future__ import annotations

import functools
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.flag_families as flag_families
import helpers.flag_training as flag_training
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
from fairseq import options
from fairseq.data.monolingual_dataset import MonolingualDataset
from helpers.flag_runs import lines, pieces, prove, table

from lightseq_fairseq.base.families import LANGUAGE_MODEL
from lightseq_fairseq.cli.checks import flags
from lightseq_fairseq.cli.start import logs
from lightseq_fairseq.plugins.settings import WITHOUT

SETTINGS = table.family_settings(table.OF_TEXT)
TRAINED, EVAL = lines("language models, train"), lines("language models, eval-lm")
BANDS = "--adaptive-input --adaptive-input-cutoff 20,50"
SOFTMAX = "--criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-softmax-cutoff 20,50"
# Settings -> the reason in the log.
FALLBACK = {
    BANDS: "--adaptive-input",
    f"{BANDS} | --adaptive-input-factor 2": "--adaptive-input",
    SOFTMAX.replace(" --adaptive", " | --adaptive"): "--adaptive-softmax-cutoff",
    f"{SOFTMAX} | --adaptive-softmax-factor 2": "--adaptive-softmax-cutoff",
    f"{SOFTMAX} | --adaptive-softmax-dropout 0.9999999": "--adaptive-softmax-cutoff",
    f"{SOFTMAX} {BANDS} | --tie-adaptive-weights": "--adaptive-input",
    f"{SOFTMAX} {BANDS} --tie-adaptive-weights | --tie-adaptive-proj": "--adaptive-input",
    "--decoder-layers 3 | --decoder-layerdrop 0.5": "--decoder-layerdrop",
    "--max-tokens None --batch-size 8 --disable-validation None | --pad-to-fixed-bsz":
    "batches are filled up with blocks (pad_to_bsz)",
}  # fmt: skip
REFUSED = {
    "train": [
        "--base-layers 1", "--character-embeddings", "--decoder-xformers-att-config {}",
        "--offload-activations", "--past-target", "--quant-noise-pq 0.1",
        "--quant-noise-scalar 0.1", "--scale-attn", "--scale-fc", "--scale-heads",
        "--scale-resids", "--self-target",
    ],
    "eval-lm": ["--pad-to-fixed-bsz", "--past-target", "--self-target"],
}  # fmt: skip
# Tested in test_eval_lm.py, because its value contains a blank, and in test_scorer.py.
ELSEWHERE = {"--post-process", "--softmax-batch"}


def named(*lines: str) -> set[str]:
    return flag_families.named(SETTINGS, *lines)


def rows(command: str, kind: str) -> set[str]:
    return {
        name
        for name, row in SETTINGS.items()
        if command in row.commands and table.answer(command, name, row, LANGUAGE_MODEL)[0] == kind
    }


def test_every_row_has_a_proof() -> None:
    parts = {part for part in rows("train", table.REFUSED) if part in WITHOUT}
    assert {WITHOUT[part].split()[0] for part in parts} - {"--ddp-backend"} <= named(
        *REFUSED["train"]
    )
    for proven, command, kind in (
        (named(*TRAINED), "train", table.WORKS),
        (named(*FALLBACK), "train", table.FALLBACK),
        (named(*REFUSED["train"]) | parts, "train", table.REFUSED),
        (named(*EVAL) | ELSEWHERE, "eval-lm", table.WORKS),
        (named(*REFUSED["eval-lm"]), "eval-lm", table.REFUSED),
        (set(), "eval-lm", table.FALLBACK),
        ({"--future-target"}, "train", table.UNREAD),
        (named(*unread()), "eval-lm", table.UNREAD),
    ):
        assert proven == rows(command, kind), (command, kind)


# ---- training ----


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    names = ("data", "other")
    return {name: parity.write_text(folder / name, seed=n) for n, name in enumerate(names)}


Run = Callable[[str, bool], Any]
PLAIN = {
    **runs.TEXT,
    "dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "max_update": 4,
    "share_decoder_input_output_embed": None, "warmup_updates": None, "lr_scheduler": "fixed",
    "sample_break_mode": None, "decoder_layers": 2, "no_save": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(texts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a training; returns what `flag_families.train` returns."""

    @functools.cache
    def run(line: str, native: bool) -> dict[str, Any]:
        return flag_families.train(line, native, texts, tmp_path_factory.mktemp("run"), PLAIN)

    return run


@pytest.mark.parametrize("line", TRAINED)
def test_training_does_what_fairseq_does(trained: Run, line: str) -> None:
    ours, _ = prove(line, trained, flag_families.alike)
    assert ours["losses"] and ours["reasons"] == [] and not ours["error"]


@pytest.mark.parametrize("line", FALLBACK)
def test_fairseqs_step_is_taken_and_does_what_fairseq_does(trained: Run, line: str) -> None:
    ours, _ = prove(line, trained, flag_families.alike)
    assert ours["reasons"] == [FALLBACK[line]] and not ours["error"]


# ---- evaluation ----


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two binarised texts, a folder with binarised and raw text, and two checkpoints."""
    folder = tmp_path_factory.mktemp("world")
    found = {"data": cli_runs.binarise_text(folder / "one")}
    found["other"] = folder / "other"
    found["other"].mkdir()
    for name in ("test", "valid"):
        lines = (folder / "one" / "text" / name).read_text().splitlines()
        (folder / name).write_text("".join(f"{line}\n" for line in lines[::2]))
    cli_runs.succeed(
        "preprocess", "--only-source", "--destdir", found["other"], "--srcdict",
        found["data"] / "dict.txt", "--testpref", folder / "test", "--validpref", folder / "valid",
    )  # fmt: skip
    # Binarised text, and another raw text, which fairseq reads without --dataset-impl.
    found["both"] = shutil.copytree(found["data"], folder / "both")
    shutil.copy(folder / "test", found["both"])
    for name, more in (("first", ["--max-update", "9"]), ("second", [])):
        words = ["--arch", "transformer_lm", "--optimizer", "adam", "--lr", "1e-2", *more]
        cli_runs.succeed(
            "train", found["data"], *cli_runs.SMALL_TEXT, *words, "--save-dir", folder / name
        )
        found[name] = folder / name / "checkpoint_last.pt"
    return found


@pytest.fixture
def evaluated(
    world: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs lightseq-eval-lm; returns its log, its error, and requests: workers, batches, shapes."""

    @functools.cache
    def run(line: str, native: bool) -> dict[str, Any]:
        given = pieces(line)
        data = given.pop(0) if given and not given[0].startswith("-") else "{data}"
        words = [word for piece in given for word in piece.split()]
        if "--path" not in words:
            words += ["--path", "{first}"]
        defaults = {"--gen-subset": "test", "--tokens-per-sample": "16", "--num-workers": "0"}
        for flag, value in defaults.items():
            words += [] if flag in words else [flag, value]
        for name, path in world.items():
            words = [word.replace(f"{{{name}}}", str(path)) for word in words]
        asked: dict[str, Any] = {}
        collate = MonolingualDataset.collater

        def collater(self: Any, samples: Any) -> Any:
            batch = collate(self, samples)
            if batch:  # a shard may have none
                asked.setdefault("shapes", []).append(tuple(batch["target"].shape))
            return batch

        caplog.clear()
        caplog.set_level(logging.INFO)
        with (
            flag_training.watched(asked),
            mock.patch.object(MonolingualDataset, "collater", collater),
        ):
            result = cli_runs.run(
                "eval-lm", data.format(**world), "--cpu", *words, *["--native"] * native,
            )  # fmt: skip
        asked.pop("types", None)
        shown = filter(logs.is_shown, caplog.records)  # not the configuration
        logged = [r.getMessage() for r in shown if r.name == "fairseq_cli.eval_lm"]
        text = re.sub(r" in [\d.]+s \(.*?\)|^loading .*$", "", "\n".join(logged), flags=re.M)
        return {
            "text": re.sub(r"-?\d+\.\d+", "#", re.sub(str(world["data"].parent.parent), "", text)),
            "numbers": [float(x) for x in re.findall(r"-?\d+\.\d+", text)],
            "asked": asked,
            "error": re.findall(r"error: (.*)", result.stderr),
        }

    return run


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    close = ours["numbers"] == pytest.approx(theirs["numbers"], rel=1e-4, abs=2e-5)
    return bool(close and all(ours[x] == theirs[x] for x in ("text", "asked", "error")))


@pytest.mark.parametrize("line", EVAL)
def test_evaluation_does_what_fairseq_does(evaluated: Run, line: str) -> None:
    ours, _ = prove(line, evaluated, same)
    # The checkpoint determines the size of the output layer.
    assert len(ours["error"]) == ("--output-dictionary-size" in line)
    assert ours["numbers"] or ours["error"]


# ---- refused, and without effect ----


@pytest.mark.parametrize(
    ("command", "line"), [(command, line) for command, lines in REFUSED.items() for line in lines]
)
def test_a_refusal_names_the_setting_the_reason_and_the_way_out(
    world: dict[str, Path], tmp_path: Path, command: str, line: str
) -> None:
    words = ["--path", world["first"], "--cpu"]
    if command == "train":
        words = [*cli_runs.SMALL_TEXT, "--arch", "ls_transformer_lm", "--save-dir", tmp_path / "x"]
    result = cli_runs.run(command, world["data"], *words, *line.split())
    assert result.exit_code == 2, (result.output, result.exception)
    (sentence,) = (text for text in result.output.splitlines() if "error:" in text)
    assert re.search(rf"{line.split()[0]}\b.* \(.+\): remove it", sentence), sentence
    assert not (tmp_path / "x").exists()


def unread() -> list[str]:
    """The settings without effect in lightseq-eval-lm, with values other than the defaults."""
    parser = options.get_eval_lm_parser()
    options.parse_args_and_arch(parser, ["data"])
    wanted = rows("eval-lm", table.UNREAD)
    found = []
    for action in parser._actions:
        name = flags.name(action)
        if name in wanted:
            value = {"--update-epoch-batch-itr": "True"}.get(name, "7")
            found.append(name if action.nargs == 0 else f"{name} {value}")
    return found


def test_what_has_no_effect_is_noted_and_has_none(
    world: dict[str, Path], evaluated: Run, tmp_path: Path
) -> None:
    line = " ".join(unread())
    plain, found = evaluated("", False), evaluated(line, False)
    assert plain["numbers"] and same(found, plain)
    result = cli_runs.run(
        "eval-lm", world["data"], "--path", world["first"], "--cpu", "--tokens-per-sample", "16",
        *line.split(),
    )  # fmt: skip
    noted = set(re.findall(r"note: (\S+) has no effect", result.stderr))
    assert noted == {piece.split()[0] for piece in unread()}
    words = [*cli_runs.SMALL_TEXT, "--arch", "ls_transformer_lm", "--save-dir", tmp_path]
    result = cli_runs.run("train", world["data"], *words, "--future-target")
    assert "note: --future-target has no effect" in result.stderr and result.exit_code == 0


def test_subwords_are_noted(world: dict[str, Path]) -> None:
    words = ["--path", world["first"], "--cpu", "--tokens-per-sample", "16"]
    result = cli_runs.run("eval-lm", world["data"], *words, "--remove-bpe")
    assert result.exit_code == 0 and "note: --remove-bpe has no effect" in result.stderr
    result = cli_runs.run("eval-lm", world["data"], *words, "--remove-bpe", "@@ ")
    assert result.exit_code == 0 and "note:" not in result.stderr
