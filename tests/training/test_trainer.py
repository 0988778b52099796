from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import helpers.training_runs as runs  # isort: skip  (fairseq has to be prepared before)

from fairseq import checkpoint_utils
from fairseq import trainer as native_trainer
from fairseq.file_io import PathManager
from fairseq_cli import train

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request, messages
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.training import report, trainer

FP16 = {"fp16": True, "fp16_init_scale": 64, "fp16_scale_window": 4}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16 flat": FP16,
    "fp16 list": {**FP16, "fp16_no_flatten_grads": True},
    "memory-efficient bf16": {"memory_efficient_bf16": True},
}
UPDATES = 12  # 7 of them are the first epoch
SAVED = {"checkpoint_1_5.pt": 5, "checkpoint1.pt": 7, "checkpoint_2_10.pt": 10}


@pytest.fixture(autouse=True)
def flat_fp16_on_cpu() -> Any:
    """fairseq asks CUDA for the device of its flat vector; None stands for the CPU."""
    with mock.patch.object(torch.cuda, "current_device", lambda: None):
        yield


class Run:
    """A run without interruption: its losses and, in ``folder``, its checkpoints."""

    def __init__(self, data: Path, folder: Path, flags: dict[str, Any]) -> None:
        self.data, self.folder, self.flags = data, folder, flags
        self.losses = runs.run(data, folder, **flags, save_interval_updates=5)
        assert len(self.losses) == UPDATES

    def resume(self, save_dir: Path, **flags: Any) -> list[float]:
        return runs.run(self.data, save_dir, **{**self.flags, **flags})


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    made: dict[str, Run] = {}

    def get(precision: str) -> Run:
        if precision not in made:
            flags = {**runs.LS, **PRECISIONS[precision], "max_update": UPDATES}
            made[precision] = Run(data, tmp_path_factory.mktemp("finished"), flags)
        return made[precision]

    return get


def load(path: Path) -> dict[str, Any]:
    return dict(checkpoint_utils.load_checkpoint_to_cpu(str(path)))


@pytest.mark.parametrize("file", SAVED)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_repeats_the_losses_bit_for_bit(
    precision: str, file: str, finished: Callable[[str], Run], tmp_path: Path
) -> None:
    run = finished(precision)
    losses = run.resume(tmp_path, restore_file=run.folder / file)
    assert losses == run.losses[SAVED[file] :]
    ours, theirs = load(tmp_path / "checkpoint_last.pt"), load(run.folder / "checkpoint_last.pt")
    for name, value in theirs["model"].items():
        assert torch.equal(ours["model"][name], value), name
    assert ours["extra_state"].get("loss_scaler") == theirs["extra_state"].get("loss_scaler")


@pytest.mark.parametrize("precision", ["bf16", "fp16 flat", "fp16 list"])
class TestMasters:
    def test_the_file_holds_them(self, precision: str, finished: Callable[[str], Run]) -> None:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        model = load(finished(precision).folder / "checkpoint_last.pt")["model"]
        rounded = [
            name for name, value in model.items() if torch.equal(value.to(dtype).float(), value)
        ]
        assert {value.dtype for value in model.values()} == {torch.float32}
        assert all(name.endswith(("version", "_float_tensor")) for name in rounded)

    def test_resets_keep_them(
        self, precision: str, finished: Callable[[str], Run], tmp_path: Path
    ) -> None:
        """--reset-optimizer resets the moments, but must not round the parameters: without an
        update nothing changes."""
        run = finished(precision)
        run.resume(
            tmp_path, restore_file=run.folder / "checkpoint_last.pt", reset_optimizer=True,
            reset_dataloader=True, reset_meters=True, reset_lr_scheduler=True,
            lr=1e-30, max_update=1, weight_decay=0,
        )  # fmt: skip
        before, after = (
            load(run.folder / "checkpoint_last.pt"),
            load(tmp_path / "checkpoint_last.pt"),
        )
        for name, value in before["model"].items():
            assert torch.equal(after["model"][name], value), name


