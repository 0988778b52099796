"""The common interface of the packing datasets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from lightseq_fairseq.fairseq_compat.wrapped_dataset import WrappedDataset
from lightseq_fairseq.memory.packing import Granularity, PackedBatch


class PackingDataset(WrappedDataset, ABC):
    """A dataset with packed batches, for ``DataLoader`` and fairseq's batch iterator.

    Use this object's ``collater``. Everything else is forwarded to the wrapped dataset.

    A batch has exactly the sentences and tokens that fairseq's collater returns. Its ``ntokens``
    and ``nsentences`` are the numbers that fairseq counts, not those of rows.
    fairseq's iterator decides which items are in a batch, and in what order. If an update trains
    several parts of a model, ``PackedBatch.part`` is the part of each batch.

    Args:
        dataset: fairseq's dataset; ``training.batch.covers(dataset)`` must be None.
        granularity: rounding of the numbers of rows and sentences, see ``packed``.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset)
        self.granularity = granularity or Granularity()

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    @staticmethod
    @abstractmethod
    def packs(dataset: Any) -> bool:
        """Whether this class is for such a dataset of fairseq; see ``training.batch.covers``."""

    @staticmethod
    @abstractmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        """Unsupported features, in a few words -> whether ``dataset`` uses them."""

    def __getitems__(self, indices: Any) -> Any:
        """The batch of these items; torch's fetcher calls this method if it exists."""
        return self._at(np.asarray(indices, dtype=np.int64))

    def collater(self, samples: Any) -> Any:
        """Pack a list of items; return the result of ``__getitems__`` unchanged."""
        return samples if isinstance(samples, PackedBatch) else self._of(samples)

    @abstractmethod
    def _at(self, indices: np.ndarray) -> Any:
        """The batch of the items at ``indices``, int64 [items]."""

    @abstractmethod
    def _of(self, samples: Any) -> Any:
        """The batch of these items of ``dataset``."""
