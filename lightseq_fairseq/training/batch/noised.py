"""Batches of noised text, which the model restores, from one or more corpora."""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import DenoisingDataset

from lightseq_fairseq.memory.filling import Sentences
from lightseq_fairseq.memory.packing import Granularity, PackedBatch
from lightseq_fairseq.training.batch import nested
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.pairs import Pairs, pairs_batch
from lightseq_fairseq.training.batch.reading import joined, reader


class PackingNoised(PackingDataset):
    """Batches of pairs of noised text and text, each a ``PackedBatch``.

    A batch has the tokens of fairseq's tasks ``denoising`` and ``multilingual_denoising`` with the
    noise of `fairseq_compat.noise`. The decoder's first input is the last token of the text: </s>
    or a language. Rows that are the pad token, which may replace a word, are dropped as in
    ``PackingPairs``. A pad token of the text still counts in ``ntokens``, as in fairseq.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset, granularity)
        self._corpora = nested.corpora(dataset)
        self._read = [reader(corpus.dataset) for corpus in self._corpora]
        self._pad = self._corpora[0].vocab.pad()

    @staticmethod
    def packs(dataset: Any) -> bool:
        return all(type(corpus) is DenoisingDataset for corpus in nested.corpora(dataset))

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        changed = any(each.item_transform_func is not None for each in nested.corpora(dataset))
        return {"a function transforms the items": changed}

    def _at(self, indices: np.ndarray) -> PackedBatch:
        places = nested.places(self.dataset, indices)
        used = np.unique(places.corpus).tolist() or [0]
        texts = [self._read[i](places.item[places.corpus == i]) for i in used]
        text, _ = nested.in_order(texts, places.corpus)
        noised, ends = [], text.lengths.cumsum()
        for i, number, begin, end in zip(
            places.corpus, places.number, text.starts(), ends, strict=True
        ):
            corpus = self._corpora[i]
            noised.append(corpus.noise.of_item(text.tokens[begin:end], corpus.epoch, number))
        lengths = np.array([len(tokens) for tokens in noised], np.int64)
        return self._pack(Sentences(np.concatenate([*noised, text.tokens[:0]]), lengths), text)

    def _of(self, samples: Any) -> PackedBatch:
        return self._pack(*(joined([s[side] for s in samples]) for side in ("source", "target")))

    def _pack(self, source: Sentences, target: Sentences) -> PackedBatch:
        previous = np.roll(target.tokens.astype(np.int64), 1)
        previous[target.starts()] = target.tokens[target.lengths.cumsum() - 1]
        pairs = Pairs(source, target, previous)
        return pairs_batch(pairs, self._pad, len(target.tokens), self.granularity)
