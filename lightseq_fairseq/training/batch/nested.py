"""fairseq's nested datasets: one dataset for each entry of a batch; and several of these in one."""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import ConcatDataset, NestedDictionaryDataset, ResamplingDataset, SortDataset


def columns(dataset: Any) -> dict[str, Any] | None:
    """Entry of a batch -> its dataset; None if ``dataset`` is not nested."""
    inner = unsorted(dataset)
    return dict(inner.defn) if type(inner) is NestedDictionaryDataset else None


def unsorted(dataset: Any) -> Any:
    """The dataset within a SortDataset, which changes only the order; else ``dataset`` itself."""
    return dataset.dataset if type(dataset) is SortDataset else dataset


def corpora(dataset: Any) -> list[Any] | None:
    """The nested datasets that ``dataset`` consists of, such as one per language; None if a part
    is not nested. fairseq may resample the parts in each epoch."""
    whole = unsorted(dataset)
    parts = [whole]
    if type(whole) is ConcatDataset and all(ratio == 1 for ratio in whole.sample_ratios):
        parts = [
            part.dataset if type(part) is ResamplingDataset else part for part in whole.datasets
        ]
    return None if any(columns(part) is None for part in parts) else parts


def places(dataset: Any, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For items of ``dataset``: the index of each item's corpus in ``corpora(dataset)``, and the
    item's index in this corpus; int64 [items] each."""
    whole = unsorted(dataset)
    if type(whole) is not ConcatDataset:
        return np.zeros_like(indices), indices
    ends = np.array(whole.cumulative_sizes)
    which = ends.searchsorted(indices, side="right")
    within = indices - np.append(0, ends)[which]
    for place, part in enumerate(whole.datasets):
        if type(part) is ResamplingDataset:
            chosen = which == place
            within[chosen] = part._cur_indices.array[within[chosen]]
    return which, within


def inside(dataset: Any, *kinds: Any) -> Any:
    """The dataset within wrappers of these exact classes, the outermost first; None if others are.

    ``dataset`` may be None; then the result is None.
    """
    for kind in kinds:
        if type(dataset) is not kind:
            return None
        dataset = dataset.dataset
    return dataset
