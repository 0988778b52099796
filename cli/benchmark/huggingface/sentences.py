"""Sentences of random tokens, and the collator that makes batches of them.

The lengths and tokens follow from a seed, so all systems read the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightseq_fairseq.cli.benchmark.huggingface.cases import Case, padded
from lightseq_fairseq.cli.benchmark.huggingface.models import LABELS, MODELS

SPECIALS = 5  # first numbers of a vocabulary, which are no words
MASKED = 0.15
IGNORED = -100  # label of a token without one, as in transformers
MOST = 392_702  # sentences, as many pairs as MNLI has; longer runs read them again


class Sentences(Dataset[dict[str, Any]]):
    """``count`` sentences of a case with their labels, as numpy arrays in memory."""

    def __init__(self, case: Case, count: int, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.case = case
        shortest = case.length or case.work.shortest
        lengths = random.integers(shortest, case.longest + 1, count)
        self.starts = np.concatenate([[0], lengths.cumsum()])
        self.mask = MODELS[case.model].vocabulary - 1
        self.tokens = random.integers(SPECIALS, self.mask, self.starts[-1], np.int32)
        self.classes = random.integers(0, 2, count)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.tokens[self.starts[index] : self.starts[index + 1]].astype(np.int64)
        labels: Any = self.classes[index]
        if self.case.kind == "tokens":
            labels = ids % LABELS
        elif self.case.kind == "mlm":
            is_masked = np.random.default_rng(index).random(len(ids)) < MASKED
            labels = np.where(is_masked, ids, IGNORED)
            ids[is_masked] = self.mask
        return {"input_ids": ids, "labels": labels}


class Collator(NamedTuple):
    """Pads the sentences of a batch to the longest one, rounded up to a multiple.

    Blocks of one length get no attention mask, with which sdpa could not use its fastest kernels.
    """

    pad: int
    multiple: int
    has_pads: bool

    def __call__(self, batch: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        length = padded(max(len(sentence["input_ids"]) for sentence in batch), self.multiple)
        ids = np.full((len(batch), length), self.pad)
        mask = np.zeros_like(ids)
        by_token = np.ndim(batch[0]["labels"]) > 0
        labels = np.full((len(batch), length), IGNORED) if by_token else np.zeros(len(batch), int)
        for row, sentence in enumerate(batch):
            end = len(sentence["input_ids"])
            ids[row, :end], mask[row, :end] = sentence["input_ids"], 1
            labels[(row, slice(0, end)) if by_token else row] = sentence["labels"]
        made = {"input_ids": ids, "labels": labels}
        if self.has_pads:
            made["attention_mask"] = mask
        return {name: torch.from_numpy(array) for name, array in made.items()}


def collator(case: Case, multiple: int) -> Collator:
    return Collator(MODELS[case.model].pad, multiple, has_pads=not case.length)


def tokens_of(batch: dict[str, Tensor]) -> Tensor | int:
    """Tokens of a batch without pads; a tensor if that is on the device."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else mask.sum()


def resized(batch: dict[str, Tensor], length: int, pad: int) -> dict[str, Tensor]:
    """``batch`` with sentences cut or padded to ``length`` tokens."""
    filling = {"input_ids": pad, "labels": IGNORED, "attention_mask": 0}
    more = length - batch["input_ids"].shape[1]
    return {
        name: torch.nn.functional.pad(x, (0, more), value=filling[name]) if x.dim() > 1 else x
        for name, x in batch.items()
    }
