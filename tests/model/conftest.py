"""Data of several test files."""

from __future__ import annotations

from pathlib import Path

import helpers.parity as parity
import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_text(tmp_path_factory.mktemp("text"))
