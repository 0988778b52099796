"""The trained models of several test files."""

from __future__ import annotations

import pytest
from helpers import digits


@pytest.fixture(scope="module")
def toy() -> digits.Toy:
    return digits.toy()
