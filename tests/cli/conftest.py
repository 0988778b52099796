"""Data that several test files read; each file has its own copy."""

from __future__ import annotations

from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentence pairs."""
    return cli_runs.binarise(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Running text."""
    return cli_runs.binarise_text(tmp_path_factory.mktemp("text"))
