"""Batches of sentence pairs, of one part of a model or of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from fairseq.data import (
    LanguagePairDataset,
    RoundRobinZipDatasets,
    SampledMultiDataset,
    SampledMultiEpochDataset,
    TransformEosLangPairDataset,
)
from fairseq.data.multilingual.sampled_multi_dataset import CollateFormat

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.filling import (
    Column,
    Filled,
    Sentences,
    concatenated,
    packed,
    reordered,
)
from lightseq_fairseq.memory.packing import SENTENCE_PAIRS, Granularity, PackedBatch
from lightseq_fairseq.training.batch import covers
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.reading import joined, reader


class Pairs(NamedTuple):
    """Sentence pairs. ``previous`` is the decoder's input, [tokens of target]."""

    source: Sentences
    target: Sentences
    previous: np.ndarray


class PackingPairs(PackingDataset):
    """Batches of sentence pairs, each a ``PackedBatch``.

    A batch has the sentences, tokens and decoder input of fairseq's ``collate`` in
    ``language_pair_dataset.py``. It keeps the order of the given indices: packed attention does not
    need fairseq's sort by source length. If a real token equals the pad token, its row is dropped
    from the source; on the target side, the row whose decoder input is the pad token is dropped.
    ``Segments.from_mask`` does the same.

    fairseq's TransformEosLangPairDataset replaces the end of the source and the first token of the
    decoder input.

    Args:
        dataset, granularity: see ``PackingDataset``.
        part: the part of the model that the batches train, see ``PackedBatch``.
    """

    def __init__(
        self, dataset: Any, granularity: Granularity | None = None, part: str = ""
    ) -> None:
        super().__init__(dataset, granularity)
        self.part = part
        self._given = given = _given(dataset)
        self._first, self._end, self._new_end = given.eos, None, None
        if given is not dataset:
            self._end, self._new_end = dataset.src_eos, dataset.new_src_eos
            self._first = given.eos if dataset.new_tgt_bos is None else dataset.new_tgt_bos
        adds_tokens = given.append_eos_to_target or given.append_bos or given.remove_eos_from_source
        sides = [reader(side) for side in (given.src, given.tgt)]
        self._sides = None if adds_tokens else sides

    @staticmethod
    def packs(dataset: Any) -> bool:
        return type(_given(dataset)) is LanguagePairDataset

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        given = _given(dataset)
        language_ids = (given.src_lang_id, given.tgt_lang_id)
        return {
            "the data have no target sentences": given.tgt is None,
            "the data have alignments": given.align_dataset is not None,
            "the data have constraints": given.constraints is not None,
            "the data have language ids": language_ids != (None, None),
            "the data have no decoder input (input_feeding)": not given.input_feeding,
            "sentences are padded to length buckets": given.buckets is not None,
        }

    def _at(self, indices: np.ndarray) -> PackedBatch:
        return self.pack(self.read(indices))

    def _of(self, samples: Any) -> PackedBatch:
        return self.pack(self.of(samples))

    def read(self, indices: np.ndarray) -> Pairs:
        """The pairs at ``indices``, int64 [items]."""
        if self._sides is None:
            return self.of([self.dataset[index] for index in indices])
        return self._pairs(*(read(indices) for read in self._sides))

    def of(self, samples: Any) -> Pairs:
        """The pairs of these items of ``dataset``."""
        return self._pairs(*(joined([s[side] for s in samples]) for side in ("source", "target")))

    def _pairs(self, source: Sentences, target: Sentences) -> Pairs:
        if self._new_end is not None:
            tokens, ends = source.tokens.astype(np.int64), source.lengths.cumsum() - 1
            if (tokens[ends] != self._end).any():
                raise UserError(
                    "A source sentence does not end with </s>, which --lang-tok-replacing-bos-eos "
                    "replaces: binarise the data with lightseq-preprocess."
                )
            tokens[ends] = self._new_end
            source = source._replace(tokens=tokens)
        # Decoder input: the first token, then the target without its last token.
        previous = np.roll(target.tokens.astype(np.int64), 1)
        previous[target.positions() == 0] = self._first
        return Pairs(source, target, previous)

    def pack(self, pairs: Pairs) -> PackedBatch:
        """The batch of these pairs."""
        pad = self._given.src_dict.pad()
        ntokens = int(np.count_nonzero(pairs.target.tokens != pad))
        return pairs_batch(pairs, pad, ntokens, self.granularity, self.part)


