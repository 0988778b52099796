"""The captured step on several ranks, with one GPU each or with one GPU for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.training_runs as runs
import pytest
import torch
from helpers.training_runs import ON_GPU

pytestmark = pytest.mark.gpu

PLAIN = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_captured_ranks_are_eager_ones_and_one_with_twice_the_batches(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    data = runs.corpus(tmp_path / "data")
    # Without this, each process would time cuBLASLt algorithms itself, and the bits depend on its
    # choice.
    monkeypatch.setenv("LIGHTSEQ_LINEAR_SEARCH", "0")
    flags: dict[str, Any] = {**ON_GPU, **PLAIN, precision: True, "max_update": 24}
    found = {}
    for captured in "10":
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", captured)
        found[captured] = runs.run_ranks(data, tmp_path / captured, 2, **flags)
    assert found["1"] == found["0"]
    assert found["1"][0] == found["1"][1]
    assert runs.differing(runs.trained(tmp_path / "1"), runs.trained(tmp_path / "0")) == []
    alone = runs.run(data, tmp_path / "alone", **flags, update_freq=2)
    assert len(alone) == 24
    torch.testing.assert_close(found["1"][0], alone, rtol=2e-2, atol=0)
