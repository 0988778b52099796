"""Read items of fairseq's datasets, a batch at a time.

``reader`` reads the memory-mapped file directly. fairseq's ``__getitem__`` takes several
microseconds per sentence and wrapper, and makes a tensor each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fairseq import data
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq.data.shorten_dataset import TruncateDataset
from torch import Tensor

from lightseq_fairseq.memory.filling import Sentences, positions

# The items of a dataset at these indices. Never holds an array over a file: pickling that would
# copy the corpus into every worker.
Reader = Callable[[np.ndarray], Sentences]


def reader(dataset: Any) -> Reader:
    """A function that reads items of ``dataset``, a fairseq dataset of token tensors.

    It can be pickled. Other classes than those below, such as their subclasses, are read item by
    item.
    """
    kind = type(dataset)
    if kind is MMapIndexedDataset:
        return partial(_mapped, dataset)
    if kind is data.TokenBlockDataset and not dataset.include_targets and stored(dataset):
        return partial(read_blocks, dataset)
    if kind is data.TokenBlockDataset and not dataset.include_targets:
        return partial(_blocks, dataset, reader(dataset.dataset))
    if kind in (data.LRUCacheDataset, data.RightPadDataset):  # they differ in collater only
        return reader(dataset.dataset)
    if kind is data.PrependTokenDataset and dataset.token is not None:
        return partial(_prepended, dataset.token, reader(dataset.dataset))
    if kind is data.AppendTokenDataset and dataset.token is not None:
        return partial(_appended, dataset.token, reader(dataset.dataset))
    if kind is data.StripTokenDataset:
        return partial(_stripped, dataset.id_to_strip, reader(dataset.dataset))
    if kind is TruncateDataset:
        return partial(_truncated, dataset.truncation_length, reader(dataset.dataset))
    if kind is data.ConcatSentencesDataset:
        return partial(_concatenated, [reader(part) for part in dataset.datasets])
    return partial(_items, dataset)


def joined(sentences: Sequence[Tensor]) -> Sentences:
    """Sentences of these tensors."""
    if not len(sentences):
        return Sentences(np.empty(0, np.int64), np.empty(0, np.int64))
    lengths = np.array([len(sentence) for sentence in sentences])
    return Sentences(torch.cat(tuple(sentences)).numpy(), lengths)


def files(dataset: Any) -> list[Any] | None:
    """The memory-mapped files that ``dataset`` consists of, in order; None for other datasets."""
    parts = [dataset]
    if type(dataset) is data.ConcatDataset and all(ratio == 1 for ratio in dataset.sample_ratios):
        parts = dataset.datasets
    return parts if all(type(part) is MMapIndexedDataset for part in parts) else None


def stored(blocks: Any) -> bool:
    """Whether all blocks of a TokenBlockDataset are contiguous in memory-mapped files."""
    parts = files(blocks.dataset)
    return parts is not None and all(map(_is_contiguous, parts))


def _is_contiguous(file: Any) -> bool:
    """Whether a memory-mapped file has its sentences one after the other, as fairseq writes it."""
    index = file._index
    ends = index.sizes.cumsum(dtype=np.int64) * np.dtype(index.dtype).itemsize
    return bool(np.array_equal(index._pointers[1:], ends[:-1]) and not index._pointers[:1].any())


def stream_tokens(blocks: Any, places: np.ndarray) -> np.ndarray:
    """The tokens at ``places`` (int64 [T]) of the text that ``blocks`` cuts.

    blocks: a TokenBlockDataset that is ``stored``; its text is the content of its files.
    """
    parts = [_tokens(file) for file in files(blocks.dataset) or []]
    if len(parts) == 1:
        return parts[0][places]
    found, begin = np.empty(len(places), np.int64), 0
    for part in parts:
        within = (places >= begin) & (places < begin + len(part))
        found[within] = part[places[within] - begin]
        begin += len(part)
    return found


def ranges(blocks: Any, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where blocks of a TokenBlockDataset begin in its text, and their lengths; int64."""
    # Not from blocks.sizes: it can be uint16 although a sentence is longer than 65535.
    found = blocks.slice_indices[indices].astype(np.int64)
    return found[:, 0], found[:, 1] - found[:, 0]


def _tokens(file: Any) -> np.ndarray:
    return np.frombuffer(file._bin_buffer, dtype=file._index.dtype)


def _mapped(file: Any, indices: np.ndarray) -> Sentences:
    index, tokens = file._index, _tokens(file)
    lengths = index.sizes[indices].astype(np.int64)
    starts = index._pointers[indices] // tokens.itemsize
    return Sentences(tokens[np.repeat(starts, lengths) + positions(lengths)], lengths)


def read_blocks(blocks: Any, indices: np.ndarray) -> Sentences:
    """Blocks of a TokenBlockDataset that is ``stored``, without targets."""
    starts, lengths = ranges(blocks, indices)
    places = np.repeat(starts, lengths) + positions(lengths)
    return Sentences(stream_tokens(blocks, places), lengths)


def _blocks(blocks: Any, read: Reader, indices: np.ndarray) -> Sentences:
    """Blocks of a TokenBlockDataset of any sentences, which ``read`` reads. A sentence may have
    fewer tokens than fairseq counted when it made the blocks; then the block has fewer, too."""
    begins, skipped, ends = blocks.block_to_dataset_index[indices].astype(np.int64).T
    counts = ends - begins + 1
    sentences = read(np.repeat(begins, counts) + positions(counts))
    bounds = sentences.boundaries()
    whole = Sentences(sentences.tokens, np.diff(bounds[np.append(0, counts.cumsum())]))
    places, (_, lengths) = whole.positions(), ranges(blocks, indices)
    first, end = (np.repeat(x, whole.lengths) for x in (skipped, skipped + lengths))
    return whole.keep((places >= first) & (places < end))


def _prepended(token: int, read: Reader, indices: np.ndarray) -> Sentences:
    return read(indices).prepended(token)


def _appended(token: int, read: Reader, indices: np.ndarray) -> Sentences:
    return read(indices).appended(token)


def _stripped(token: int, read: Reader, indices: np.ndarray) -> Sentences:
    inner = read(indices)
    counts = np.concatenate(([0], (inner.tokens != token).cumsum()))  # of the tokens that stay
    ends = counts[inner.boundaries()]
    before, until = (np.repeat(x, inner.lengths) for x in (ends[:-1], ends[1:]))
    return inner.keep((counts[1:] > before) & (counts[:-1] < until))


def _truncated(length: int, read: Reader, indices: np.ndarray) -> Sentences:
    inner = read(indices)
    return inner.keep(inner.positions() < length)


def _concatenated(reads: Sequence[Reader], indices: np.ndarray) -> Sentences:
    parts = [read(indices) for read in reads]
    lengths = np.stack([part.lengths for part in parts], 1)
    starts = (lengths.cumsum() - lengths.ravel()).reshape(lengths.shape)
    tokens = np.empty(lengths.sum(), np.int64)
    for part, begin in zip(parts, starts.T, strict=True):
        tokens[np.repeat(begin, part.lengths) + part.positions()] = part.tokens
    return Sentences(tokens, lengths.sum(1))


def _items(dataset: Any, indices: np.ndarray) -> Sentences:
    return joined([dataset[index] for index in indices])
