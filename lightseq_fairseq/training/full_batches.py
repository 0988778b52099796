"""``--pack-tokens``: fill batches with as many real tokens as --max-tokens allows.

fairseq counts pads as well: it ends a batch before (number of sentences) * (longest sentence)
exceeds --max-tokens, and shrinks it further so that the number of sentences is a multiple of
--required-batch-size-multiple. Our layers skip the pads, so a batch can have more real tokens.

fairseq sorts pairs by source length, then by target length. Then one side would often fill a batch
long before the other side. Here pairs are sorted by their longer side and shuffled among equals, so
both sides fill at the same rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fairseq.data import LanguagePairDataset, SampledMultiDataset

from lightseq_fairseq.base.errors import UserError


def refill(iterator: Any, max_tokens: int, max_sentences: int | None) -> None:
    """Replace the batches of fairseq's epoch iterator by fuller ones of the same sentences.

    Args:
        iterator: an unused ``EpochBatchIterator`` over sentence pairs. Its seed shuffles pairs of
            equal length.
        max_tokens, max_sentences: see ``cut``.

    Raises:
        UserError: the dataset does not hold sentence pairs.
    """
    dataset = iterator.dataset
    if not isinstance(dataset, (LanguagePairDataset, SampledMultiDataset)):
        raise UserError(
            f"--pack-tokens counts the tokens of sentence pairs, but this --task trains on a "
            f"{type(dataset).__name__}: remove --pack-tokens, or use --task translation."
        )
    pairs = np.concatenate(iterator.frozen_batches)  # fairseq has removed pairs that are too long
    sides = dataset.sizes.T  # of pairs that are sampled: in the epoch of these batches
    pairs = np.random.default_rng(iterator.seed).permutation(pairs)
    order = pairs[np.maximum(*(side[pairs] for side in sides)).argsort(kind="stable")]
    iterator._frozen_batches = tuple(cut(order, sides, max_tokens, max_sentences))


def cut(
    order: np.ndarray, sizes: Sequence[np.ndarray], max_tokens: int, max_sentences: int | None
) -> list[np.ndarray]:
    """Cut ``order`` into consecutive batches, each as long as the limits allow.

    Args:
        order: int64 [N], indices of sentence pairs in their dataset.
        sizes: lengths of the dataset's sentences in tokens, one array per side.
        max_tokens: the most tokens of a batch on each side; no sentence may be longer.
        max_sentences: the most pairs of a batch; None for no limit.
    """
    # Tokens before each pair: the end of a batch is then one binary search per side.
    before = [np.concatenate(([0], side[order].cumsum(dtype=np.int64))) for side in sizes]
    batches, start = [], 0
    while start < len(order):
        ends = [int(x.searchsorted(x[start] + max_tokens, side="right")) - 1 for x in before]
        end = min(ends if max_sentences is None else [*ends, start + max_sentences])
        batches.append(order[start:end])
        start = end
    return batches
