"""The noise of BART's pre-training, as a function of seed, epoch and item.

fairseq's ``DenoisingDataset`` draws most of its noise from torch's global generator. So the noise
of an item depends on the items before it and on the number of workers: it repeats neither in
another run nor in a resumed one. `Noise` has the distribution of fairseq's noise, but a generator
of its own for each item. It computes on arrays, and draws no bit of fairseq's.

Shapes: T = tokens of an item, first <s>, last </s> or a language; W = its words.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lightseq_fairseq.memory.filling import positions


class Noise:
    """The noise of the items of one DenoisingDataset of fairseq.

    Args:
        dataset: supplies the settings; its vocabulary is complete, with <mask>.

    Attributes:
        corpus: the number of the dataset among those of a task. The items of two corpora that have
            the same index must not have the same noise, because they may be translations.
    """

    def __init__(self, dataset: Any) -> None:
        self.corpus = 0
        self._seed = dataset.seed % 2**32
        self._words = len(dataset.vocab)
        self._mask = dataset.mask_idx
        self._full_stop = dataset.full_stop_index
        begins = dataset.mask_whole_word
        self._begins = None if begins is None else begins.numpy() != 0
        self._permuted = dataset.permute_sentence_ratio
        self._masked = dataset.mask_ratio
        self._random = dataset.random_ratio
        self._inserted = dataset.insert_ratio
        self._rotated = dataset.rotate_ratio
        self._kept = dataset.replace_length  # of a span: 0 or 1 tokens, or all (-1)
        self._lengths = None  # cumulative probabilities of the lengths of spans
        if dataset.mask_span_distribution is not None:
            ends = dataset.mask_span_distribution.probs.double().numpy().cumsum()
            self._lengths = ends / ends[-1]
        self._rng = np.random.RandomState(0)  # its streams are the same in all versions of numpy

    def of_item(self, tokens: np.ndarray, epoch: int, item: int) -> np.ndarray:
        """The tokens [T] of an item with noise, int64 [any].

        Args:
            item: its number; the same text under another number has other noise.
        """
        rng = self._rng
        rng.seed((self._seed, epoch, self.corpus, item))
        tokens = tokens.astype(np.int64)
        if self._permuted > 0:
            tokens = self._permute_sentences(tokens)
        if self._masked > 0:
            tokens = self._mask_words(tokens)
        if self._inserted > 0:
            tokens = self._insert(tokens, self._inserted)
        if self._rotated > 0 and rng.random_sample() < self._rotated:
            tokens = self._rotate(tokens)
        return tokens

    def _permute_sentences(self, tokens: np.ndarray) -> np.ndarray:
        """Exchanges sentences; each ends with a full stop after another token, the last one with
        the item's last word."""
        stops = tokens == self._full_stop
        stops[-2] = True
        ends = np.flatnonzero(stops[1:] & ~stops[:-1]) + 2
        starts = np.append(1, ends[:-1])[: len(ends)]
        chosen = self._rng.permutation(len(ends))[: math.ceil(len(ends) * self._permuted)]
        order = np.arange(len(ends))
        order[chosen] = chosen[self._rng.permutation(len(chosen))]
        lengths = (ends - starts)[order]
        places = np.repeat(starts[order], lengths) + positions(lengths)
        permuted = tokens.copy()
        permuted[1 : 1 + len(places)] = tokens[places]
        return permuted

    def _mask_words(self, tokens: np.ndarray) -> np.ndarray:
        """Masks spans of words, whose lengths sum to a share of the words. A span of no words
        inserts a token."""
        begins = np.ones(len(tokens), bool) if self._begins is None else self._begins[tokens]
        starts = np.flatnonzero(begins[1:-1]) + 1  # [W]
        budget = math.ceil(np.float32(len(starts)) * np.float32(self._masked))  # as in fairseq
        if budget == 0:
            return tokens
        lengths = self._spans(budget)
        inserted = int(np.count_nonzero(lengths == 0))
        lengths = lengths[lengths > 0]
        words = self._rng.permutation(len(starts))[: len(lengths)]
        is_random = self._rng.random_sample(len(words)) < self._random
        # A span ends before the next word or, after the last one, before the item's last token.
        bounds = np.append(starts, len(tokens) - 1)
        firsts, ends = starts[words], bounds[np.minimum(words + lengths, len(starts))]
        if self._kept == -1:
            tokens = self._overwrite(tokens, firsts, ends, is_random)
        else:
            tokens = self._replace(tokens, firsts, ends, is_random)
        return self._insert(tokens, inserted / len(tokens)) if inserted else tokens

    def _spans(self, budget: int) -> np.ndarray:
        """Lengths of spans, in words; their sum is ``budget``."""
        if self._lengths is None:
            return np.ones(budget, np.int64)
        lengths = np.empty(0, np.int64)
        while lengths.sum() < budget:
            drawn = self._lengths.searchsorted(self._rng.random_sample(budget), side="right")
            lengths = np.append(lengths, drawn)
        ends = lengths.cumsum()
        last = int(ends.searchsorted(budget))
        lengths = lengths[: last + 1]
        lengths[last] -= ends[last] - budget
        return lengths

    def _overwrite(
        self, tokens: np.ndarray, firsts: np.ndarray, ends: np.ndarray, is_random: np.ndarray
    ) -> np.ndarray:
        """Replaces each token of the spans; of two spans, the one that begins earlier counts."""
        order = np.argsort(-firsts)  # later writes win
        lengths = (ends - firsts)[order]
        places = np.repeat(firsts[order], lengths) + positions(lengths)
        random = np.zeros(len(tokens), bool)
        random[places] = np.repeat(is_random[order], lengths)
        tokens[places] = self._mask
        tokens[random] = self._drawn_words(int(np.count_nonzero(random)))
        return tokens

    def _replace(
        self, tokens: np.ndarray, firsts: np.ndarray, ends: np.ndarray, is_random: np.ndarray
    ) -> np.ndarray:
        """Deletes the spans, except the first token of each if one token replaces a span. It is
        deleted, too, if it belongs to a span that begins earlier."""
        if self._kept == 1:
            tokens[firsts] = self._mask
            tokens[firsts[is_random]] = self._drawn_words(int(np.count_nonzero(is_random)))
            firsts = firsts + 1
        depth = np.bincount(firsts, minlength=len(tokens) + 1)
        depth -= np.bincount(ends, minlength=len(tokens) + 1)
        return tokens[depth[:-1].cumsum() == 0]

    def _insert(self, tokens: np.ndarray, share: float) -> np.ndarray:
        """Inserts a share of the tokens: <mask>, or random words; not before the first token and
        not after the last one."""
        count = math.ceil(len(tokens) * share)
        total = len(tokens) + count
        places = self._rng.permutation(total - 2)[:count] + 1
        random = math.ceil(count * self._random)
        found = np.empty(total, np.int64)
        is_old = np.ones(total, bool)
        is_old[places] = False
        found[is_old] = tokens
        found[places[random:]] = self._mask
        found[places[:random]] = self._drawn_words(random)
        return found

    def _rotate(self, tokens: np.ndarray) -> np.ndarray:
        """Moves the tokens before a random place behind those after it, within <s> and </s>."""
        begin = 1 + int(self._rng.random_sample() * max(1, len(tokens) - 1))
        return np.concatenate((tokens[:1], tokens[begin:-1], tokens[1:begin], tokens[-1:]))

    def _drawn_words(self, count: int) -> np.ndarray:
        """Random tokens, all but <s>: [count]."""
        return 1 + (self._rng.random_sample(count) * (self._words - 1)).astype(np.int64)
