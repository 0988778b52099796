"""A run that was stopped and resumed trains and ends as one that was not."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest
import torch
from fairseq.logging import metrics

from lightseq_fairseq.base.errors import StoppedBySignal
from lightseq_fairseq.training import resuming

PARTS = {"ours": runs.LS, "fairseq's step": runs.NATIVE}
EPOCH = 7  # updates
UNDROPPED = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}  # faster
VALIDATED = {"disable_validation": None, "warmup_updates": None}
PRECISIONS = {
    **runs.PRECISIONS,
    "memory-efficient fp16": {**runs.PRECISIONS["fp16"], "memory_efficient_fp16": True},
}
PLATEAU: dict[str, Any] = {
    **VALIDATED, "lr_scheduler": "reduce_lr_on_plateau", "lr": 0.02, "lr_shrink": 0.5,
    "lr_patience": 1, "lr_threshold": 0.5,
}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "inverse_sqrt": {},
    "fixed": {"lr_scheduler": "fixed", "lr": "0.01,0.02", "force_anneal": 3, "lr_shrink": 0.5},
    "cosine": {
        "lr_scheduler": "cosine", "lr_period_updates": 5, "t_mult": 2, "lr_shrink": 0.5,
        "min_lr": 1e-3,
    },
    "polynomial_decay": {"lr_scheduler": "polynomial_decay", "total_num_update": 40},
    "polynomial_decay, annealed": {
        "lr_scheduler": "polynomial_decay", "total_num_update": 40, "force_anneal": 1,
    },
    "triangular": {
        "lr_scheduler": "triangular", "max_lr": 0.02, "lr_period_updates": 8,
        "warmup_updates": None,
    },
    "tri_stage": {
        "lr_scheduler": "tri_stage", "warmup_steps": 5, "hold_steps": 5, "decay_steps": 15,
        "warmup_updates": None,
    },
    "step": {"lr_scheduler": "step", "lr_deacy_period": 6, "lr_decay": 0.7},
    "manual": {
        "lr_scheduler": "manual", "epoch2lr": "{'2':0.02,'3':0.01}", "update2lr": "{'16':0.03}",
        "warmup_updates": None,
    },
    "plateau": PLATEAU,
    "plateau, warm-up": {**PLATEAU, "warmup_updates": 10},
    "plateau, validated within epochs": {**PLATEAU, "validate_interval_updates": 2},
    "plateau, not each epoch": {**PLATEAU, "validate_interval": 2},
}  # fmt: skip


def load(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "checkpoint_last.pt", weights_only=False))


def run_in_parts(data: Path, folder: Path, *updates: int, **flags: Any) -> list[float]:
    """The losses after the last of these updates; a signal ends the run in each of them."""
    for update in updates:
        with runs.signalled(signal.SIGUSR1, update), pytest.raises(StoppedBySignal):
            runs.run(data, folder, **flags)
        assert load(folder)["optimizer_history"][-1]["num_updates"] == update
    return runs.run(data, folder, **flags)


def differences(one: Path, other: Path) -> list[str]:
    """What differs in the last checkpoints of two runs."""
    found = runs.differing(runs.trained(one), runs.trained(other))
    ends = []
    for end in (load(one), load(other)):
        history, extra = end["optimizer_history"][-1], end["extra_state"]
        history["lr_scheduler_state"].pop("last_epoch", None)  # counts calls; nothing reads it
        groups = end["last_optimizer_state"]["param_groups"]
        rates = [(group["lr"], group.get("initial_lr")) for group in groups]
        state = {key: extra.get(key) for key in ("best", "val_loss", resuming._KEPT)}
        ends.append({"history": history, "rates": rates, **state})
    return found + [key for key, value in ends[0].items() if value != ends[1][key]]


@pytest.mark.parametrize(
    ("parts", "schedule"),
    [("ours", schedule) for schedule in SCHEDULES]
    + [("fairseq's step", name) for name in ("polynomial_decay, annealed", "plateau")],
)
def test_learning_rates(data: Path, tmp_path: Path, parts: str, schedule: str) -> None:
    """Stopped within the second epoch, and at its end."""
    flags = {**PARTS[parts], **UNDROPPED, **SCHEDULES[schedule]}
    flags |= {"max_epoch": 4, "max_update": None, "no_epoch_checkpoints": True}
    whole = runs.run(data, tmp_path / "whole", **flags)
    assert len(whole) == 4 * EPOCH
    rest = run_in_parts(data, tmp_path / "parts", EPOCH + 3, 2 * EPOCH, **flags)
    assert rest == whole[2 * EPOCH :]
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize(("stop", "largest"), [(EPOCH + 4, True), (2 * EPOCH, None)])
def test_the_best_checkpoints(data: Path, tmp_path: Path, stop: int, largest: bool | None) -> None:
    flags: dict[str, Any] = {
        **runs.LS, **UNDROPPED, "disable_validation": None, "validate_interval_updates": 2,
        "save_interval_updates": 3, "validate_after_updates": 4, "keep_best_checkpoints": 2,
        "maximize_best_checkpoint_metric": largest, "keep_interval_updates": 1, "patience": 40,
        "max_epoch": 3, "max_update": None,
    }  # fmt: skip
    runs.run(data, tmp_path / "whole", **flags)
    run_in_parts(data, tmp_path / "parts", stop, **flags)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert len([name for name in names if name.startswith("checkpoint.best_loss_")]) == 1 + (
        not largest
    )
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    best = "checkpoint_best.pt"
    assert runs.differing(*(runs.trained(tmp_path / x, best) for x in ("whole", "parts"))) == []


@pytest.mark.parametrize("stop", [2 * EPOCH - 2, 2 * EPOCH])
def test_stop_min_lr(data: Path, tmp_path: Path, stop: int) -> None:
    """fairseq looks at the rate only at the end of an epoch, so a resumed run does, too."""
    flags: dict[str, Any] = {**runs.LS, "max_epoch": 4, "max_update": None, "warmup_updates": None}
    flags |= {"lr_scheduler": "step", "lr_deacy_period": 10, "stop_min_lr": 3e-3}
    whole = runs.run(data, tmp_path / "whole", **flags)
    assert len(whole) == 2 * EPOCH
    assert run_in_parts(data, tmp_path / "parts", stop, **flags) == whole[stop:]
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


WORSE = {"lr": 1e-30, "patience": 1, "disable_validation": None}  # each validation is the same
FALLING = {"lr_scheduler": "step", "lr_deacy_period": 5, "warmup_updates": None}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"max_update": 4}, "the checkpoint has 4 updates, and --max-update is 4; to train on,"),
        (
            {"max_epoch": 1},
            "the run has finished epoch 1, and --max-epoch is 1; to train on,",
        ),
        ({"stop_time_hours": 1e-9}, "and --stop-time-hours is 1e-09; to train on, raise --stop-t"),
        (
            WORSE,
            "the last 1 validations have not improved, and --patience is 1; to train on, raise",
        ),
        ({**FALLING, "stop_min_lr": 3e-3}, ""),
    ],
    ids=["update", "epoch", "hours", "patience", "rate"],
)
def test_a_run_that_has_ended_trains_no_further(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any], reason: str
) -> None:
    flags = {**runs.LS, "max_update": None, **flags}
    assert runs.run(data, tmp_path, **flags)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert runs.run(data, tmp_path, **flags) == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    (said,) = re.findall("nothing to train: (.*)|stopping training because current", caplog.text)
    assert reason in said


POLYNOMIAL = {"lr_scheduler": "polynomial_decay", "total_num_update": 4, "warmup_updates": None}


def falls_to(rate: str, flag: str, update: int = 4) -> str:
    return f" and, if the command has it, --{flag} (at update {update} the learning rate {rate})"


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (POLYNOMIAL, falls_to("is 0", "total-num-update")),
        ({**POLYNOMIAL, "total_num_update": 5}, ""),
        (
            {**POLYNOMIAL, "end_learning_rate": 1e-3, "total_num_update": 3},
            falls_to("is 0.001", "total-num-update", 3),
        ),
        (
            {**POLYNOMIAL, "total_num_update": 7, "max_update": None, "max_epoch": 1},
            falls_to("is 0", "total-num-update", 7),
        ),
        (
            {"lr_scheduler": "cosine", "lr_period_updates": 3, "warmup_updates": 1},
            falls_to("rises again", "lr-period-updates"),
        ),
        ({"lr_scheduler": "cosine", "warmup_updates": 1}, ""),
        (
            {**SCHEDULES["tri_stage"], "warmup_steps": 1, "hold_steps": 1, "decay_steps": 2},
            falls_to("is 0.0001", "decay-steps"),
        ),
        (
            {"lr_scheduler": "tri_stage", "phase_ratio": "(0.25,0.25,0.5)", "warmup_updates": None},
            "",
        ),
        ({}, ""),
    ],
)
def test_a_run_that_has_ended_names_the_end_of_its_schedule(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any], more: str
) -> None:
    flags = {**runs.LS, "lr": 0.01, "max_update": 4, **flags}
    runs.run(data, tmp_path, **flags)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert runs.run(data, tmp_path, **flags) == []
    (raised,) = re.findall("to train on, raise --max-[a-z]+(.*); for a new run", caplog.text)
    assert raised == more


NOTES = {
    "ended": (
        "note: the learning rate is 0 from update 4 on (--total-num-update), so training changes "
        "nothing: raise --total-num-update"
    ),
    "later": (
        "note: the learning rate is 0 from update 5 on (--total-num-update), but the run goes on "
        "to --max-update 6: raise --total-num-update, or lower --max-update"
    ),
}


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ({}, "ended"),
        ({"total_num_update": 5}, "later"),
        ({"total_num_update": 6}, ""),
        ({"end_learning_rate": 1e-3}, ""),
        ({"lr_scheduler": "inverse_sqrt", "total_num_update": None, "warmup_updates": 2}, ""),
    ],
    ids=["ended", "later", "not in this run", "not to 0", "without an end"],
)
@pytest.mark.parametrize("native", [False, True])
def test_a_run_past_the_end_of_its_schedule_is_noted(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any], note: str,
    native: bool,
) -> None:  # fmt: skip
    flags = {**(runs.NATIVE if native else runs.LS), **POLYNOMIAL, **flags}
    runs.run(data, tmp_path, native, **flags, max_update=4)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert len(runs.run(data, tmp_path, native, **flags, max_update=6)) == 2
    assert re.findall("note: .*", caplog.text) == [NOTES[name] for name in [note] if name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "polynomial_decay --total-num-update 2 --max-update 4",
            "is 0 from update 2 on (--total-num-update), but the run goes on to --max-update 4: "
            "raise --total-num-update, or lower --max-update",
        ),
        (
            "polynomial_decay --total-num-update 2 --end-learning-rate 1e-5 --max-epoch 3 "
            "--max-update 0 --update-freq 1,2",
            "is 1e-05 from update 2 on (--total-num-update), but the run goes on to --max-epoch 3: "
            "raise --total-num-update, or lower --max-epoch",
        ),
        (
            "polynomial_decay --total-num-update 1 --max-update 0 --stop-time-hours 1e-9",
            "is 0 from update 1 on (--total-num-update), but the run goes on: raise "
            "--total-num-update",
        ),
        ("polynomial_decay --total-num-update 4 --max-update 4", None),
        ("polynomial_decay --total-num-update 2000 --max-update 3000 --max-epoch 1", None),
        ("cosine --lr-period-updates 2 --max-update 4", None),
    ],
)
def test_a_new_run_longer_than_its_schedule_is_noted(
    binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, words: str, said: str | None
) -> None:
    caplog.set_level(logging.INFO)
    run = f"--arch ls_transformer_tiny --optimizer ls_adam --lr 1e-3 --lr-scheduler {words}"
    cli_runs.succeed("train", binarised, *cli_runs.SMALL, *run.split(), "--save-dir", tmp_path)
    notes = re.findall("note: the learning rate (.*)", caplog.text)
    assert notes == ([said] if said else [])


@pytest.mark.parametrize(
    ("reset", "epochs", "bad"),
    [
        ("none", 4, 2),
        ("reset_meters", 7, 5),
        ("reset_lr_scheduler", 4, 0),
        ("reset_dataloader", 1, 2),
        ("reset_optimizer", 7, 2),
    ],
)
def test_resets(data: Path, tmp_path: Path, reset: str, epochs: int, bad: int) -> None:
    """The epoch in which --patience ends the run, and the schedule's bad epochs before it."""
    flags: dict[str, Any] = {**runs.LS, **PLATEAU, "lr_patience": 9, "patience": 3}
    flags |= {"lr": 1e-30, "max_update": None, "no_epoch_checkpoints": True}
    runs.run(data, tmp_path, **flags, max_epoch=3)
    runs.run(data, tmp_path, **flags, max_epoch=12, **{reset: True} if reset != "none" else {})
    state = load(tmp_path)["extra_state"]
    assert state["train_iterator"]["epoch"] - 1 == epochs
    assert state[resuming._KEPT]["num_bad_epochs"] == bad


