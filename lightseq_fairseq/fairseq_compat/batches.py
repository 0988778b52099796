"""Repairs of fairseq's data code: dropped sentences, removed numpy functions, whole words."""

from __future__ import annotations

import argparse
import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.data import data_utils, indexed_dataset
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import DictConfig

from lightseq_fairseq.fairseq_compat.overlay import Overlay


def _percentile(a: Any, q: Any, *, interpolation: Any = "linear", **options: Any) -> Any:
    return np.percentile(a, q, method=interpolation, **options)


def _missing_in_numpy() -> dict[str, Any]:
    # numpy 2.4 lacks np.int, np.float, np.compat and percentile(interpolation=...); numpy 2.2 warns
    # about the latter. Without them --num-batch-buckets fails in get_buckets, then in
    # num_tokens_vec.
    names: dict[str, Any] = {"int": int, "float": float, "compat": types.SimpleNamespace(long=int)}
    names = {name: value for name, value in names.items() if name not in np.__dict__}
    if "method" in inspect.signature(np.percentile).parameters:
        names["percentile"] = _percentile
    return names


NUMPY = Overlay(np, **_missing_in_numpy())


def numpy_lacks_names() -> bool:
    return bool(_missing_in_numpy())


def addresses_overflow() -> bool:
    writer = indexed_dataset.MMapIndexedDataset.Index.writer("", np.uint16)
    with np.errstate(over="ignore"):
        return bool(writer._get_pointers([np.int32(1 << 30)] * 2)[1] < 0)


def finalize(original: Callable[..., None], self: Any, index_file: str) -> None:
    # `lightseq-preprocess --workers 2` merges files whose sizes are np.int32. Since numpy 2 the
    # addresses summed from them are np.int32 too: beyond 2 GiB they overflow to negative numbers,
    # with only a warning, and training reads wrong data.
    self._sizes = [int(size) for size in self._sizes]
    original(self, index_file)


def forgets_positions() -> bool:
    return bool(utils.resolve_max_positions({"de-en": (9, 2)}, 5)["de-en"] != (5, 2))


def resolve_max_positions(original: Callable[..., Any], *args: Any) -> Any:
    # fairseq takes the smaller one of two pairs of limits (source, target), compared as tuples: of
    # (1024, 8) and --max-tokens 200, which is (200, 200), the second. A target of 150 tokens then
    # reaches a model with 8 positions. So resolve source and target of each language pair.
    pairs = dict.fromkeys(pair for limit in args if isinstance(limit, dict) for pair in limit)
    if not pairs:
        return original(*args)

    def limits_of(pair: str) -> list[Any]:
        return [limit.get(pair) if isinstance(limit, dict) else limit for limit in args]

    return {pair: original(*limits_of(pair)) for pair in pairs}


def load_langpair_dataset(
    original: Callable[..., Any], *args: Any, upsample_primary: int, **options: Any
) -> Any:
    # fairseq reads "train" and "train1" as one corpus and repeats the first part --upsample-primary
    # times. Without the flag the value is -1: "negative dimensions are not allowed".
    primary = 1 if upsample_primary == -1 else upsample_primary
    return original(*args, upsample_primary=primary, **options)


def _find_extra_valid_paths(original: Callable[[str], set[str]], dataset_path: str) -> set[str]:
    # With "--valid-subset valid,valid1" fairseq compares file names such as "valid1.de-en.de" with
    # the list of subsets and stops: "Valid paths ['valid1.de-en.de', ...] will be ignored".
    return {name.partition(".")[0] for name in original(dataset_path)}


def task_lacks_args() -> bool:
    reads = "args" in MaskedLMTask.load_dataset.__code__.co_names
    return reads and not hasattr(MaskedLMTask, "args")


def load_masked_text(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    # With --mask-whole-words fairseq reads the settings of --bpe from ``self.args``, which the task
    # does not have. They are in the run's configuration, of which the task's is a part.
    run: Any = self.cfg._get_parent() if isinstance(self.cfg, DictConfig) else None
    if self.cfg.mask_whole_words and run is not None:
        self.args = run.bpe if run.bpe is not None else argparse.Namespace()  # no --bpe
    original(self, *args, **options)


# The trainer reads the first batch before it starts the data loader's workers and before anything
# is cached. With "--dataset-impl lazy" the workers then share one open file and its position.
# Sometimes one worker reads where another has just moved the position: the batch silently holds
# wrong words. With "--dataset-impl cached" reading fails: "KeyError: np.int64(13)".


def read_data(original: Callable[..., None], self: Any, path: str) -> None:
    original(self, path)
    self.opened_by = os.getpid()


def read(original: Callable[..., Any], self: Any, i: Any) -> Any:
    if self.data_file and self.opened_by != os.getpid():
        self.read_data(self.path)
    return original(self, i)


def read_cached(original: Callable[..., Any], self: Any, i: Any) -> Any:
    is_cached = i in self.cache_index
    return original(self, i) if is_cached else indexed_dataset.IndexedDataset.__getitem__(self, i)


def drops_sentences() -> bool:
    batches = data_utils.batch_by_size(
        np.arange(5),
        num_tokens_fn=None,
        num_tokens_vec=np.ones(5, dtype=np.int64),
        max_tokens=3,
        required_batch_size_multiple=2,
    )
    return sum(len(batch) for batch in batches) < 5


def batch_by_size(original: Callable[..., Any], indices: Any, *args: Any, **kwargs: Any) -> Any:
    # The head and fairseq-fixed drop the last sentences unless --required-batch-size-multiple (8)
    # divides their number: only 48 of 50 test sentences are translated. Batches are consecutive
    # ranges of the indices, so the dropped sentences are the tail: append them as one more batch.
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []
    batches = original(indices, *args, **kwargs)
    if kwargs.get("fixed_shapes") is not None:
        return batches
    batched = sum(len(batch) for batch in batches)
    return [*batches, indices[batched:]] if batched < len(indices) else batches


def get_train_iterator(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    return _kept(self, None, original(self, *args, **options))


def get_valid_iterator(
    original: Callable[..., Any], self: Any, subset: str, *args: Any, **options: Any
) -> Any:
    return _kept(self, subset, original(self, subset, *args, **options))


def _kept(trainer: Any, subset: str | None, iterator: Any) -> Any:
    """Keeps a subset's iterator (None: of training) until there is a new one; then ends the old
    one's workers."""
    kept: dict[str | None, Any] = trainer.__dict__.setdefault("kept_iterators", {})
    if kept.get(subset) is not iterator:
        end_workers(kept.get(subset))
        kept[subset] = iterator
    return iterator


def end_workers(iterator: Any) -> None:
    """Ends the processes of an iterator's data loader; None is allowed.

    With several data folders, each epoch has a new iterator. If sentences have labels, each
    validation has one, too; with pairs sampled from several languages, both have. fairseq leaves
    the old one to the garbage collector, which frees the queues of the processes before the data
    loader uses them to end the processes. So torch waits 5 s for each process.
    """
    loader = getattr(iterator, "dataloader", None)
    running = getattr(loader, "_iterator", None)  # kept by persistent_workers
    if iterator is not None and running is None:  # fairseq's iterator has not kept its loader
        running = getattr(iterator._cur_epoch_itr, "_itr", None)
    if running is not None and hasattr(running, "_shutdown_workers"):
        running._shutdown_workers()
