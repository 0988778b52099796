"""Data that several test files train on; each file has its own copy."""

from __future__ import annotations

from pathlib import Path

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def binarised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise(tmp_path_factory.mktemp("binarised"))
