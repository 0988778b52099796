"""Batches of text with masked tokens, for masked language models, from one or more corpora."""

from __future__ import annotations

from typing import Any

import numpy as np
from fairseq.data import (
    LRUCacheDataset,
    MaskTokensDataset,
    PadDataset,
    PrependTokenDataset,
    RightPadDataset,
)

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.filling import Column, Filled, Sentences, packed, positions
from lightseq_fairseq.memory.packing import MASKED, Granularity, PackedBatch
from lightseq_fairseq.training.batch import nested
from lightseq_fairseq.training.batch.dataset import PackingDataset
from lightseq_fairseq.training.batch.reading import joined, reader

# The entries of batches of fairseq's tasks masked_lm and multilingual_masked_lm. RoBERTa reads
# neither lang_id nor target_tokens, which --include-target-tokens adds.
_ENTRIES = {
    "id", "net_input.src_tokens", "net_input.src_lengths", "net_input.target_tokens", "target",
    "nsentences", "ntokens", "lang_id",
}  # fmt: skip
# Settings of MaskTokensDataset that source and target must share, because both come from one draw.
_SHARED = (
    "dataset", "seed", "pad_idx", "mask_idx", "mask_prob", "mask_multiple_length", "mask_stdev",
    "mask_whole_words",
)  # fmt: skip


class PackingMasked(PackingDataset):
    """Batches of text with masked tokens, each a ``PackedBatch``.

    A batch has the tokens and labels of fairseq's tasks ``masked_lm`` and
    ``multilingual_masked_lm``: the same masks for the same seed, epoch and index. fairseq
    draws them twice per item, for the source and for the target; this class draws them once.

    A row that is the pad token after masking is dropped, as ``Segments.from_mask`` does. It still
    counts in ``ntokens``, as in fairseq. A masked pad token has no label, as in fairseq.
    """

    def __init__(self, dataset: Any, granularity: Granularity | None = None) -> None:
        super().__init__(dataset, granularity)
        self._corpora = [_Corpus(part) for part in nested.corpora(dataset)]
        self._noise = self._corpora[0].noise  # all corpora have these settings

    @staticmethod
    def packs(dataset: Any) -> bool:
        """See ``PackingDataset``. The batches of each corpus have masked tokens."""
        return all(
            _source_and_target(nested.columns(part) or {})[0] is not None
            for part in nested.corpora(dataset)
        )

    @staticmethod
    def lacks(dataset: Any) -> dict[str, bool]:
        found: dict[str, bool] = {}
        for part in nested.corpora(dataset):
            for reason, applies in _lacks(nested.columns(part) or {}).items():
                found[reason] = found.get(reason, False) or applies
        return found

    def _at(self, indices: np.ndarray) -> PackedBatch:
        places = nested.places(self.dataset, indices)
        used = np.unique(places.corpus)
        if len(used) <= 1:
            return self._pack(*self._corpora[places.corpus.max(initial=0)].read(places.item))
        masked, before, chosen = zip(
            *(self._corpora[i].read(places.item[places.corpus == i]) for i in used), strict=True
        )
        source, rows = nested.in_order(masked, places.corpus)
        return self._pack(source, np.concatenate(before)[rows], np.concatenate(chosen)[rows])

    def _of(self, samples: Any) -> PackedBatch:
        source, labels = (
            joined([s[entry] for s in samples]) for entry in ("net_input.src_tokens", "target")
        )
        return self._pack(source, labels.tokens, labels.tokens != self._noise.pad_idx)

    def _pack(self, source: Sentences, before: np.ndarray, chosen: np.ndarray) -> PackedBatch:
        """The batch of masked sentences.

        Args:
            before: [T], the tokens before masking; read only where ``chosen`` is true.
            chosen: bool [T], the tokens that are to be predicted.
        """
        pad, ntokens = self._noise.pad_idx, len(source.tokens)
        chosen &= before != pad
        labels, counts = before[chosen], source.count_of(chosen)
        kept = source.tokens != pad
        if not kept.all():
            source, chosen = source.keep(kept), chosen[kept]
        streams = (
            Filled(source.lengths, [Column(source.tokens, pad)], self.granularity),
            Filled(
                counts,
                [Column(np.flatnonzero(chosen), 0), Column(labels, pad)],
                self.granularity.of_part(self._noise.mask_prob),
                # If no token is chosen, the step computes one row, without a label. (fairseq then
                # computes all rows.)
                least=min(1, len(source.tokens)),
            ),
        )
        return packed(MASKED, streams, ntokens)