@pytest.fixture(scope="module")
def run_of(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], tuple[Path, list[float]]]:
    """(precision, native) -> the folder of a run of nine updates, and its losses."""

    @functools.cache
    def run(precision: str, native: bool) -> tuple[Path, list[float]]:
        folder, kind = tmp_path_factory.mktemp("run"), runs.NATIVE if native else runs.LS
        flags = {**kind, **PRECISIONS[precision], "native": native, "max_update": 9}
        return folder, runs.run(data, folder, **flags)

    return run


@pytest.mark.parametrize(
    ("saved", "asked", "native"),
    [(*pair, False) for pair in itertools.permutations(PRECISIONS, 2)]
    + [("fp32", "bf16", True), ("bf16", "fp32", True)],
)
def test_any_precision_resumes_from_any(
    data: Path, tmp_path: Path, run_of: Any, saved: str, asked: str, native: bool
) -> None:
    """The state is that of the file: parameters, moments, number of updates."""
    folder, before = run_of(saved, native)
    file = load(folder)
    found: list[dict[str, Any]] = []
    step = runs.Trainer.train_step

    def look(self: runs.Trainer, *arguments: Any) -> Any:
        self.consolidate_optimizer()
        found.append(copy.deepcopy(self.state_dict()))
        return step(self, *arguments)

    with mock.patch.object(runs.Trainer, "train_step", look):
        flags = {**runs.LS, **PRECISIONS[asked], "max_update": 12}
        after = runs.run(data, tmp_path, **flags, restore_file=f"{folder}/checkpoint_last.pt")
    assert len(after) == 3 and max(after) < before[0]
    last = [state["optimizer_history"][-1] for state in (file, found[0])]
    assert last[0]["num_updates"] == last[1]["num_updates"] == 9
    assert last[0]["lr_scheduler_state"] == last[1]["lr_scheduler_state"]
    for name, value in file["model"].items():
        there = found[0]["model"][name]
        assert torch.equal(value.to(there.dtype), there), name
    for moment in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (
            torch.cat([entry[moment].flatten() for _, entry in sorted(state.items())])
            for state in (x["last_optimizer_state"]["state"] for x in (found[0], file))
        )
        assert torch.equal(ours, theirs), moment


