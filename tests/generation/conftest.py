"""The trained models of several test files, and the search as it runs on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import counting, digits

from lightseq_fairseq.generation import decoder, incremental, prompts
from lightseq_fairseq.generation import search as of_search
from lightseq_fairseq.generation.delayed_progress import DelayedProgress


@pytest.fixture(scope="module")
def toy() -> digits.Toy:
    return digits.toy()


@pytest.fixture(scope="module")
def language_model() -> counting.Toy:
    return counting.toy()


@pytest.fixture(name="as_on_a_gpu")
def rounded_and_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row counts are rounded up, and the host learns of a step when the next one has run."""
    gpu = torch.device("cuda")
    for name in ("bucket", "first_bucket"):
        function = getattr(decoder, name)

        def rounded(rows: int, device: torch.device, function: Any = function) -> int:
            return int(function(rows, gpu))

        for module in (decoder, of_search, prompts, incremental):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, rounded)
    monkeypatch.setattr(DelayedProgress, "is_delayed", True)
