"""Sentences of random tokens, random images, and collators that make batches of them.

The lengths and tokens follow from a seed, so all systems read the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lightseq_fairseq.cli.benchmark.huggingface.cases import BLOCK, SYSTEMS, Case, padded
from lightseq_fairseq.cli.benchmark.huggingface.models import configuration
from lightseq_fairseq.cli.benchmark.train import corpus

SPECIALS = 5  # first numbers of a vocabulary, which are no words
MASKED = 0.15
IGNORED = -100  # label of a token without one, as in transformers
MOST = 392_702  # samples, as many pairs as MNLI has; longer runs read them again
IMAGES = 256  # different ones, which take turns: drawing new ones would take longer than training
_DRAWN = 200 * BLOCK  # batches in which `shapes` looks for shapes


def lengths(case: Case, count: int, random: np.random.Generator) -> NDArray[Any]:
    """Tokens of sentences, [count, 1], or of the sides of pairs, [count, 2]."""
    its = case.work.lengths
    if isinstance(its, corpus.Sides):
        return np.stack(corpus.lengths(count, random, its), 1)
    shortest, longest = its or (case.length, case.length)
    return random.integers(shortest, longest + 1, (count, 1))


def shapes(case: Case, system: str) -> list[tuple[int, ...]]:
    """The lengths to which a system pads the sides of a batch, longest first; none if nothing is
    compiled. They are those of many random batches."""
    how = SYSTEMS[system]
    if how.mode is None:
        return []
    drawn = lengths(case, _DRAWN * case.batch, np.random.default_rng(0))
    if how.grouped:  # as transformers sorts
        blocks = drawn.reshape(-1, BLOCK * case.batch, drawn.shape[1])
        drawn = np.take_along_axis(blocks, blocks[..., :1].argsort(1), 1)
    longest = drawn.reshape(-1, case.batch, drawn.shape[-1]).max(1)
    found = {tuple(padded(length, how.multiple) for length in its) for its in longest.tolist()}
    return sorted(found, reverse=True)


class Sentences(Dataset[dict[str, Any]]):
    """``count`` sentences of a case with their labels, or pairs, as numpy arrays in memory."""

    def __init__(self, case: Case, count: int, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.case, self.count = case, count
        its = lengths(case, count, random)
        self.sides = its.shape[1]
        self.starts = np.concatenate([[0], its.cumsum()])
        self.mask = configuration(case).vocab_size - 1
        self.tokens = random.integers(SPECIALS, self.mask, self.starts[-1], np.int32)
        self.classes = random.integers(0, 2, count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = index * self.sides
        ids, *target = (
            self.tokens[self.starts[n] : self.starts[n + 1]].astype(np.int64)
            for n in range(first, first + self.sides)
        )
        labels: Any = self.classes[index]
        if self.case.work.has_target:
            labels = target[0]
        elif self.case.kind == "text":
            labels = ids  # the model shifts them
        elif self.case.kind == "tokens":
            labels = ids % self.case.work.classes
        elif self.case.kind == "mlm":
            is_masked = np.random.default_rng(index).random(len(ids)) < MASKED
            labels = np.where(is_masked, ids, IGNORED)
            ids[is_masked] = self.mask
        return {"input_ids": ids, "labels": labels}


class Images(Dataset[dict[str, Any]]):
    """``count`` images of a case with their classes, of which `IMAGES` are different."""

    def __init__(self, case: Case, count: int, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        size = configuration(case).image_size
        pixels = random.standard_normal((min(count, IMAGES), 3, size, size), np.float32)
        self.pixels = torch.from_numpy(pixels)
        self.classes = random.integers(0, case.work.classes, count).tolist()

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = self.pixels[index % len(self.pixels)]
        return {"pixel_values": pixels, "labels": self.classes[index]}


def dataset(case: Case, count: int) -> Sentences | Images:
    return (Images if case.kind == "images" else Sentences)(case, count)


class Collator(NamedTuple):
    """Pads the sentences of a batch to the longest one, rounded up to a multiple.

    Labels of tokens are padded, too, as by ``DataCollatorForSeq2Seq``. Blocks of one length get no
    attention mask, with which sdpa could not use its fastest kernels.
    """

    pad: int
    multiple: int
    has_pads: bool

    def __call__(self, batch: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        ids, labels = ([sample[name] for sample in batch] for name in ("input_ids", "labels"))
        by_token = np.ndim(labels[0]) > 0
        made = {
            "input_ids": self._filled(ids, self.pad),
            "labels": self._filled(labels, IGNORED) if by_token else np.array(labels),
        }
        if self.has_pads:
            made["attention_mask"] = self._filled([np.ones_like(its) for its in ids], 0)
        return {name: torch.from_numpy(array) for name, array in made.items()}

    def _filled(self, rows: Sequence[NDArray[Any]], value: int) -> NDArray[Any]:
        whole = np.full((len(rows), padded(max(map(len, rows)), self.multiple)), value)
        for place, row in zip(whole, rows):
            place[: len(row)] = row
        return whole


def collator(case: Case, multiple: int) -> Any:
    """The function that makes batches of a case's samples."""
    if case.kind == "images":
        return default_collate
    return Collator(configuration(case).pad_token_id or 0, multiple, case.has_pads)


def count_of(batch: dict[str, Tensor], case: Case) -> Tensor | int:
    """Tokens of a batch without pads, or images; a tensor if that is on the device.

    Of pairs, those of the source and of the target are counted, as "real tokens" of
    ``lightseq-bench train``.
    """
    if "pixel_values" in batch:
        return len(batch["pixel_values"])
    mask = batch.get("attention_mask")
    count = batch["input_ids"].numel() if mask is None else mask.sum()
    return count + batch["labels"].ne(IGNORED).sum() if case.work.has_target else count


def resized(batch: dict[str, Tensor], shape: Sequence[int], pad: int) -> dict[str, Tensor]:
    """``batch`` with its sides cut or padded to the lengths ``shape``."""
    filling = {"input_ids": pad, "attention_mask": 0, "labels": IGNORED}
    made = dict(batch)
    for name, value in filling.items():
        if name in batch and batch[name].dim() > 1:
            more = shape[-1 if name == "labels" else 0] - batch[name].shape[1]
            made[name] = torch.nn.functional.pad(batch[name], (0, more), value=value)
    return made
