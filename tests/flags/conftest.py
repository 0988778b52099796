"""Runs of the tests of training's settings; each file has its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import helpers.flag_training as flag_training
import pytest


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
