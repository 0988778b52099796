"""Mistakes that tests of parity make on purpose."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from lightseq_fairseq import ops
from lightseq_fairseq.step.training_step import Count
from lightseq_fairseq.training.captured import CapturedTraining

Patch = pytest.MonkeyPatch
Arguments = dict[str, Any]


def change_op(patch: Patch, name: str, change: Callable[[Arguments], Any]) -> None:
    """Makes ``ops.<name>`` use arguments that ``change`` has modified in place."""
    op = getattr(ops, name)
    signature = inspect.signature(op)

    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        change(bound.arguments)
        return op(*bound.args, **bound.kwargs)

    patch.setattr(ops, name, changed)


def change_sample_size(patch: Patch, change: Callable[[Any, list[float]], float]) -> None:
    """Makes ``change(step, counts)`` return the number of samples of a step."""
    counts_of = CapturedTraining._counts

    def changed(self: Any, batches: Any) -> list[float]:
        counts = counts_of(self, batches)
        counts[Count.SAMPLE_SIZE] = change(self, counts)
        return counts

    patch.setattr(CapturedTraining, "_counts", changed)