def test_fairseqs_trainer_resumes_from_these_files(data: Path, tmp_path: Path) -> None:
    for schedule in ("plateau", "polynomial_decay, annealed"):
        folder = tmp_path / schedule
        flags = {**SCHEDULES[schedule], "patience": 9, "disable_validation": None, "max_epoch": 3}
        runs.run(data, folder, **runs.LS, **flags, max_update=9)
        assert resuming._KEPT in load(folder)["extra_state"]
        flags["max_update"] = None
        assert len(runs.run(data, folder, native=True, **runs.NATIVE, **flags)) == 3 * EPOCH - 9


@pytest.mark.parametrize("native", [[], ["--native"]], ids=["ours", "native"])
def test_patience(binarised: Path, tmp_path: Path, native: list[str]) -> None:
    """Commands with the default number of workers; the run ends after the fourth epoch."""
    small = [word for word in cli_runs.SMALL if word not in ("--num-workers", "0")]
    small[small.index("--max-update") + 1] = "1000"
    words = [*small, *native, "--arch", "ls_transformer_tiny", "--lr", "1e-9", "--patience", "3"]
    words += ["--warmup-updates", "1", "--save-dir"]

    def train(folder: str, epochs: int) -> tuple[int, Any]:
        metrics.reset()
        cli_runs.succeed("train", binarised, *words, tmp_path / folder, "--max-epoch", str(epochs))
        last = load(tmp_path / folder)
        return last["extra_state"]["train_iterator"]["epoch"] - 1, last["extra_state"]

    epochs, state = train("whole", 12)
    assert epochs == 4
    for stop in (2, 3):
        assert train("parts", stop)[0] == stop
    ended, state_of_parts = train("parts", 12)
    assert ended == 4
    assert state_of_parts[resuming._KEPT] == state[resuming._KEPT]
    assert train("parts", 12)[0] == 4  # it trains no further
