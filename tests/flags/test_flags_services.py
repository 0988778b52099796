"""Training settings that need a package or a GPU; stand-ins record the calls.

Our run makes the same calls as fairseq's own run, with the same numbers; without the setting it
makes other calls or none.
"""

from __future__ import annotations

import logging
import operator
import sys
from collections.abc import Iterator
from numbers import Number
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import pytest
import torch
from fairseq import file_io
from fairseq.logging import progress_bar
from fairseq.logging.meters import AverageMeter
from helpers.flag_runs import Proofs, launch, prove, proven, table
from helpers.flag_training import train

from lightseq_fairseq.plugins import conditions

# Settings -> name of the package in fairseq's progress_bar module
LOGS = {
    "--tensorboard-logdir {folder}/board": "SummaryWriter",
    "--wandb-project translation": "wandb",
    "--azureml-logging": "Run",
    "--aim-repo {folder}/aim --aim-run-hash 4711": "get_aim_run",
}
ASYNCHRONOUSLY = "--write-checkpoints-asynchronously"
PROFILE = "--profile"
PROVEN: Proofs = {
    ("train", table.WORKS): proven(*LOGS, ASYNCHRONOUSLY),
    ("train", table.FALLBACK): proven(PROFILE),
}
OWN = ("wps", "ups", "wall")  # they differ between any two runs


def logged(package: mock.MagicMock) -> list[tuple[str, list[str], list[float]]]:
    """Calls that carry statistics: the names of the methods, and the words and numbers passed to
    them."""
    found = []
    for name, arguments, keywords in package.mock_calls:
        values = list(_flat([*arguments, keywords]))
        words = [value for value in values if isinstance(value, str)]
        numbers = [float(value) for value in values if not isinstance(value, str)]
        configuration = name.endswith((".set", "config.update"))
        if not configuration and not any(word.endswith(OWN) for word in words):
            found.append((name, words, numbers))
    return sorted(found, key=lambda call: call[:2])


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from _flat(list(value.items()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, AverageMeter):
        yield float(value.val)
    elif isinstance(value, (str, Number, torch.Tensor)):
        yield value


@pytest.mark.parametrize("line", LOGS)
def test_logs(inputs: dict[str, Path], tmp_path: Path, line: str) -> None:
    places = {**inputs, "folder": tmp_path}

    def run(line: str, native: bool) -> list[tuple[str, list[str], list[float]]]:
        package = mock.MagicMock()
        with (
            mock.patch.object(progress_bar, name, package),
            mock.patch.object(progress_bar, "_tensorboard_writers", {}),
            mock.patch.object(sys, "argv", ["train"]),
        ):
            trace = train(places, tmp_path / "save", f"--disable-validation None {line}", native)
        assert not trace.error and trace.refusals == []
        return logged(package)

    def agree(ours: list[Any], theirs: list[Any]) -> bool:
        return [call[:2] for call in ours] == [call[:2] for call in theirs] and all(
            a == pytest.approx(b, rel=1e-3, abs=1e-3)
            for (*_, a), (*_, b) in zip(ours, theirs, strict=True)
        )

    name = LOGS[line]
    ours, _ = prove(line, run, agree)
    assert "loss" in str(ours)


class Files:
    """The part of iopath's PathManager that fairseq uses."""

    written: list[str] = []
    _path_handlers: dict[str, Any] = {}

    def opena(self, path: str, mode: str, **_: Any) -> Any:
        self.written.append(Path(path).name)
        return open(path, mode)

    def async_close(self) -> bool:
        self.written.append("closed")
        return True

    def __getattr__(self, name: str) -> Any:
        plain = getattr(file_io.PathManager, name)

        def without_iopath(*arguments: Any, **keywords: Any) -> Any:
            with mock.patch.object(file_io, "IOPathManager", None):
                return plain(*arguments, **keywords)

        return without_iopath


def test_files_are_written_by_iopath(inputs: dict[str, Path], tmp_path: Path) -> None:
    modules = {name: mock.MagicMock() for name in ("iopath", "iopath.common")}
    modules["iopath.common.file_io"] = mock.MagicMock(PathManager=Files)

    def run(line: str, native: bool) -> list[str]:
        Files.written.clear()
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(file_io, "IOPathManager", None),
        ):
            folder = tmp_path / f"native{line}" if native else tmp_path
            train(inputs, folder, f"--no-save None {line}", native)
        state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
        assert state["optimizer_history"][-1]["num_updates"] == 4
        return list(Files.written)

    ours, _ = prove(ASYNCHRONOUSLY, run, operator.eq)
    assert ours == ["checkpoint_last.pt", "closed"]


def test_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = cli_runs.binarise(tmp_path)

    def run(line: str, native: bool) -> list[int]:
        with (
            mock.patch.object(conditions, "lacks_gpu", return_value=False),
            mock.patch.object(torch.cuda.profiler, "profile") as profiler,
            mock.patch.object(torch.autograd.profiler, "emit_nvtx") as marks,
        ):
            launch("train", data, tmp_path / f"save{line}", line + " --native" * native, ok=True)
        return [x.return_value.__enter__.call_count for x in (profiler, marks)]

    ours, _ = prove(PROFILE, run, operator.eq)
    assert ours == [1, 1]
    assert caplog.text.count("step: fairseq's own (--profile)") == 1
