"""How fairseq makes batches: dropped sentences, numpy functions that are gone, large files."""

from __future__ import annotations

import functools
import inspect
import os
import types
from typing import Any

import numpy as np
from fairseq.data import data_utils, indexed_dataset, language_pair_dataset, token_block_dataset
from fairseq.modules import dynamic_crf_layer
from fairseq.tasks import translation

from lightseq_fairseq.fairseq_compat.overlay import Overlay


def repair() -> None:
    """Brings every sentence into a batch and fairseq's numpy calls up to numpy 2."""
    _repair_numpy_names()
    if _addresses_overflow():
        _repair_addresses()
    _repair_load_langpair_dataset()
    _repair_extra_valid_paths()
    _repair_indexed_datasets()
    if _drops_sentences():
        _repair_batch_by_size()


def _repair_numpy_names() -> None:
    # numpy 2.4 knows neither np.int, np.float and np.compat nor percentile(interpolation=...), and
    # numpy 2.2 warns of the latter: --num-batch-buckets fails in get_buckets, then in
    # num_tokens_vec.
    names: dict[str, Any] = {}
    for name, replacement in (("int", int), ("float", float)):
        if name not in np.__dict__:
            names[name] = replacement
    if "compat" not in np.__dict__:
        names["compat"] = types.SimpleNamespace(long=int)
    if "method" in inspect.signature(np.percentile).parameters:
        names["percentile"] = _percentile
    if names:
        for module in (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer):
            module.np = Overlay(np, **names)


def _percentile(a: Any, q: Any, *, interpolation: Any = "linear", **options: Any) -> Any:
    return np.percentile(a, q, method=interpolation, **options)


def _addresses_overflow() -> bool:
    writer = indexed_dataset.MMapIndexedDataset.Index.writer("", np.uint16)
    with np.errstate(over="ignore"):
        return bool(writer._get_pointers([np.int32(1 << 30)] * 2)[1] < 0)


def _repair_addresses() -> None:
    # `lightseq-preprocess --workers 2` joins files whose sizes are np.int32, and since numpy 2 the
    # addresses summed from them are as well: past 2 GiB they are negative, with no more than a
    # warning, and training reads nonsense.
    builder = indexed_dataset.MMapIndexedDatasetBuilder
    original = builder.finalize

    @functools.wraps(original)
    def finalize(self: Any, index_file: str) -> None:
        self._sizes = [int(size) for size in self._sizes]
        original(self, index_file)

    builder.finalize = finalize


def _repair_load_langpair_dataset() -> None:
    # A folder with "train" and "train1" is read as one corpus, its first part --upsample-primary
    # times. Where the flag is not given that is -1 times: "negative dimensions are not allowed".
    original = translation.load_langpair_dataset

    @functools.wraps(original)
    def load_langpair_dataset(*args: Any, upsample_primary: int, **options: Any) -> Any:
        primary = 1 if upsample_primary == -1 else upsample_primary
        return original(*args, upsample_primary=primary, **options)

    translation.load_langpair_dataset = load_langpair_dataset


def _repair_extra_valid_paths() -> None:
    # "--valid-subset valid,valid1": fairseq looks for "valid1.de-en.de" in that list and ends in
    # "Valid paths ['valid1.de-en.de', ...] will be ignored".
    original = data_utils._find_extra_valid_paths

    @functools.wraps(original)
    def _find_extra_valid_paths(dataset_path: str) -> set[str]:
        return {name.partition(".")[0] for name in original(dataset_path)}

    data_utils._find_extra_valid_paths = _find_extra_valid_paths


def _repair_indexed_datasets() -> None:
    # The trainer looks at the first batch before it starts the loader's workers and before anything
    # is cached. With "--dataset-impl lazy" the workers thus share an open file and its position,
    # and now and then one reads where another has just moved it: other words in the batch, without
    # a word. With "--dataset-impl cached": "KeyError: np.int64(13)".
    lazy, cached = indexed_dataset.IndexedDataset, indexed_dataset.IndexedCachedDataset
    open_file, from_file, from_cache = lazy.read_data, lazy.__getitem__, cached.__getitem__

    def read_data(self: Any, path: str) -> None:
        open_file(self, path)
        self.opened_by = os.getpid()

    def read(self: Any, i: Any) -> Any:
        if self.data_file and self.opened_by != os.getpid():
            self.read_data(self.path)
        return from_file(self, i)

    lazy.read_data, lazy.__getitem__ = read_data, read
    cached.__getitem__ = lambda self, i: (from_cache if i in self.cache_index else read)(self, i)


def _drops_sentences() -> bool:
    batches = data_utils.batch_by_size(
        np.arange(5),
        num_tokens_fn=None,
        num_tokens_vec=np.ones(5, dtype=np.int64),
        max_tokens=3,
        required_batch_size_multiple=2,
    )
    return sum(len(batch) for batch in batches) < 5


def _repair_batch_by_size() -> None:
    # The head and fairseq-fixed leave the last batch out unless --required-batch-size-multiple (8)
    # divides its size: 48 of 50 test sentences are translated. Batches are consecutive runs of the
    # indices, so what is missing is the tail.
    original = data_utils.batch_by_size

    @functools.wraps(original)
    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = original(indices, *args, **kwargs)
        if kwargs.get("fixed_shapes") is not None:
            return batches
        batched = sum(len(batch) for batch in batches)
        return [*batches, indices[batched:]] if batched < len(indices) else batches

    data_utils.batch_by_size = batch_by_size
