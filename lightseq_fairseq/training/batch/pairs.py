"""Batches of sentence pairs, of one part of a model or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fairseq.data import LanguagePairDataset, RoundRobinZipDatasets

from lightseq_fairseq.memory.filling import Column, Filled, Sentences, packed
from lightseq_fairseq.memory.packing import SENTENCE_PAIRS, Granularity, PackedBatch
from lightseq_fairseq.training.batch import covers
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.reading import joined, reader


class PackingPairs(PackingDataset):
    """Batches of sentence pairs, each a ``PackedBatch``.

    A batch has the sentences, tokens and decoder input of fairseq's ``collate`` in
    ``language_pair_dataset.py``. It keeps the order of the given indices: packed attention does not
    need fairseq's sort by source length. If a real token equals the pad token, its row is dropped
    from the source; on the target side, the row whose decoder input is the pad token is dropped.
    ``Segments.from_mask`` does the same.

    Args:
        dataset, granularity: see ``PackingDataset``.
        part: the part of the model that the batches train, see ``PackedBatch``.
    """

    def __init__(
        self, dataset: Any, granularity: Granularity | None = None, part: str = ""
    ) -> None:
        super().__init__(dataset, granularity)
        self.part = part
        adds_tokens = (
            dataset.append_eos_to_target or dataset.append_bos or dataset.remove_eos_from_source
        )
        sides = [reader(side) for side in (dataset.src, dataset.tgt)]
        self._sides = None if adds_tokens else sides

    @staticmethod
    def packs(dataset: Any) -> bool:
        return type(dataset) is LanguagePairDataset

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        language_ids = (dataset.src_lang_id, dataset.tgt_lang_id)
        return {
            "the data have no target sentences": dataset.tgt is None,
            "the data have alignments": dataset.align_dataset is not None,
            "the data have constraints": dataset.constraints is not None,
            "the data have language ids": language_ids != (None, None),
            "the data have no decoder input (input_feeding)": not dataset.input_feeding,
            "sentences are padded to length buckets": dataset.buckets is not None,
        }

    def _at(self, indices: np.ndarray) -> PackedBatch:
        if self._sides is None:
            return self._of([self.dataset[index] for index in indices])
        return self._pack(*(read(indices) for read in self._sides))

    def _of(self, samples: Any) -> PackedBatch:
        return self._pack(*(joined([s[side] for s in samples]) for side in ("source", "target")))

    def _pack(self, source: Sentences, target: Sentences) -> PackedBatch:
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
        streams = (
            Filled(source.lengths, [Column(source.tokens, pad)], self.granularity),
            Filled(
                target.lengths,
                [Column(previous, pad), Column(target.tokens, pad)],
                self.granularity,
            ),
        )
        return packed(SENTENCE_PAIRS, streams, ntokens, self.part)


class PackingParts(PackingDataset):
    """Batches for several parts of a model: each batch is a list of one ``PackedBatch`` per part.

    Each language pair of fairseq's RoundRobinZipDatasets is a part.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset, granularity)
        self.parts = {
            part: PackingPairs(pairs, granularity, part) for part, pairs in dataset.datasets.items()
        }

    @staticmethod
    def packs(dataset: Any) -> bool:
        return type(dataset) is RoundRobinZipDatasets

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        reasons = {f"the dataset is of type {type(dataset).__name__}": dataset.eval_key is not None}
        found = map(covers, dataset.datasets.values())
        return reasons | {reason: True for reason in found if reason is not None}

    def _at(self, indices: np.ndarray) -> list[PackedBatch]:
        place = self.dataset._map_index  # after its last item, a shorter part begins again
        return [
            pairs.__getitems__([place(part, index) for index in indices])
            for part, pairs in self.parts.items()
        ]

    def _of(self, samples: Sequence[Any]) -> list[PackedBatch]:
        if all(isinstance(sample, PackedBatch) for sample in samples):
            return list(samples)  # `_at` has made them
        return [
            pairs.collater([sample[part] for sample in samples])
            for part, pairs in self.parts.items()
        ]
