"""Settings of training that need a package or a GPU: stand-ins record what they are asked.

What fairseq's own run asks of them, ours asks too, with the same numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from numbers import Number
from pathlib import Path
from typing import Any
from unittest import mock

import cli_runs
import flag_runs
import pytest
import torch
from fairseq import file_io
from fairseq.logging import progress_bar
from fairseq.logging.meters import AverageMeter
from flag_runs import Proofs, launch, names, table, train

from lightseq_fairseq.cli import flags

# settings -> what fairseq's module for progress calls the package
LOGS = {
    "--tensorboard-logdir {folder}/board": "SummaryWriter",
    "--wandb-project translation": "wandb",
    "--azureml-logging": "Run",
    "--aim-repo {folder}/aim --aim-run-hash 4711": "get_aim_run",
}
ASYNCHRONOUSLY = "--write-checkpoints-asynchronously"
PROFILE = "--profile"
PROVEN: Proofs = {
    ("train", table.HONOURED): names(*LOGS, ASYNCHRONOUSLY),
    ("train", table.FALLBACK): names(PROFILE),
}
OWN = ("wps", "ups", "wall")  # each run's own


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return flag_runs.inputs(tmp_path_factory.mktemp("inputs"))


def logged(package: mock.MagicMock) -> list[tuple[str, list[str], list[float]]]:
    """Calls with statistics: names of methods, words and numbers given to them."""
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
    calls = []
    for native in (False, True):
        package = mock.MagicMock()
        with (
            mock.patch.object(progress_bar, LOGS[line], package),
            mock.patch.object(progress_bar, "_tensorboard_writers", {}),
            mock.patch.object(sys, "argv", ["train"]),
        ):
            trace = train(
                inputs, tmp_path / str(native) / "run", f"--disable-validation None {line}", native
            )
        assert trace.refusals == []
        calls.append(logged(package))
    ours, theirs = calls
    assert [call[:2] for call in ours] == [call[:2] for call in theirs]
    for (*_, a), (*_, b) in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-3)
    everything = str(ours)
    assert "loss" in everything
    for word in line.replace("{folder}", str(inputs["folder"])).split():
        assert word.startswith("--") or word in everything


class Files:
    """As much of iopath's PathManager as fairseq asks for."""

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
    written = []
    for native in (False, True):
        Files.written.clear()
        with (
            mock.patch.dict(sys.modules, modules),
            mock.patch.object(file_io, "IOPathManager", None),
        ):
            train(inputs, tmp_path / str(native), f"--no-save None {ASYNCHRONOUSLY}", native)
        written.append(list(Files.written))
        state = torch.load(tmp_path / str(native) / written[-1][0], weights_only=False)
        assert state["optimizer_history"][-1]["num_updates"] == 4
    assert written[0] == written[1] == ["checkpoint_last.pt", "closed"]


@pytest.mark.parametrize("own", ["", "--native"])
def test_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture, own: str) -> None:
    caplog.set_level(logging.INFO)
    data = cli_runs.binarise(tmp_path)
    with (
        mock.patch.object(flags, "_lacks_gpu", return_value=False),
        mock.patch.object(torch.cuda.profiler, "profile") as profiler,
        mock.patch.object(torch.autograd.profiler, "emit_nvtx") as marks,
    ):
        launch("train", data, tmp_path, f"{PROFILE} {own}", ok=True)
    for context in (profiler, marks):
        context.return_value.__enter__.assert_called_once()
    told = caplog.text.count("training takes fairseq's own steps: --profile")
    assert told == (0 if own else 1)
