"""Repairs of the tasks ``denoising`` and ``multilingual_denoising``: their flags, and noise that is
a function of seed, epoch and item."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from fairseq.data import DenoisingDataset, ResamplingDataset
from fairseq.tasks.denoising import DenoisingTask
from torch import Tensor

from lightseq_fairseq.fairseq_compat.noise import Noise


def task_has_flags() -> bool:
    """Whether the task defines its flags itself; later versions have a dataclass."""
    return "add_args" in vars(DenoisingTask)


def add_args(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    # The archs define --max-source-positions and --max-target-positions, too: "conflicting option
    # string". All archs with these flags have the task's defaults.
    options = parser._optionals  # argparse adds flags to this group
    handler, options.conflict_handler = options.conflict_handler, "resolve"
    try:
        original(parser)
    finally:
        options.conflict_handler = handler


def __init__(original: Callable[..., None], self: Any, *settings: Any, **options: Any) -> None:
    original(self, *settings, **options)
    self.noise = Noise(self)


def __getitem__(original: Callable[..., Any], self: Any, index: int) -> dict[str, Any]:
    return item(self, index, index)


def item(dataset: Any, index: int, number: int) -> dict[str, Any]:
    """The text at ``index``, with the noise of the item ``number``; as ``DenoisingDataset`` does.

    A corpus that is sampled with replacement has a text several times in an epoch.
    """
    target: Tensor = dataset.dataset[index]
    source = torch.from_numpy(dataset.noise.of_item(target.numpy(), dataset.epoch, number))
    if dataset.item_transform_func is not None:
        source, target = dataset.item_transform_func(source, target)
    return {"id": index, "source": source, "target": target}


def resampled_item(original: Callable[..., Any], self: Any, index: int) -> Any:
    if type(self.dataset) is DenoisingDataset:
        return item(self.dataset, self._cur_indices.array[index], index)
    return original(self, index)


def collate(original: Callable[..., Any], samples: Any, *args: Any, **options: Any) -> Any:
    batch = original(samples, *args, **options)
    if batch:
        batch["nsentences"] = len(samples)  # in fairseq the length of the first one
    return batch


def load_dataset(
    original: Callable[..., None], self: Any, split: str, *args: Any, **options: Any
) -> None:
    # fairseq writes valid,valid_de,valid_en into the setting of which it then loads another subset.
    settings = getattr(self, "cfg", None) or self.args
    subsets = settings.valid_subset
    original(self, split, *args, **options)
    settings.valid_subset = subsets
    for number, part in enumerate(self.datasets[split].dataset.datasets):
        corpus = part.dataset if isinstance(part, ResamplingDataset) else part
        corpus.noise.corpus = number
