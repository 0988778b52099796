"""fairseq's nested datasets: one dataset for each entry of a batch; and several of these in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fairseq.data import ConcatDataset, NestedDictionaryDataset, ResamplingDataset, SortDataset

from lightseq_fairseq.memory.filling import Sentences, concatenated, reordered


def columns(dataset: Any) -> dict[str, Any] | None:
    """Entry of a batch -> its dataset; None if ``dataset`` is not nested."""
    inner = unsorted(dataset)
    return dict(inner.defn) if type(inner) is NestedDictionaryDataset else None


def unsorted(dataset: Any) -> Any:
    """The dataset within a SortDataset, which changes only the order; else ``dataset`` itself."""
    return dataset.dataset if type(dataset) is SortDataset else dataset


def corpora(dataset: Any) -> list[Any]:
    """The datasets that ``dataset`` consists of, such as one per language; fairseq may resample
    them in each epoch."""
    whole = unsorted(dataset)
    if type(whole) is not ConcatDataset or any(ratio != 1 for ratio in whole.sample_ratios):
        return [whole]
    return [part.dataset if type(part) is ResamplingDataset else part for part in whole.datasets]


class Places(NamedTuple):
    """Where items of a dataset are in its `corpora`; int64 [items] each.

    Attributes:
        corpus: the index of the item's corpus.
        item: its index in the corpus.
        number: its number among the items that fairseq takes from the corpus in this epoch.
    """

    corpus: np.ndarray
    item: np.ndarray
    number: np.ndarray


def places(dataset: Any, indices: np.ndarray) -> Places:
    """The places of items of ``dataset``."""
    whole = unsorted(dataset)
    if type(whole) is not ConcatDataset:
        return Places(np.zeros_like(indices), indices, indices)
    ends = np.array(whole.cumulative_sizes)
    which = ends.searchsorted(indices, side="right")
    numbers = indices - np.append(0, ends)[which]
    items = numbers.copy()
    for place, part in enumerate(whole.datasets):
        if type(part) is ResamplingDataset:
            chosen = which == place
            items[chosen] = part._cur_indices.array[numbers[chosen]]
    return Places(which, items, numbers)


def in_order(parts: Sequence[Sentences], which: np.ndarray) -> tuple[Sentences, np.ndarray]:
    """The sentences of several corpora in the order of the items.

    Args:
        parts: for each corpus of ``which``, in ascending order, the sentences of its items.
        which: int64 [items], the corpus of each item.

    Returns:
        The sentences; and each token's place in the parts, one after the other.
    """
    return reordered(concatenated(parts), which.argsort(kind="stable").argsort())


def inside(dataset: Any, *kinds: Any) -> Any:
    """The dataset within wrappers of these exact classes, the outermost first; None if others are.

    ``dataset`` may be None; then the result is None.
    """
    for kind in kinds:
        if type(dataset) is not kind:
            return None
        dataset = dataset.dataset
    return dataset
