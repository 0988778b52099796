"""``--pack-tokens``: batches of as many real tokens as --max-tokens allows.

fairseq counts pads as well: a batch ends where its sentences times the longest of them would
exceed --max-tokens, and again for their number to be a multiple of
--required-batch-size-multiple. A model that never sees a pad has room for more.

fairseq's order goes by source, then target length, so that sources would fill a batch long before
its targets do, or the other way round. Here it goes by the longer side of a pair: with the others
mixed, both sides fill alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fairseq.data import LanguagePairDataset

from lightseq_fairseq.errors import UserError


def refill(iterator: Any, max_tokens: int, max_sentences: int | None) -> None:
    """Gives fairseq's iterator of an epoch fuller batches of its sentences.

    Args:
        iterator: an ``EpochBatchIterator`` that nothing has been drawn from, over sentence pairs;
            its seed decides who shares a batch among pairs as long as each other.
        max_tokens, max_sentences: see ``cut``.

    Raises:
        UserError: its data are no sentence pairs.
    """
    dataset = iterator.dataset
    if not isinstance(dataset, LanguagePairDataset):
        raise UserError(
            f"--pack-tokens counts the tokens of sentence pairs, and this --task trains on a "
            f"{type(dataset).__name__}: drop it, or take --task translation."
        )
    sides = (dataset.src_sizes, dataset.tgt_sizes)
    pairs = np.concatenate(iterator.frozen_batches)  # none of them is too long
    pairs = np.random.default_rng(iterator.seed).permutation(pairs)
    order = pairs[np.maximum(*(side[pairs] for side in sides)).argsort(kind="stable")]
    iterator._frozen_batches = tuple(cut(order, sides, max_tokens, max_sentences))


def cut(
    order: np.ndarray, sizes: Sequence[np.ndarray], max_tokens: int, max_sentences: int | None
) -> list[np.ndarray]:
    """Consecutive runs of ``order``, each as long as may be.

    Args:
        order: int64 [N], places of sentence pairs in their dataset.
        sizes: tokens of the dataset's sentences, an array for each side.
        max_tokens: what a batch may have of them on either side, and no sentence exceeds.
        max_sentences: pairs that it may have; None for any number.
    """
    # Tokens before each pair. A batch then is one search a side, of the numbers alone.
    before = [np.concatenate(([0], side[order].cumsum(dtype=np.int64))) for side in sizes]
    batches, start = [], 0
    while start < len(order):
        ends = [int(x.searchsorted(x[start] + max_tokens, side="right")) - 1 for x in before]
        end = min(ends if max_sentences is None else [*ends, start + max_sentences])
        batches.append(order[start:end])
        start = end
    return batches
