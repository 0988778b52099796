"""Data, checkpoints and runs that tests of settings share; each file has its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import helpers.cli_runs as cli_runs
import helpers.flag_training as flag_training
import pytest
from helpers.flag_runs import launch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    launch("train", data, folder, "", ok=True)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return flag_training.inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def run(
    inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], flag_training.Trace]:
    """Trains with a line of settings, natively or not; the same line only once."""

    @functools.cache
    def of(line: str, native: bool) -> flag_training.Trace:
        return flag_training.train(inputs, tmp_path_factory.mktemp("run"), line, native)

    return of
