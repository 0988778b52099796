"""Repairs of fairseq's iterator over epochs: each epoch has its own masks and shuffling, also after
a run is resumed.

Unless sizes of items change, fairseq keeps one data loader over all epochs, with its worker
processes and its sampler. But the workers have copies of the dataset, which ``set_epoch`` of a
later epoch does not reach. And the sampler keeps the ``shuffle`` of the first epoch. So each epoch
repeats the masks of the first epoch of the process, and --curriculum never ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.data import LRUCacheDataset

from lightseq_fairseq.fairseq_compat.wrapped_dataset import WrappedDataset


class DatasetOfWorkers(WrappedDataset):
    """A dataset that reads each batch in the batch's own epoch; everything else is ``dataset``'s.

    A batch of its indices is (epoch, indices), as `ordered_batches` makes it. The epoch is None if
    nobody has set it.

    Args:
        dataset: fairseq's dataset.
        epoch: the epoch in which ``dataset`` is.
    """

    def __init__(self, dataset: Any, epoch: int | None) -> None:
        super().__init__(dataset)
        self.epoch = epoch

    def __getitems__(self, batch: tuple[int | None, Any]) -> Any:
        """The items of a batch; torch's fetcher calls this method."""
        epoch, indices = batch
        if epoch != self.epoch:
            self.dataset.set_epoch(epoch)
            self.epoch = epoch
        if hasattr(self.dataset, "__getitems__"):
            return self.dataset.__getitems__(indices)
        return [self.dataset[index] for index in indices]


def next_epoch_itr(
    original: Callable[..., Any],
    self: Any,
    shuffle: bool = True,
    fix_batches_to_gpus: bool = False,
    set_dataset_epoch: bool = True,
) -> Any:
    # The iterator's own epoch is another one in validation, whose data stay in epoch 1.
    if set_dataset_epoch and hasattr(self.dataset, "set_epoch"):
        self.epoch_of_dataset = self.next_epoch_idx
    if self._next_epoch_itr is not None and fix_batches_to_gpus:
        # A run that is resumed within an epoch: fairseq has restored the epoch's batches as if the
        # flag were not set.
        shuffles, place = shuffle and not self.disable_shuffling, self._next_epoch_itr.n
        self._next_epoch_itr = self._get_iterator_for_epoch(self.epoch, shuffles, True, place)
    return original(self, shuffle, fix_batches_to_gpus, set_dataset_epoch)


def ordered_batches(original: Callable[..., Any], self: Any, *args: Any) -> Any:
    batches = original(self, *args)
    reader = self.dataset if self.dataloader is None else self.dataloader.dataset
    if not isinstance(reader, DatasetOfWorkers):
        return batches
    epoch = _epoch_of_dataset(self)
    return [(epoch, indices) for indices in batches]


def _get_iterator_for_epoch(
    original: Callable[..., Any],
    self: Any,
    epoch: int,
    shuffle: bool,
    fix_batches_to_gpus: bool = False,
    offset: int = 0,
) -> Any:
    if self.dataloader is not None:
        sampler = self.dataloader.batch_sampler
        sampler.shuffle, sampler.fix_batches_to_gpus = shuffle, fix_batches_to_gpus
    dataset, skips = self.dataset, self.skip_remainder_batch
    if self.reuse_dataloader and self.num_workers > 0:
        # The data loader that fairseq keeps gets ``self.dataset``, and starts its workers.
        self.dataset = DatasetOfWorkers(dataset, _epoch_of_dataset(self))
    self.skip_remainder_batch = skips and offset == 0
    try:
        iterator = original(self, epoch, shuffle, fix_batches_to_gpus, offset)
    finally:
        self.dataset, self.skip_remainder_batch = dataset, skips
    if skips and offset > 0 and iterator is not None:
        # fairseq subtracts the offset, although the length includes it: the epoch would end early.
        iterator.take(len(iterator) - 1)
    return iterator


def _epoch_of_dataset(iterator: Any) -> int | None:
    """The epoch that the iterator has set in its dataset; None before the first time."""
    return getattr(iterator, "epoch_of_dataset", None)


def set_epoch(original: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    # The cache holds the last items by their index alone: the first batch of an epoch could get
    # masks of the epoch before.
    LRUCacheDataset.__getitem__.cache_clear()
    original(self, *args, **options)


def load_dataset(
    original: Callable[..., None], self: Any, split: str, epoch: int = 1, *args: Any, **options: Any
) -> None:
    # fairseq orders sentences of equal length by a permutation of the epoch in which it loads the
    # data. Unless each epoch loads other data, this is the first epoch, except in a resumed run.
    original(self, split, epoch if self.has_sharded_data(split) else 1, *args, **options)


def get_train_iterator(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    # The flag adds the epoch to the seed of new batches. But fairseq keeps the batches of the first
    # epoch of a process, so that a resumed run has others.
    if self.cfg.dataset.update_ordered_indices_seed:
        options["disable_iterator_cache"] = True
    return original(self, *args, **options)
