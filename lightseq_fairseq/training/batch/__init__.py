"""Make packed batches of items of fairseq's datasets, in the workers of ``DataLoader``."""

from __future__ import annotations

from typing import Any

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import named
from lightseq_fairseq.memory.packing import Granularity
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.nested import unsorted


def packing(dataset: Any, granularity: Granularity | None = None) -> PackingDataset:
    """Wrap ``dataset`` so that its batches are packed; ``covers(dataset)`` must be None."""
    kind = _kind(dataset)
    assert kind is not None
    return kind(dataset, granularity)


def covers(dataset: Any) -> str | None:
    """Why ``packing`` cannot replace this dataset's collater, in a few words; None if it can.

    Only exact classes of fairseq are covered. A wrapper or subclass could change a batch in ways
    that this code does not know of.
    """
    kind = _kind(dataset)
    other = {f"the dataset is of type {type(unsorted(dataset)).__name__}": True}
    reasons = other if kind is None else kind.lacks(dataset)
    return next((reason for reason, applies in reasons.items() if applies), None)


def _kind(dataset: Any) -> type[PackingDataset] | None:
    """The class that packs the batches of fairseq's ``dataset``; None if there is none."""
    places = (place for family in families.FAMILIES for place in family.batches)
    return next((kind for kind in map(named, places) if kind.packs(dataset)), None)