class _Corpus:
    """Text that one MaskTokensDataset of fairseq masks.

    Attributes:
        noise: that dataset; fairseq sets the epoch on this object.
    """

    def __init__(self, dataset: Any) -> None:
        self.noise, _ = _source_and_target(nested.columns(dataset) or {})
        self._read = reader(self.noise.dataset)
        self._words = None  # cumulative probabilities of random tokens
        if self.noise.random_token_prob > 0:
            self._words = self.noise.weights.cumsum()
            self._words /= self._words[-1]

    def read(self, indices: np.ndarray) -> tuple[Sentences, np.ndarray, np.ndarray]:
        """Masked items, their tokens before masking, and which tokens were chosen: bool [T]."""
        text = self._read(indices)
        masked, chosen = self._mask(text, indices)
        return masked, text.tokens, chosen

    def _mask(self, text: Sentences, indices: np.ndarray) -> tuple[Sentences, np.ndarray]:
        """The masked text, and which tokens fairseq's ``MaskTokensDataset`` chooses: bool [T].

        Each item has its own seed, so only drawing is a loop. Draws after those that fairseq needs
        change nothing.
        """
        noise = self.noise
        tokens = text.tokens.astype(np.int64)
        if (tokens == noise.mask_idx).any():
            raise UserError(
                "The training data contain the token <mask>, which the task adds to mark masked "
                "tokens: remove it from the text, and binarise it again with lightseq-preprocess."
            )
        # Units are tokens, or words: a word begins where the mask of beginnings is set.
        unit_lengths, units = None, text.lengths
        if noise.mask_whole_words is not None:
            begins = noise.mask_whole_words.numpy()[tokens] != 0
            unit_lengths = np.diff(np.append(np.flatnonzero(begins), len(tokens)))
            units = text.count_of(begins)

        chosen = np.zeros(units.sum(), bool)
        first, second = np.empty((2, len(chosen)))
        of_words = np.empty(len(tokens))
        changed_share = noise.random_token_prob + noise.leave_unmasked_prob
        draws_first = changed_share > 0
        draws_second = noise.random_token_prob > 0 and noise.leave_unmasked_prob > 0
        rng = np.random.RandomState(0)
        begin = word = 0
        for index, count, length in zip(
            indices.tolist(), units.tolist(), text.lengths.tolist(), strict=True
        ):
            rng.seed(int(hash((noise.seed, noise.epoch, index)) % 1e6))
            chosen[begin + self._choose(rng, count)] = True
            if draws_first:
                first[begin : begin + count] = rng.random_sample(count)
            if draws_second:
                second[begin : begin + count] = rng.random_sample(count)
            if self._words is not None:
                of_words[word : word + length] = rng.random_sample(length)
            begin, word = begin + count, word + length

        # Of the chosen units most become <mask>, some a random token, and some stay.
        changed = chosen & (first < changed_share) if draws_first else np.zeros_like(chosen)
        stays, random = changed, np.zeros_like(changed)
        if draws_second:
            stays = changed & (second < noise.leave_unmasked_prob / changed_share)
            random = changed & ~stays
        elif noise.random_token_prob > 0:
            stays, random = random, changed
        masked = chosen ^ stays
        if unit_lengths is not None:
            chosen, masked, random = (np.repeat(x, unit_lengths) for x in (chosen, masked, random))
        tokens[masked] = noise.mask_idx
        if self._words is not None:
            counts = text.count_of(random)
            drawn = of_words[np.repeat(text.starts(), counts) + positions(counts)]
            tokens[random] = self._words.searchsorted(drawn, side="right")
        return Sentences(tokens, text.lengths), chosen

    def _choose(self, rng: np.random.RandomState, units: int) -> np.ndarray:
        """Indices of the units to predict, in an item that has ``units`` of them."""
        noise = self.noise
        length, deviation = noise.mask_multiple_length, noise.mask_stdev
        count = int(noise.mask_prob * units / float(length) + rng.random_sample())
        found = rng.permutation(units)[:count]  # choice(units, count, replace=False)
        if length == 1 and deviation == 0:
            return found
        lengths = np.full(count, length)
        if deviation > 0:
            drawn = rng.normal(length, deviation, size=count)
            lengths = np.array([max(0, round(x)) for x in drawn.tolist()], np.int64)
        found = np.repeat(found, lengths) + positions(lengths)
        return found[found < units]


def _lacks(columns: dict[str, Any]) -> dict[str, bool]:
    """``PackingDataset.lacks`` for datasets by entry of a batch, see ``nested.columns``."""
    source, target = _source_and_target(columns)
    extra = sorted(set(columns) - _ENTRIES)
    is_one_draw = (
        target is not None
        and (source.return_masked_tokens, target.return_masked_tokens) == (False, True)
        and all(getattr(source, name) is getattr(target, name) for name in _SHARED)
    )
    return {
        f"batches also have {', '.join(extra)}": bool(extra),
        "the labels are not the masked tokens": not is_one_draw,
        # With whole-word masking, a token set before each block begins its first word. fairseq
        # fails without this token.
        "no token is set before the blocks": source.mask_whole_words is not None
        and nested.inside(source.dataset, LRUCacheDataset, PrependTokenDataset) is None,
    }


def _source_and_target(columns: dict[str, Any]) -> tuple[Any, Any]:
    """The MaskTokensDatasets of input and labels; None for an entry with another dataset."""

    def found(entry: str) -> Any:
        padded: Any = columns.get(entry)
        if type(padded) not in (PadDataset, RightPadDataset) or padded.left_pad:
            return None
        each = nested.inside(padded.dataset, LRUCacheDataset)
        return each if type(each) is MaskTokensDataset else None

    return found("net_input.src_tokens"), found("target")
