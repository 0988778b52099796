"""Batches of sentences with labels: classes or numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fairseq.data import OffsetTokensDataset, RawLabelDataset, RightPadDataset, StripTokenDataset

from lightseq_fairseq.memory.filling import Column, Filled, Sentences, packed
from lightseq_fairseq.memory.packing import CLASSES, Granularity, PackedBatch
from lightseq_fairseq.training.batch import nested
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.masked import PackingMasked
from lightseq_fairseq.training.batch.reading import joined, reader

_SOURCE = "net_input.src_tokens"
# The entries of a batch of fairseq's task sentence_prediction. --add-prev-output-tokens adds
# prev_output_tokens, which RoBERTa does not read.
_ENTRIES = {
    "id", _SOURCE, "net_input.src_lengths", "net_input.prev_output_tokens", "target", "nsentences",
    "ntokens",
}  # fmt: skip
_NO_CLASS = -100  # fairseq's loss ignores this label, too


class PackingClasses(PackingDataset):
    """Batches of sentences with labels, each a ``PackedBatch``.

    A batch has the sentences and labels of fairseq's task ``sentence_prediction``, in the order of
    the given indices; for their form see ``packing.CLASSES``. A row that is the pad token is
    dropped, as ``Segments.from_mask`` does. It still counts in ``ntokens``, as in fairseq.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset, granularity)
        columns = nested.columns(dataset) or {}
        padded, self._target = columns[_SOURCE], columns["target"]
        self._pad = padded.pad_idx
        self._read = reader(padded)
        self._labels = None if _is_regression(self._target) else reader(_words(self._target))

    @staticmethod
    def packs(dataset: Any) -> bool:
        """See ``PackingDataset``. Of nested datasets, ``PackingMasked`` takes those with masks."""
        return nested.columns(dataset) is not None and not PackingMasked.packs(dataset)

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        columns = nested.columns(dataset) or {}
        extra = sorted(set(columns) - _ENTRIES)
        target = columns.get("target")
        return {
            "items have several inputs": "net_input1.src_tokens" in columns,  # sentence_ranking
            f"batches also have {', '.join(extra)}": bool(extra),
            "the data have no labels": target is None,
            "sentences are not padded at their ends": type(columns.get(_SOURCE))
            is not RightPadDataset,
            f"the labels are of type {type(target).__name__}": not _is_regression(target)
            and _words(target) is None,
        }

    def _at(self, indices: np.ndarray) -> PackedBatch:
        if self._labels is None:
            numbers = torch.tensor([self._target[index] for index in indices.tolist()])
            return self._pack(self._read(indices), _of_numbers(numbers))
        words = self._labels(indices)
        words = words.keep(words.tokens != self._target.dataset.id_to_strip)
        classes = words.tokens.astype(np.int64) + self._target.offset
        return self._pack(self._read(indices), Sentences(classes, words.lengths))

    def _of(self, samples: Any) -> PackedBatch:
        targets = [s["target"] for s in samples]
        labels = _of_numbers(torch.tensor(targets)) if self._labels is None else joined(targets)
        return self._pack(joined([s[_SOURCE] for s in samples]), labels)

    def _pack(self, source: Sentences, labels: Sentences) -> PackedBatch:
        ntokens = len(source.tokens)
        kept = source.tokens != self._pad
        if not kept.all():
            source = source.keep(kept)
        past = 0 if self._labels is None else _NO_CLASS
        streams = (
            Filled(source.lengths, [Column(source.tokens, self._pad)], self.granularity),
            Filled(labels.lengths, [Column(labels.tokens, past)], self.granularity.of_part(0)),
        )
        return packed(CLASSES, streams, ntokens)


def _is_regression(target: Any) -> bool:
    """Whether the labels are numbers, a list for each sentence."""
    return type(target) is RawLabelDataset and all(isinstance(x, list) for x in target.labels[:1])


def _words(target: Any) -> Any:
    """The labels before fairseq strips eos and adds an offset; None for other wrappers."""
    return nested.inside(target, OffsetTokensDataset, StripTokenDataset)


def _of_numbers(numbers: torch.Tensor) -> Sentences:
    """``numbers`` [B, N], rounded to float32 as in fairseq's collater, as the bits of float64."""
    values = numbers.float().double().view(torch.int64).flatten().numpy()
    count = len(numbers)
    return Sentences(values, np.full(count, len(values) // max(count, 1)))
