"""fairseq's nested datasets: one dataset for each entry of a batch."""

from __future__ import annotations

from typing import Any


def columns(dataset: Any) -> dict[str, Any] | None:
    """Entry of a batch -> its dataset; None if ``dataset`` is not nested."""
    from fairseq.data import NestedDictionaryDataset

    inner = unsorted(dataset)
    return dict(inner.defn) if type(inner) is NestedDictionaryDataset else None


def unsorted(dataset: Any) -> Any:
    """The dataset within a SortDataset, which changes only the order; others as they are."""
    from fairseq.data import SortDataset

    return dataset.dataset if type(dataset) is SortDataset else dataset


def inside(dataset: Any, *kinds: Any) -> Any:
    """The dataset within wrappers of these exact classes, the outermost first; None if others are.

    None is no dataset, and has nothing inside.
    """
    for kind in kinds:
        if type(dataset) is not kind:
            return None
        dataset = dataset.dataset
    return dataset
