"""Make packed batches of items of fairseq's datasets, in the workers of ``DataLoader``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.packing import (
    SENTENCE_PAIRS,
    TEXT,
    Bucket,
    Granularity,
    Layout,
    PackedBatch,
    block_size,
)


def packing(dataset: Any, granularity: Granularity | None = None) -> PackingDataset:
    """Wrap ``dataset`` so that its batches are packed; ``covers(dataset)`` must be None."""
    return _kinds()[type(dataset)](dataset, granularity)


def covers(dataset: Any) -> str | None:
    """Why ``packing`` cannot replace this dataset's collater, in a few words; None if it can.

    Only the exact classes of ``_kinds`` are covered. A wrapper or subclass could change a batch in
    ways that this code does not know of.
    """
    kind = _kinds().get(type(dataset))
    other = {f"the dataset is of type {type(dataset).__name__}": True}
    reasons = other if kind is None else kind.lacks(dataset)
    return next((reason for reason, applies in reasons.items() if applies), None)


def _kinds() -> dict[type, Any]:
    """fairseq's dataset class -> the class that packs its batches."""
    from fairseq.data import LanguagePairDataset, MonolingualDataset, RoundRobinZipDatasets

    return {
        LanguagePairDataset: PackingPairs,
        RoundRobinZipDatasets: PackingParts,
        MonolingualDataset: PackingText,
    }


class PackingDataset(torch.utils.data.Dataset[Any]):
    """A dataset with packed batches, for ``DataLoader`` and fairseq's batch iterator.

    Use this object's ``collater``. Everything else is forwarded to the wrapped dataset.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks up attributes before ``dataset`` is set.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        """Unsupported features, in a few words -> whether ``dataset`` uses them."""
        raise NotImplementedError

    def __getitems__(self, indices: Any) -> Any:
        """The batch of these items; torch's fetcher calls this method if it exists."""
        raise NotImplementedError

    def collater(self, samples: Any) -> Any:
        """Pack a list of items; return the result of ``__getitems__`` unchanged."""
        raise NotImplementedError


class PackingPairs(PackingDataset):
    """Batches of sentence pairs, each a ``PackedBatch``.

    A batch has the sentences, tokens and decoder input of fairseq's ``collate`` in
    ``language_pair_dataset.py``. It keeps the order of the given indices: packed attention does not
    need fairseq's sort by source length. If a real token equals the pad token, its row is dropped
    from the source; on the target side, the row whose decoder input is the pad token is dropped.
    ``Segments.from_mask`` does the same.

    Args:
        dataset: fairseq's LanguagePairDataset; ``covers(dataset)`` must be None.
        granularity: rounding of the numbers of rows and sentences, see ``_packed``.
        part: the part of the model that the batches train, see ``PackedBatch``.
    """

    def __init__(
        self, dataset: Any, granularity: Granularity | None = None, part: str = ""
    ) -> None:
        from fairseq.data.indexed_dataset import MMapIndexedDataset

        super().__init__(dataset)
        self.granularity = granularity or Granularity()
        self.part = part
        adds_tokens = (
            dataset.append_eos_to_target or dataset.append_bos or dataset.remove_eos_from_source
        )
        self._mapped = not adds_tokens and all(
            type(side) is MMapIndexedDataset for side in (dataset.src, dataset.tgt)
        )

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        """See ``PackingDataset``."""
        return {
            "the data have no target sentences": dataset.tgt is None,
            "the data have alignments": dataset.align_dataset is not None,
            "the data have constraints": dataset.constraints is not None,
            "the data have language ids": not (
                dataset.src_lang_id is None and dataset.tgt_lang_id is None
            ),
            "the data have no decoder input (input_feeding)": not dataset.input_feeding,
            "sentences are padded to length buckets": dataset.buckets is not None,
        }

    def __getitems__(self, indices: Any) -> PackedBatch:
        """The batch of these sentence pairs."""
        if not self._mapped:
            return self.collater([self.dataset[index] for index in indices])
        indices = np.asarray(indices, dtype=np.int64)
        return self._pack(_read(self.dataset.src, indices), _read(self.dataset.tgt, indices))

    def collater(self, samples: Any) -> PackedBatch:
        """See ``PackingDataset``."""
        if isinstance(samples, PackedBatch):
            return samples
        return self._pack(*(_join([s[side] for s in samples]) for side in ("source", "target")))

    def _pack(self, source: _Sentences, target: _Sentences) -> PackedBatch:
        pad = self.dataset.src_dict.pad()
        if (source.tokens == pad).any():
            source = source.keep(source.tokens != pad)
        # Decoder input: eos, then the target without its last token.
        previous = np.roll(target.tokens, 1)
        previous[target.positions() == 0] = self.dataset.eos
        ntokens = int(np.count_nonzero(target.tokens != pad))
        if ntokens < len(target.tokens):
            kept = previous != pad
            target, previous = target.keep(kept), previous[kept]
        streams = [(source, [source.tokens]), (target, [previous, target.tokens])]
        return _packed(SENTENCE_PAIRS, streams, pad, ntokens, self.granularity, self.part)


