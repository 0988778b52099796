"""Batches of running text, for language models."""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import MonolingualDataset, TokenBlockDataset

from lightseq_fairseq.memory.filling import Column, Filled, Sentences, packed
from lightseq_fairseq.memory.packing import TEXT, Granularity, PackedBatch
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.reading import (
    joined,
    ranges,
    read_blocks,
    stored,
    stream_tokens,
)


class PackingText(PackingDataset):
    """Batches of blocks of running text, each a ``PackedBatch``.

    A batch has the blocks, decoder input and labels of fairseq's ``collate`` in
    ``monolingual_dataset.py``. A row whose decoder input is the pad token is dropped, as
    ``Segments.from_mask`` does. It still counts in ``ntokens``, as in fairseq.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset, granularity)
        blocks = dataset.dataset
        self._is_stored = type(blocks) is TokenBlockDataset and stored(blocks)

    @staticmethod
    def packs(dataset: Any) -> bool:
        return type(dataset) is MonolingualDataset

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        return {
            "the targets are not the next tokens": dataset.targets != ["future"],
            # fairseq also counts the blocks that it adds to fill a batch.
            "batches are filled up with blocks (pad_to_bsz)": dataset.pad_to_bsz is not None,
            # Their decoder input is longer than their labels.
            "the text has empty sentences": bool((dataset.sizes == 0).any()),
        }

    def _at(self, indices: np.ndarray) -> PackedBatch:
        if not self._is_stored:
            return self._of([self.dataset[index] for index in indices])
        return self._pack(*self._read(indices))

    def _of(self, samples: Any) -> PackedBatch:
        previous, labels = (joined([s[side] for s in samples]) for side in ("source", "target"))
        return self._pack(previous.tokens, labels)

    def _read(self, indices: np.ndarray) -> tuple[np.ndarray, Sentences]:
        """Decoder input [T] and labels of these blocks, read from the memory-mapped files."""
        dataset, blocks = self.dataset, self.dataset.dataset
        labels = read_blocks(blocks, indices)
        # A block continues the text before it, unless it begins where a sentence does.
        continues = blocks.block_to_dataset_index[indices, 1] > 0
        previous = labels.tokens
        if len(dataset.tgt_vocab) != len(dataset.vocab):
            known = labels.tokens < len(dataset.tgt_vocab)
            labels = labels._replace(tokens=np.where(known, previous, dataset.tgt_vocab.unk()))
            # fairseq does so in place. A block that continues the text before it shares its memory
            # with its input, so there the input changes, too.
            previous = np.where(np.repeat(continues, labels.lengths), labels.tokens, previous)
        before = stream_tokens(blocks, np.maximum(ranges(blocks, indices)[0] - 1, 0))
        previous = np.roll(previous, 1)
        previous[labels.starts()] = np.where(continues, before, blocks.eos)
        if dataset.add_bos_token:
            previous = np.insert(previous, labels.starts(), dataset.vocab.bos())
            labels = labels.prepended(dataset.tgt_vocab.bos())
        return previous, labels

    def _pack(self, previous: np.ndarray, labels: Sentences) -> PackedBatch:
        pad, ntokens = self.dataset.vocab.pad(), len(previous)
        kept = previous != pad
        if not kept.all():
            previous, labels = previous[kept], labels.keep(kept)
        columns = [Column(previous, pad), Column(labels.tokens, pad)]
        return packed(TEXT, [Filled(labels.lengths, columns, self.granularity)], ntokens)