def test_two_ranks(finished: Callable[[str], Run], tmp_path: Path) -> None:
    """Rank 0 reads the checkpoint and sends it to the other rank, including the fp32 parameters."""
    flags = {**finished("bf16").flags, "max_update": 6}
    whole = runs.run_ranks(
        finished("bf16").data, tmp_path / "a", 2, **flags, save_interval_updates=3
    )
    rest = runs.run_ranks(
        finished("bf16").data, tmp_path / "b", 2, **flags,
        restore_file=tmp_path / "a" / "checkpoint_1_3.pt",
    )  # fmt: skip
    assert [len(losses) for losses in rest] == [3, 3]
    assert rest == [losses[3:] for losses in whole]


class TestBothWays:
    """native -> ours -> native is one run; there is no dropout, because the masks differ."""

    FLAGS: dict[str, Any] = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16 flat"])
    def test_with_optimizer_state(self, precision: str, data: Path, tmp_path: Path) -> None:
        flags = {**self.FLAGS, **PRECISIONS[precision]}
        expected = runs.run(data, tmp_path / "a", native=True, **runs.NATIVE, **flags)
        shared = tmp_path / "b"
        losses = runs.run(data, shared, native=True, **runs.NATIVE, **flags, max_update=4)
        losses += runs.run(data, shared, **runs.LS, **flags, max_update=8)
        losses += runs.run(data, shared, native=True, **runs.NATIVE, **flags)
        assert len(losses) == len(expected) == UPDATES
        # The native file holds 16-bit weights, which are rounded, so the losses cannot agree more
        # closely.
        tolerance = 1e-5 if precision == "fp32" else 1e-2
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
        state = load(shared / "checkpoint_last.pt")["last_optimizer_state"]["state"]
        assert {entry["step"] for entry in state.values()} == {UPDATES}

    @pytest.mark.parametrize("ls", ["arch", "optimizer", "criterion"])
    def test_one_component_at_a_time(self, ls: str, data: Path, tmp_path: Path) -> None:
        names = {**runs.NATIVE, ls: runs.LS[ls]}
        expected = runs.run(data, tmp_path / "a", native=True, **runs.NATIVE, **self.FLAGS)
        losses = runs.run(data, tmp_path / "b", **names, **self.FLAGS, max_update=6)
        assert b"ls_" not in (tmp_path / "b" / "checkpoint_last.pt").read_bytes()
        losses += runs.run(data, tmp_path / "b", native=True, **runs.NATIVE, **self.FLAGS)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


# Meters of seconds, or of numbers per second.
TIMES = {"wall", "train_wall", "wps", "ups"}


def _without_times(path: Path, save_dir: Path) -> Any:
    state = torch.load(path, weights_only=False)
    assert state["cfg"]["checkpoint"].pop("save_dir") == str(save_dir)
    assert vars(state["cfg"]["model"]).pop("save_dir") == str(save_dir)
    assert state["extra_state"].pop("previous_training_time") > 0
    meters = state["extra_state"]["metrics"]
    assert {key for group in meters.values() for _, key, *_ in group} >= TIMES - {"wall"}
    for name, group in meters.items():
        meters[name] = [entry for entry in group if entry[1] not in TIMES]
    return state


def _flattened(state: Any, name: str = "") -> dict[str, Any]:
    if isinstance(state, Namespace):
        state = vars(state)
    if isinstance(state, dict):
        items: Any = state.items()
    elif isinstance(state, (list, tuple)):
        items = enumerate(state)
    else:
        return {name: state}
    return {k: v for key, value in items for k, v in _flattened(value, f"{name}/{key}").items()}


