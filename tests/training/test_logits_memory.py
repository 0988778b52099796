"""The logits are the only tensor of their size, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.training_runs as runs
import pytest
import torch
from helpers.parity import write_text
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightseq_fairseq.memory.packing import PackedBatch
from lightseq_fairseq.step.training_step import TrainingStep


class Large(TorchDispatchMode):
    """Keeps every new memory of at least ``least`` numbers. What an op's reference allocates is not
    seen: it is that of a kernel's registers."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least
        self.found: dict[Any, Any] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.numel() >= self.least:
                storage = x.untyped_storage()
                if storage._cdata not in before:
                    self.found.setdefault(storage._cdata, (storage, str(func), tuple(x.shape)))
        return result


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"share_all_embeddings": True, "report_accuracy": True, "bf16": True},
        {"criterion": "ls_cross_entropy", "label_smoothing": None, "fp16": True},
        {"arch": "ls_bart_base", "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        runs.TEXT,
    ],
    ids=["default", "smoothed", "unsmoothed", "bart", "running-text"],
)
def test_one_tensor_has_the_size_of_the_logits(
    tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 97 words, no multiple of 8: rows of logits end with those of the spare rows."""
    data = (write_text if flags is runs.TEXT else runs.corpus)(tmp_path / "data")
    begin, seen = TrainingStep._forward_backward, []

    def watched(step: TrainingStep, batch: PackedBatch, *others: Any) -> None:
        rows = dict(zip((s.name for s in batch.layout), batch.bucket.rows, strict=True))["target"]
        with Large(rows * 97) as large:
            begin(step, batch, *others)
        seen.append([(func, shape, rows) for _, func, shape in large.found.values()])

    monkeypatch.setattr(TrainingStep, "_forward_backward", watched)
    runs.run(data, tmp_path / "run", **{**runs.LS, **flags}, no_save=True, max_update=3)
    assert len(seen) == 3
    for found in seen:
        assert len(found) == 1, found
        (name, shape, rows) = found[0]
        assert name == "lightseq.linear_fwd.default" and shape == (rows, 104)
