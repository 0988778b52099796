"""Inputs of the tests of layers: packed rows, dropout rates, and settings of a test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightseq_fairseq.memory.packing import Segments

RNG = torch.tensor([1234, 5])
RATES = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.4}
NORMS = pytest.mark.parametrize("normalize_before", [False, True], ids=["post-norm", "pre-norm"])
RECOMPUTED = pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])


def lengths(*counts: int) -> Segments:
    return Segments.from_lengths(torch.tensor(counts))


def rows(segments: Segments, width: int) -> Tensor:
    return torch.randn(len(segments.index), width, dtype=torch.float64, requires_grad=True)
