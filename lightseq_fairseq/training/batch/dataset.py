"""The common interface of the packing datasets, and the function that fills a batch's block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.packing import Bucket, Granularity, Layout, PackedBatch, block_size, graph_len
from lightseq_fairseq.training.batch.reading import Sentences


class WrappedDataset(torch.utils.data.Dataset[Any]):
    """Base of datasets that wrap another one, ``dataset``, and forward to it what they lack."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks up attributes before ``dataset`` is set.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)


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

    @abstractmethod
    def __getitems__(self, indices: Any) -> Any:
        """The batch of these items; torch's fetcher calls this method if it exists."""

    @abstractmethod
    def collater(self, samples: Any) -> Any:
        """Pack a list of items; return the result of ``__getitems__`` unchanged."""


class Column(NamedTuple):
    """The values of a column, one per real row; and ``past``, the value of the rows after them."""

    values: np.ndarray
    past: int


class Filled(NamedTuple):
    """The content of one stream of a batch (see ``packing.Stream``).

    Attributes:
        lengths: rows of each sentence.
        columns: in the order of the layout.
        granularity: rounding of the number of rows.
        least: the smallest number of rows of the stream, real or not.
    """

    lengths: np.ndarray
    columns: Sequence[Column]
    granularity: Granularity
    least: int = 0


def packed(layout: Layout, streams: Sequence[Filled], ntokens: int, part: str = "") -> PackedBatch:
    """Write a batch into one block.

    The number of sentences is rounded up to 256, 1024, 4096, ... if the first stream rounds its
    rows.

    Args:
        streams: in the order of the layout.
        ntokens, part: see ``PackedBatch``.
    """
    sentences = room = len(streams[0].lengths)
    if streams[0].granularity.fine > 1:
        # Few sizes, since each needs its own graphs; an unused sentence costs only 4 bytes.
        room = 256
        while room < sentences:
            room *= 4
    counts = [int(filled.lengths.sum()) for filled in streams]
    rows = (
        filled.granularity.rounded(max(count, filled.least))
        for filled, count in zip(streams, counts, strict=True)
    )
    longest = tuple(int(filled.lengths.max(initial=0)) for filled in streams)
    bucket = Bucket(tuple(rows), room, graph_len(max(longest)))
    # Columns, positions and boundaries are filled to their ends. The alignment gaps between them
    # are never read; with zeros there, equal batches have equal blocks.
    block = torch.zeros(block_size(layout, bucket), dtype=torch.int64)
    batch = PackedBatch(block, layout, bucket, sentences, ntokens, longest, part)
    for into, filled, count in zip(batch.open().values(), streams, counts, strict=True):
        for column, given in zip(into.columns.values(), filled.columns, strict=True):
            _fill(column, given.values, given.past)
        sides = Sentences(np.empty(0), filled.lengths)
        _fill(into.segments.positions, sides.positions(), 0)
        _fill(into.segments.cu_seqlens, sides.boundaries(), count)
    return batch


def _fill(part: Tensor, values: np.ndarray, past: int) -> None:
    """Write ``values`` into a part of a block, and fill the rest of the part with ``past``."""
    part.numpy()[: len(values)] = values
    part.numpy()[len(values) :] = past
