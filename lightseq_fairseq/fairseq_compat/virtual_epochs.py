"""Repairs of ``--task translation_multi_simple_epoch``: a resumed run reads the pairs of an
uninterrupted one.

With --virtual-epoch-size, an epoch is a part of a pass over the sampled pairs, and they are sampled
when a pass begins. With several data folders, the epoch decides which one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq import utils


def _next_virtual_epoch(original: Callable[..., None], self: Any, epoch: int) -> None:
    # fairseq samples with the number of the first epoch of a pass, but in a process that begins
    # within a pass, with the number of this epoch: a resumed run reads other pairs.
    first = epoch - (epoch - 1) % self.num_virtual_epochs
    if epoch > first != self.__dict__.get("pass_begins"):
        original(self, first)
    self.pass_begins = first
    original(self, epoch)


def load_dataset(
    original: Callable[..., None], self: Any, split: str, epoch: int = 1, *args: Any, **options: Any
) -> None:
    # fairseq changes the folder when a pass has ended, and estimates the sizes of folders that it
    # has not read. Both depend on all epochs before, so a resumed run repeats their loading.
    folders, _ = self.data_manager.get_data_paths_and_lang_pairs(split)
    several = max(len(utils.split_paths(paths)) for paths in folders.values())
    begins = split == self.args.train_subset and split not in self.datasets
    if begins and several > 1:
        is_virtual = self.args.virtual_epoch_size is not None
        for past in range(1 if is_virtual else max(1, epoch - several), epoch):
            original(self, split, past, *args, **options)
            self.datasets[split].set_epoch(past)
    original(self, split, epoch, *args, **options)
