"""If the GPU hangs, the code that waits for it gives up, and the launcher exits."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest
import torch

from lightseq_fairseq.base.errors import GPUHangs
from lightseq_fairseq.generation.delayed_progress import DelayedProgress
from lightseq_fairseq.memory import graphs
from lightseq_fairseq.step.training_step import StepReport, TrainingStep
from lightseq_fairseq.training.host_copies import HostCopies


class Work:
    """A stand-in for a stream or an event: counts the polls, and is done at poll ``ends_at``."""

    def __init__(self, ends_at: int | None) -> None:
        self.ends_at, self.asked = ends_at, 0

    def query(self) -> bool:
        self.asked += 1
        return self.ends_at is not None and self.asked >= self.ends_at


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PATIENCE", 5e-3)


def test_a_report_is_waited_for(is_impatient: None) -> None:
    work: Any = Work(ends_at=3)
    assert StepReport(torch.arange(2.0), work).wait() == [0, 1]
    assert work.asked == 3


def test_a_step_that_does_not_end(is_impatient: None) -> None:
    work: Any = Work(None)
    with pytest.raises(GPUHangs, match=r"The GPU has not finished a step in .*last checkpoint"):
        StepReport(torch.arange(2.0), work).wait()


def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    work, clock = Work(ends_at=3), mock.Mock(side_effect=[0.0, 1e9, 2e9])
    with mock.patch("time.monotonic", clock), mock.patch("time.sleep"):
        graphs.wait_for(work)  # type: ignore[arg-type]
    assert work.asked == 3


def test_a_step_of_a_search_that_does_not_end(is_impatient: None) -> None:
    progress = DelayedProgress(torch.device("cpu"))
    progress.begin()
    progress._beside = progress._of_steps = Work(None)  # type: ignore[assignment]
    progress.step()
    assert progress.ended()[0] == 0  # the first step has not reported, and need not
    progress.step()
    with pytest.raises(GPUHangs):
        progress.ended()


def test_the_launcher_says_it_and_leaves_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = cli_runs.binarise(tmp_path)
    train = importlib.import_module("lightseq_fairseq.cli.train")
    words = [str(data), "--arch", "ls_transformer", *cli_runs.SMALL, "--save-dir", str(tmp_path)]

    def hangs(*_: object) -> None:
        raise GPUHangs(300)

    def waits_for_the_gpu(copies: HostCopies) -> None:
        if copies._memory is not None:
            os._exit(9)

    def work() -> None:
        with (
            mock.patch.object(TrainingStep, "update", hangs),
            mock.patch.object(HostCopies, "release", waits_for_the_gpu),
        ):
            train.main(words)

    # If the process had exited in Python's normal way, it would have called the mock and ended with
    # status 9.
    assert runs.in_a_fork(work) == 2
    assert "lightseq-train: error: The GPU has not finished a step" in capfd.readouterr().err