def pairs_batch(
    pairs: Pairs, pad: int, ntokens: int, granularity: Granularity, part: str = ""
) -> PackedBatch:
    """The batch of these pairs.

    Args:
        pad: the token whose rows are dropped, see ``PackingPairs``.
        ntokens, part: see ``PackedBatch``.
    """
    source, target, previous = pairs
    if (source.tokens == pad).any():
        source = source.keep(source.tokens != pad)
    if (target.tokens == pad).any():
        kept = previous != pad
        target, previous = target.keep(kept), previous[kept]
    columns = [Column(previous, pad), Column(target.tokens, pad)]
    streams = (
        Filled(source.lengths, [Column(source.tokens, pad)], granularity),
        Filled(target.lengths, columns, granularity),
    )
    return packed(SENTENCE_PAIRS, streams, ntokens, part)


def _given(dataset: Any) -> Any:
    """The dataset whose tokens a TransformEosLangPairDataset replaces; else ``dataset`` itself."""
    return dataset.dataset if type(dataset) is TransformEosLangPairDataset else dataset


class PackingSampled(PackingDataset):
    """Batches of the pairs that fairseq samples from several language pairs, each a
    ``PackedBatch`` with pairs of several languages.

    For --task translation_multi_simple_epoch. fairseq samples again when the epoch changes, in each
    process.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset, granularity)
        self._parts = [PackingPairs(part, granularity) for part in dataset.datasets]

    @staticmethod
    def packs(dataset: Any) -> bool:
        return type(dataset) in (SampledMultiDataset, SampledMultiEpochDataset)

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        is_single = dataset.eval_key is None and dataset.collate_format is CollateFormat.single
        return {f"the dataset is of type {type(dataset).__name__}": not is_single} | _lacks_of(
            dataset.datasets
        )

    def _at(self, indices: np.ndarray) -> PackedBatch:
        which, places = self._places(indices)
        used = np.unique(which)
        parts = [self._parts[part].read(places[which == part]) for part in used]
        return self._joined(parts, [np.flatnonzero(which == part) for part in used])

    def _of(self, samples: Any) -> PackedBatch:
        which = np.array([part for part, _ in samples], np.int64)
        order = [np.flatnonzero(which == part) for part in np.unique(which)]
        parts = [self._parts[which[at[0]]].of([samples[i][1] for i in at]) for at in order]
        return self._joined(parts, order)

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The language pair of each item, and the item's index there; int64 [items] each."""
        dataset = self.dataset
        if type(dataset) is SampledMultiEpochDataset:
            indices = dataset._random_global_indices[dataset._current_epoch_start_index + indices]
        which = dataset.cumulated_sizes.searchsorted(indices, side="right")
        return which, dataset._cur_indices[indices]

    def _joined(self, parts: list[Pairs], order: list[np.ndarray]) -> PackedBatch:
        """The batch of the parts' pairs; ``order``: their places in the batch, for each part."""
        if len(parts) <= 1:
            return self._parts[0].pack(parts[0] if parts else self._parts[0].of([]))
        places = np.concatenate(order).argsort()
        source, _ = reordered(concatenated([part.source for part in parts]), places)
        target, rows = reordered(concatenated([part.target for part in parts]), places)
        previous = np.concatenate([part.previous for part in parts])[rows]
        return self._parts[0].pack(Pairs(source, target, previous))


def _lacks_of(datasets: Iterable[Any]) -> dict[str, bool]:
    """The reasons of all parts, see ``training.batch.covers``."""
    return {reason: True for reason in map(covers, datasets) if reason is not None}


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
        return reasons | _lacks_of(dataset.datasets.values())

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