class PackingParts(PackingDataset):
    """Batches for several parts of a model: each batch is a list of one ``PackedBatch`` per part.

    Args:
        dataset: fairseq's RoundRobinZipDatasets of datasets that ``PackingPairs`` accepts; each
            language pair is a part.
        granularity: see ``PackingPairs``.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset)
        self.parts = {
            part: PackingPairs(pairs, granularity, part) for part, pairs in dataset.datasets.items()
        }

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        """See ``PackingDataset``."""
        reasons = {f"the dataset is of type {type(dataset).__name__}": dataset.eval_key is not None}
        found = map(covers, dataset.datasets.values())
        return reasons | {reason: True for reason in found if reason is not None}

    def __getitems__(self, indices: Any) -> list[PackedBatch]:
        """One batch per part, of the items that fairseq's dataset returns for ``indices``."""
        place = self.dataset._map_index  # a shorter part starts again at its end
        return [
            pairs.__getitems__([place(part, index) for index in indices])
            for part, pairs in self.parts.items()
        ]

    def collater(self, samples: Sequence[Any]) -> list[PackedBatch]:
        """See ``PackingDataset``."""
        if all(isinstance(sample, PackedBatch) for sample in samples):
            return list(samples)
        return [
            pairs.collater([sample[part] for sample in samples])
            for part, pairs in self.parts.items()
        ]


