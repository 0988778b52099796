"""A line of the training log has the values of its own updates, as in a native run."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest
from fairseq.logging import metrics, progress_bar

from lightseq_fairseq.training import captured, report

# Values that do not depend on the machine; "update" is the place in the epochs.
EXACT = ("epoch", "update", "num_updates", "lr", "wpb", "bsz")
ROUNDED = ("loss", "nll_loss", "ppl", "gnorm", "clip")
Record = tuple[str, str]  # kind and text of a line

SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--arch ls_transformer_tiny --optimizer ls_adam --adam-betas (0.9,0.98) "
    "--criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 --dropout 0 --clip-norm 2 "
    "--lr 1e-2 --lr-scheduler inverse_sqrt --warmup-updates 5 --max-tokens 40 --max-epoch 3 --cpu "
    "--no-epoch-checkpoints"
)


@pytest.fixture
def train(
    binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., list[Record]]]:
    """Runs a command, and returns its log; the host runs two steps ahead, as on a GPU."""
    caplog.set_level(logging.INFO)
    bars = logging.getLogger(progress_bar.__name__)
    before = list(bars.handlers)

    def get(folder: str, *words: str, ahead: int = 2, status: int = 0) -> list[Record]:
        metrics.reset()
        caplog.clear()
        with mock.patch.object(captured, "steps_ahead", lambda *_: ahead):
            result = cli_runs.run(
                "train", binarised, *SMALL.split(), *words, "--save-dir", tmp_path / folder
            )
        assert result.exit_code == status, (result.output, result.exception)
        found = [(record.name, record.getMessage()) for record in caplog.records]
        return [(kind, text) for kind, text in found if kind in ("train_inner", "train", "valid")]

    yield get
    metrics.reset()
    bars.handlers[:] = before  # fairseq adds a handler for --log-file at each epoch


def values(record: Record, names: tuple[str, ...]) -> dict[str, Any]:
    """These values of a line in JSON."""
    kind, text = record
    return {
        key: float(value)
        for key, value in json.loads(text).items()
        if key.removeprefix(f"{kind}_") in names
    }


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        (1, ""),
        (4, ""),
        (7, ""),  # the last interval of an epoch goes on in the next one
        (3, "--update-freq 2"),
        (4, "--validate-interval-updates 3 --save-interval-updates 5"),
        (2, "--disable-validation --no-save --stop-time-hours 1e-9"),
    ],
)
def test_lines_are_those_of_a_native_run(
    train: Callable[..., list[Record]], interval: int, words: str
) -> None:
    words += f" --log-format json --log-interval {interval}"
    ours, native = train("ours", *words.split()), train("native", *words.split(), "--native")
    assert [kind for kind, _ in ours] == [kind for kind, _ in native]
    assert len(ours) > 24 / interval or "--stop-time-hours" in words
    for mine, theirs in zip(ours, native, strict=True):
        assert json.loads(mine[1]).keys() == json.loads(theirs[1]).keys()
        assert values(mine, EXACT) == values(theirs, EXACT)
        assert values(mine, ROUNDED) == pytest.approx(values(theirs, ROUNDED), abs=2e-3)


def without_times(log: list[Record]) -> list[Record]:
    """The lines of any format, without the values that differ between any two runs."""
    times = r"(train_|valid_)?(wps|ups|train_wall|wall)"
    return [(kind, re.sub(rf'"?\b{times}"?[:= ]+"?[\d.e+]+"?', "", text)) for kind, text in log]


@pytest.mark.parametrize("form", ["json", "simple", "none"])
def test_lines_do_not_depend_on_how_far_the_host_is_ahead(
    train: Callable[..., list[Record]], tmp_path: Path, form: str
) -> None:
    """With a loss scale that is too large again and again, so that updates are skipped."""
    words = f"--log-format {form} --log-interval 3 --fp16 --fp16-init-scale 4096"
    words += " --fp16-scale-window 2 --fp16-no-flatten-grads"
    found = []
    for ahead in (0, 2):
        file = tmp_path / f"file{ahead}"
        log = train(str(ahead), *words.split(), "--log-file", str(file), ahead=ahead)
        found.append(without_times(log))
        assert file.read_text().count("\n") >= len([kind for kind, _ in log if kind != "valid"])
    assert found[0] == found[1]
    assert [kind for kind, _ in found[0]].count("train_inner") == (0 if form == "none" else 5)


@pytest.mark.parametrize("stop", [8, 11], ids=["at the end of an epoch", "within it"])
def test_lines_of_a_resumed_run(train: Callable[..., list[Record]], stop: int) -> None:
    words = ["--log-format", "json", "--log-interval", "4", "--disable-validation"]
    whole = train("whole", *words)
    with runs.signalled(signal.SIGUSR1, stop):
        parts = train("parts", *words, status=128 + signal.SIGUSR1)
    parts += train("parts", *words)
    lines = [without_times([x for x in log if x[0] == "train_inner"]) for log in (parts, whole)]
    assert lines[0] == lines[1]


def test_tensorboard_counts_updates(
    train: Callable[..., list[Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}

    class Writer(mock.MagicMock):  # type: ignore[misc]
        def add_scalar(self, key: str, value: float, step: int) -> None:
            kind = Path(self.folder).name
            found.setdefault((kind, key), []).append((step, round(value, 3)))

    def writer(folder: str) -> Writer:
        return Writer(folder=folder)

    monkeypatch.setattr(progress_bar, "SummaryWriter", writer)
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})
    words = ["--log-format", "json", "--log-interval", "4", "--tensorboard-logdir"]
    log = train("run", *words, str(tmp_path / "board"))
    for kind in ("train_inner", "train"):
        start = "" if kind == "train_inner" else "train_"
        lines = [json.loads(text) for name, text in log if name == kind]
        losses = [(int(x[f"{start}num_updates"]), float(x[f"{start}loss"])) for x in lines]
        assert found[kind, "loss"] == losses


@pytest.mark.parametrize(("rate", "notes"), [("1e38", 1), ("1e-3", 0)])
def test_a_validation_loss_of_nan_is_noted(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, rate: str, notes: int
) -> None:
    caplog.set_level(logging.INFO)
    runs.run(
        data, tmp_path, **runs.LS, lr=float(rate), max_update=1, disable_validation=None,
        warmup_updates=None, lr_scheduler="fixed",
    )  # fmt: skip
    assert caplog.text.count("note: the validation loss is NaN") == notes


@pytest.mark.parametrize(
    ("words", "kept", "said"),
    [
        (
            "--save-interval 2 --max-epoch 3",
            {"2"},
            "the last checkpoint is that of epoch 2, because",
        ),
        ("--save-interval 4 --max-epoch 3", set(), "no checkpoint is written, because the run"),
        ("--save-interval 4 --max-epoch 3 --max-update 9", {"last"}, ""),
        ("--save-interval 4 --max-epoch 3 --save-interval-updates 9", {"last"}, ""),
        ("--save-interval 3 --max-epoch 3", {"3", "last"}, ""),
        ("--save-interval 4 --max-epoch 3 --no-save", set(), ""),
    ],
)
def test_a_run_whose_last_epochs_are_not_saved_is_noted(
    binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, words: str, kept: set[str],
    said: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    small = SMALL.removesuffix("--no-epoch-checkpoints")
    cli_runs.succeed("train", binarised, *small.split(), *words.split(), "--save-dir", tmp_path)
    notes = re.findall("note: (.*)", caplog.text)
    assert len(notes) == bool(said) and all(note.startswith(said) for note in notes)
    names = {path.stem.removeprefix("checkpoint").strip("_") for path in tmp_path.glob("*.pt")}
    assert kept <= names and bool(names) == bool(kept)
    assert not said or "3" not in names


@pytest.mark.parametrize("most", [10, 10**9])
def test_a_large_model_on_a_cpu_is_noted(
    binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    caplog.set_level(logging.INFO)
    words = [*SMALL.split(), "--max-update", "1", "--no-save", "--save-dir", tmp_path]
    with mock.patch.object(report, "_MANY", most):
        cli_runs.succeed("train", binarised, *words)
    assert ("note: a CPU trains so large a model slowly" in caplog.text) == (most == 10)