@pytest.mark.parametrize("native", [False, True])
def test_equal_runs_write_equal_files(data: Path, tmp_path: Path, native: bool) -> None:
    """Also where uninitialised memory does not happen to be the same."""
    flags = {**(runs.NATIVE if native else runs.LS), "bf16": True, "max_update": 8}
    found = []
    for name in "ab":
        torch.use_deterministic_algorithms(name == "b")  # this fills new memory with NaN
        try:
            runs.run(data, tmp_path / name, native=native, **flags, disable_validation=None)
        finally:
            torch.use_deterministic_algorithms(False)
        names = sorted(path.name for path in (tmp_path / name).glob("*.pt"))
        assert names == ["checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt"]
        found.append(
            {
                f"{file}{key}": value
                for file in names
                for key, value in _flattened(
                    _without_times(tmp_path / name / file, tmp_path / name)
                ).items()
            }
        )
    assert found[0].keys() == found[1].keys()
    differing = [
        key
        for key, value in found[0].items()
        if not (
            torch.equal(value, found[1][key]) if torch.is_tensor(value) else value == found[1][key]
        )
    ]
    assert differing == []


class TestNativeRuns:
    def test_are_fairseqs_own(self, data: Path, tmp_path: Path) -> None:
        flags = {**runs.NATIVE, "bf16": True, "max_update": 3}
        ours = runs.run(data, tmp_path / "a", **flags)
        assert runs.run(data, tmp_path / "b", native=True, **flags) == ours
        a, b = (load(tmp_path / folder / "checkpoint_last.pt") for folder in "ab")
        assert a["extra_state"].keys() == b["extra_state"].keys()
        for name, value in b["model"].items():
            assert torch.equal(a["model"][name], value)

    def test_install(self) -> None:
        with mock.patch.object(train, "Trainer", native_trainer.Trainer):
            patching.apply("our trainer")
            assert train.Trainer is trainer.Trainer
        assert issubclass(trainer.Trainer, native_trainer.Trainer)


def test_an_average_begins_where_the_file_has_none(
    finished: Callable[[str], Run], tmp_path: Path
) -> None:
    run = finished("fp32")
    shutil.copy(run.folder / "checkpoint_1_5.pt", tmp_path / "checkpoint_last.pt")
    run.resume(tmp_path, store_ema=True, ema_decay=1.0)
    before = load(run.folder / "checkpoint_1_5.pt")["model"]
    average = load(tmp_path / "checkpoint_last.pt")["extra_state"]["ema"]
    weights = [name for name in before if not name.endswith(".version")]
    assert all(torch.equal(average[name], before[name]) for name in weights)


class TestRefusals:
    def refused(self, run: Run, folder: Path, **flags: Any) -> str:
        """The message of the refusal; the file must not change."""
        last = folder / "checkpoint_last.pt"
        before = last.read_bytes()
        with pytest.raises(Exception) as error:
            run.resume(folder, **flags)
        assert last.read_bytes() == before
        assert os.listdir(folder) == ["checkpoint_last.pt"]
        begins = {"save_dir": str(folder), "restore_file": last.name, "finetune_from_model": None}
        none = {"checkpoint_suffix": "", "use_sharded_state": False, "continue_once": None}
        request = Request([], Namespace(**begins, **none, **flags))
        sentence = messages.explain(error.value, request)
        assert sentence is not None and "\n" not in sentence
        return sentence

    @pytest.fixture
    def folder(self, finished: Callable[[str], Run], tmp_path: Path) -> Path:
        shutil.copy(finished("fp32").folder / "checkpoint_1_5.pt", tmp_path / "checkpoint_last.pt")
        return tmp_path

    @pytest.mark.parametrize("size", [0, 100, 20_000, -1])
    def test_truncated(self, size: int, finished: Callable[[str], Run], folder: Path) -> None:
        last = folder / "checkpoint_last.pt"
        last.write_bytes(last.read_bytes()[:size])
        assert str(last) in self.refused(finished("fp32"), folder)

    def test_another_model(self, finished: Callable[[str], Run], folder: Path) -> None:
        sentence = self.refused(finished("fp32"), folder, encoder_embed_dim=32)
        assert "embed_tokens.weight is [97, 16] in the checkpoint and [97, 32] in" in sentence
        sentence = self.refused(finished("fp32"), folder, encoder_layers=2)
        assert "encoder.layers.1." in sentence

    def test_another_optimizer(self, finished: Callable[[str], Run], folder: Path) -> None:
        flags = {"criterion": "cross_entropy", "label_smoothing": None}
        assert "--reset-optimizer" in self.refused(finished("fp32"), folder, **flags)