class PackingText(PackingDataset):
    """Batches of blocks of running text, each a ``PackedBatch``.

    A batch has the blocks, decoder input and labels of fairseq's ``collate`` in
    ``monolingual_dataset.py``. A row whose decoder input is the pad token is dropped, as
    ``Segments.from_mask`` does. It still counts in ``ntokens``, as in fairseq.

    Args:
        dataset: fairseq's MonolingualDataset; ``covers(dataset)`` must be None.
        granularity: rounding of the numbers of rows and sentences, see ``_packed``.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset)
        self.granularity = granularity or Granularity()

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        """See ``PackingDataset``."""
        return {
            "the targets are not the next tokens": dataset.targets != ["future"],
            # fairseq also counts the blocks that it adds to fill a batch.
            "batches are filled up with blocks (pad_to_bsz)": dataset.pad_to_bsz is not None,
        }

    def __getitems__(self, indices: Any) -> PackedBatch:
        """The batch of these blocks."""
        return self.collater([self.dataset[index] for index in indices])

    def collater(self, samples: Any) -> PackedBatch:
        """See ``PackingDataset``."""
        if isinstance(samples, PackedBatch):
            return samples
        previous, labels = (_join([s[side] for s in samples]) for side in ("source", "target"))
        pad, ntokens = self.dataset.vocab.pad(), len(previous.tokens)
        kept = previous.tokens != pad
        previous, labels = previous.keep(kept), labels.keep(kept)
        streams = [(previous, [previous.tokens, labels.tokens])]
        return _packed(TEXT, streams, pad, ntokens, self.granularity)


def _packed(
    layout: Layout, streams: Sequence[tuple[_Sentences, Sequence[np.ndarray]]], pad: int,
    ntokens: int, granularity: Granularity, part: str = "",
) -> PackedBatch:  # fmt: skip
    """Write a batch into one block.

    Args:
        streams: for each stream of the layout, its sentences and its columns in layout order.
        pad: value of the columns in the rows after the real ones.
        ntokens, part: see ``PackedBatch``.
        granularity: rounding of the numbers of rows. If ``granularity.fine`` is above 1, the number
            of sentences is rounded up to 256, 1024, 4096, ...
    """
    sides = [side for side, _ in streams]
    sentences = room = len(sides[0].lengths)
    if granularity.fine > 1:
        # Few sizes, since each needs its own graphs; an unused sentence costs only 4 bytes.
        room = 256
        while room < sentences:
            room *= 4
    bucket = Bucket(tuple(granularity.rounded(len(side.tokens)) for side in sides), room)
    longest = tuple(int(side.lengths.max(initial=0)) for side in sides)
    block = torch.zeros(block_size(layout, bucket), dtype=torch.int64)
    batch = PackedBatch(block, layout, bucket, sentences, ntokens, longest, part)
    for rows, (side, columns) in zip(batch.open().values(), streams, strict=True):
        for column, values in zip(rows.columns.values(), columns, strict=True):
            _fill(column, values, pad)
        _fill(rows.segments.positions, side.positions(), 0)
        _fill(rows.segments.cu_seqlens, side.boundaries(), len(side.tokens))
    return batch


def _fill(part: Tensor, values: np.ndarray, past: int) -> None:
    """Write ``values`` into a part of a block, and fill the rest of the part with ``past``."""
    part.numpy()[: len(values)] = values
    part.numpy()[len(values) :] = past


class _Sentences(NamedTuple):
    """One side of a batch: the concatenated tokens, and the length of each sentence."""

    tokens: np.ndarray
    lengths: np.ndarray

    def boundaries(self) -> np.ndarray:
        return np.concatenate(([0], self.lengths.cumsum()))

    def positions(self) -> np.ndarray:
        """[tokens], the position of each token in its sentence, from 0."""
        return _positions(self.lengths)

    def keep(self, kept: np.ndarray) -> _Sentences:
        """Copy with only the tokens where ``kept`` (bool [tokens]) is true."""
        sentence = np.repeat(np.arange(len(self.lengths)), self.lengths)[kept]
        return _Sentences(self.tokens[kept], np.bincount(sentence, minlength=len(self.lengths)))


def _positions(lengths: np.ndarray) -> np.ndarray:
    starts = lengths.cumsum() - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _read(side: Any, indices: np.ndarray) -> _Sentences:
    """Read sentences of fairseq's MMapIndexedDataset directly from the memory-mapped file."""
    # The dataset's __getitem__ takes several microseconds per sentence. Do not store the array over
    # the file: pickling it would copy the corpus into every worker.
    index = side._index
    tokens = np.frombuffer(side._bin_buffer, dtype=index.dtype)
    lengths = index.sizes[indices].astype(np.int64)
    starts = index._pointers[indices] // tokens.itemsize
    return _Sentences(tokens[np.repeat(starts, lengths) + _positions(lengths)], lengths)


def _join(sentences: list[Tensor]) -> _Sentences:
    if not sentences:
        return _Sentences(np.empty(0, np.int64), np.empty(0, np.int64))
    lengths = np.array([len(sentence) for sentence in sentences])
    return _Sentences(torch.cat(sentences).numpy(), lengths)
