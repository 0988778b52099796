"""Checkpoints are written while training continues."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import saving
from lightseq_fairseq.step.training_step import TrainingStep
from lightseq_fairseq.training.background import WRITER
from lightseq_fairseq.training.host_copies import HostCopies
from lightseq_fairseq.training.report import FILE

CPU = torch.device("cpu")


def flags(**others: Any) -> dict[str, Any]:
    return {**runs.LS, "bf16": True, "no_epoch_checkpoints": True, "max_update": 12, **others}


class TestRuns:
    def test_training_goes_on_and_nothing_is_deleted_before(
        self, data: Path, tmp_path: Path
    ) -> None:
        """Saves at updates 2, 4, 6, ...; two are kept. The save at 6 begins, and then waits for the
        test."""
        run, save, steps = TrainingStep.update, saving.save, []
        seen: dict[str, list[str]] = {}
        may_write = threading.Event()

        def step(self: TrainingStep, *arguments: Any) -> Any:
            steps.append(arguments)
            # the save at the end of this update, which ends the epoch, waits for the save at 6
            if len(steps) == 7:
                seen["meanwhile"] = sorted(os.listdir(tmp_path))
                may_write.set()
            return run(self, *arguments)

        def slow(state: Any, path: str, advice: str) -> None:
            if state["optimizer_history"][-1]["num_updates"] == 6:
                assert may_write.wait(60)
            save(state, path, advice)

        kept = flags(save_interval_updates=2, keep_interval_updates=2, max_update=8)
        with (
            mock.patch.object(TrainingStep, "update", step),
            mock.patch.object(saving, "save", slow),
        ):
            runs.run(data, tmp_path, **kept)
        assert seen["meanwhile"] == [
            ".lightseq-lock", "checkpoint_1_2.pt", "checkpoint_1_4.pt", "checkpoint_last.pt", FILE
        ]  # fmt: skip
        assert sorted(os.listdir(tmp_path)) == [
            "checkpoint_1_6.pt", "checkpoint_2_8.pt", "checkpoint_last.pt", FILE
        ]  # fmt: skip
        with mock.patch.object(saving, "save", save):
            runs.run(data, tmp_path / "plain", **flags(max_update=6))
        written = runs.trained(tmp_path, "checkpoint_1_6.pt")
        assert runs.differing(written, runs.trained(tmp_path / "plain")) == []

    def test_an_error_ends_the_run_and_keeps_what_there_was(
        self, data: Path, tmp_path: Path
    ) -> None:
        save = saving.save

        def fails(state: Any, path: str, advice: str) -> None:
            if path.endswith("_4.pt"):
                raise UserError(f"Cannot write {path} (No space left on device){advice}.")
            save(state, path, advice)

        kept = flags(save_interval_updates=2, keep_interval_updates=1)
        with (
            mock.patch.object(saving, "save", fails),
            pytest.raises(UserError, match=r"_1_4\.pt \(No space left on device\); earlier"),
        ):
            runs.run(data, tmp_path, **kept)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint_1_2.pt", "checkpoint_last.pt", FILE]
        last = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
        assert last["optimizer_history"][-1]["num_updates"] == 2
        assert not [t for t in threading.enumerate() if t.name.startswith("checkpoints")]

    def test_an_interrupted_run_ends_when_its_checkpoint_is_written(
        self, data: Path, tmp_path: Path
    ) -> None:
        run, save, steps = TrainingStep.update, saving.save, []

        def step(self: TrainingStep, *arguments: Any) -> Any:
            steps.append(arguments)
            if len(steps) == 4:
                raise KeyboardInterrupt
            return run(self, *arguments)

        def slow(state: Any, path: str, advice: str) -> None:
            time.sleep(0.5)
            save(state, path, advice)

        with (
            mock.patch.object(TrainingStep, "update", step),
            mock.patch.object(saving, "save", slow),
            pytest.raises(KeyboardInterrupt),
        ):
            runs.run(data, tmp_path, **flags(save_interval_updates=3))
        assert sorted(os.listdir(tmp_path)) == ["checkpoint_1_3.pt", "checkpoint_last.pt", FILE]


def test_a_forked_process_has_a_queue_of_its_own(tmp_path: Path) -> None:
    ours, its = tmp_path / "ours", tmp_path / "its"
    for file in (ours, its):
        file.touch()
    WRITER.remove(str(ours))

    def work() -> None:
        signal.alarm(20)  # ends it if it waits for a thread of the parent
        WRITER.remove(str(its))
        WRITER.close()

    try:
        assert runs.in_a_fork(work) == 0
    finally:
        WRITER.close()
    assert os.listdir(tmp_path) == []


class TestCopies:
    def test_are_of_now_and_stand_alone(self, tmp_path: Path) -> None:
        flat = torch.arange(12.0)
        tied = flat[2:6].view(2, 2)
        state = {
            "model": {"a": tied, "b": flat[2:6].view(2, 2), "t": flat[6:12].view(2, 3).t()},
            "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
            "empty": torch.zeros(0, 3),
            "flags": torch.tensor([True, False]),
            "numbers": [1, {"n": 2}],
        }
        expected = torch.load(self.saved(saving.own_storage(state), tmp_path), weights_only=False)
        copies = HostCopies()
        copied, wait = copies.of(state, CPU)
        flat.zero_()
        state["numbers"][1]["n"] = 3  # type: ignore[index]
        wait()
        found = torch.load(self.saved(copied, tmp_path), weights_only=False)
        assert found["numbers"] == [1, {"n": 2}]
        for name, x in expected["model"].items():
            assert torch.equal(found["model"][name], x) and found["model"][name].any()
            assert found["model"][name].stride() == x.stride()
            assert x.untyped_storage().nbytes() == x.numel() * 4
        assert found["model"]["a"].data_ptr() == found["model"]["b"].data_ptr()
        assert torch.equal(found["half"], torch.tensor([1.5, 2.5]))
        assert torch.equal(found["flags"], torch.tensor([True, False]))
        assert found["empty"].shape == (0, 3)

    def saved(self, state: Any, folder: Path) -> Path:
        torch.save(state, folder / "x.pt")
        return folder / "x.pt"

    def test_use_the_same_memory_again(self) -> None:
        copies = HostCopies()
        copies.reserve(1 << 16, CPU)
        memory = copies._memory
        for value in range(3):
            copied, _ = copies.of([torch.full((100,), float(value)), torch.ones(3)], CPU)
            assert copies._memory is memory
            assert copied[0].eq(value).all() and copied[1].eq(1).all()
        copied, _ = copies.of([torch.ones(1 << 16)], CPU)  # more than was reserved
        assert copied[0].eq(1).all()
        copies.release()