class TestCrashes:
    """A run that starts at update 5 is killed while it saves at update 7; the next run resumes."""

    @pytest.fixture
    def folder(self, finished: Callable[[str], Run], tmp_path: Path) -> Path:
        shutil.copy(finished("bf16").folder / "checkpoint_1_5.pt", tmp_path / "checkpoint_last.pt")
        return tmp_path

    def interrupted(self, run: Run, folder: Path, sabotage: Callable[[], None]) -> int:
        def work() -> None:
            sabotage()
            run.resume(folder)

        return runs.in_a_fork(work)

    def goes_on(self, run: Run, folder: Path, updates: int) -> None:
        assert run.resume(folder) == run.losses[updates:]

    @pytest.mark.parametrize(
        ("moment", "updates"),
        [("write", 5), ("rename", 5), ("renamed", 5), ("copy", 5), ("second rename", 5),
         ("second renamed", 7)],
    )  # fmt: skip
    def test_killed(
        self, moment: str, updates: int, finished: Callable[[str], Run], folder: Path
    ) -> None:
        replace, renamed = os.replace, []

        def sabotaged(source: str, target: str) -> None:
            if moment == ("second rename" if renamed else "rename"):
                runs.die()
            replace(source, target)
            renamed.append(target)
            if moment == ("second renamed" if len(renamed) > 1 else "renamed"):
                runs.die()
            if moment == "copy":
                resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))

        def sabotage() -> None:
            os.replace = sabotaged  # only in the child
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            if moment == "write":
                runs.limit_files(50_000, killed=True)

        run = finished("bf16")
        assert self.interrupted(run, folder, sabotage) < 0
        assert ("checkpoint1.pt" in os.listdir(folder)) == (moment not in ("write", "rename"))
        self.goes_on(run, folder, updates)

    def test_full_disk(self, finished: Callable[[str], Run], folder: Path) -> None:
        run = finished("bf16")

        def sabotage() -> None:
            runs.limit_files(50_000, killed=False)

        sentence = folder / "sentence"

        def work() -> None:
            sabotage()
            try:
                run.resume(folder)
            except UserError as error:
                sentence.write_text(str(error))

        assert runs.in_a_fork(work) == 0
        assert "checkpoint1.pt (File too large); earlier checkpoints" in sentence.read_text()
        assert [path.name for path in folder.glob("*.pt*")] == ["checkpoint_last.pt"]
        self.goes_on(run, folder, 5)


def test_best_and_last_are_files_of_their_own(data: Path, tmp_path: Path) -> None:
    runs.run(data, tmp_path, **runs.LS, max_update=7, disable_validation=None)
    names = ("checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt")
    assert sorted(os.listdir(tmp_path)) == sorted((*names, report.FILE))
    assert len({(tmp_path / name).stat().st_ino for name in names}) == 3
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1


def test_copies_of_native_runs_stay_fairseqs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_utils, "PathManager", PathManager)  # as in a new process
    with mock.patch.object(PathManager, "copy", side_effect=PathManager.copy) as copied:
        runs.run(data, tmp_path, **runs.NATIVE, max_update=7)
    assert copied.call_count == 1


def test_a_run_leaves_no_trainer(data: Path, tmp_path: Path) -> None:
    """It would keep the memory of its model and optimizer: of the GPU, in a notebook."""
    runs.run(data, tmp_path, **runs.LS, max_update=2)
    gc.collect()
    assert not [x for x in gc.get_objects() if issubclass(type(x), trainer.Trainer)]
