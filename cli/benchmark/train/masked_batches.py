"""Batches of masked text for the baselines without fairseq's training, each of one static size.

Samples and masks are fairseq's; the batches are not. They have samples in random order, and as many
as fit: either one after the other without pads, or each padded to the longest possible sample. All
batches of a run are drawn before its first update, so that data costs no time.

Shapes: T = packed rows, B = samples, L = longest sample, M = masked tokens, at most.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightseq_fairseq.cli.benchmark.train.batches import Batch, Blocks, MaskedRows
from lightseq_fairseq.cli.benchmark.train.cases import Case
from lightseq_fairseq.cli.benchmark.train.corpus import MASKED_SHARE
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD

Samples = list[tuple[Tensor, Tensor]]  # tokens, and target: PAD if not masked


def drawn(data: Path, case: Case, system: str, count: int, workers: int) -> list[Batch]:
    """Up to ``count`` different batches, fewer if the text has no more; pinned if there is a GPU.

    Raises:
        ValueError: the text has not enough samples for one batch.
    """
    dataset = _dataset(data, case)
    sizes = np.asarray(dataset.sizes).reshape(-1)
    order = np.random.default_rng(1).permutation(len(sizes))
    packs = system == "torch_compile" and not case.block
    if packs:
        groups = _filled(order, sizes, case.max_tokens)[:count]
        # Room for the pad rows after the samples: they are fewer than the longest sample has.
        most = max(map(len, groups), default=0) + 2
        collate: Any = partial(packed, rows=case.max_tokens, longest=case.longest, most=most)
    else:
        order = order[sizes[order] == case.block] if case.block else order
        whole = min(len(order) // case.blocks, count) * case.blocks
        groups = order[:whole].reshape(-1, case.blocks).tolist()
        padding = padded if system.startswith("transformers") else padded_rows
        collate = partial(padding, longest=case.longest)
    if not groups:
        raise ValueError(f"no batch of {case} can be made of {data}")
    pins = torch.cuda.is_available()
    return list(
        DataLoader(
            dataset, batch_sampler=groups, collate_fn=collate, num_workers=workers, pin_memory=pins
        )
    )


class _Items(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """The tokens and the target of each sample of fairseq's dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.sizes = dataset, dataset.sizes

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        item = self.dataset[index]
        return item["net_input.src_tokens"], item["target"]


def _dataset(data: Path, case: Case) -> _Items:
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

    cfg = MaskedLMConfig(data=str(data), tokens_per_sample=case.longest)
    cfg.sample_break_mode, cfg.seed = "none" if case.block else "eos", 1
    task = MaskedLMTask.setup_task(cfg)
    task.load_dataset("train")
    return _Items(task.dataset("train"))


def _filled(order: np.ndarray, sizes: np.ndarray, tokens: int) -> list[list[int]]:
    """``order`` cut into groups, each with as many samples as ``tokens`` allow; the last group
    is left out."""
    ends, groups, start = sizes[order].cumsum(dtype=np.int64), [], 0
    before = 0
    while (end := int(ends.searchsorted(before + tokens, side="right"))) < len(order):
        groups.append(order[start:end].tolist())
        start, before = end, int(ends[end - 1])
    return groups


def padded(samples: Samples, longest: int) -> Blocks:
    """Samples padded on the right to ``longest`` tokens."""
    sides = (
        pad_sequence(list(side), batch_first=True, padding_value=PAD) for side in zip(*samples)
    )
    return Blocks(*(functional.pad(x, (0, longest - x.shape[1]), value=PAD) for x in sides))


def padded_rows(samples: Samples, longest: int) -> MaskedRows:
    """Samples padded as by `padded`, and the numbers of the masked rows."""
    tokens, target = padded(samples, longest)
    none = torch.empty(0, dtype=torch.int64)
    return MaskedRows(tokens, none, none, *_masked(target.flatten(), len(samples)))


def packed(samples: Samples, rows: int, longest: int, most: int) -> MaskedRows:
    """Samples one after the other in ``rows`` rows.

    The rows after them are pads, grouped into further samples, so that attention reads and writes
    every row. Empty samples follow, up to the number ``most``.
    """
    tokens, target = (torch.cat(side) for side in zip(*samples))
    lengths = [len(sample) for sample, _ in samples]
    spare = rows - len(tokens)
    lengths += [longest] * (spare // longest) + [spare % longest]
    tokens, target = (functional.pad(x, (0, spare), value=PAD) for x in (tokens, target))
    starts = torch.full((most + 1,), rows, dtype=torch.int32)
    starts[: len(lengths)] = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return MaskedRows(tokens, positions, starts, *_masked(target, most))


def _masked(target: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """int64 [M]: the masked rows, filled up with row 0, and their targets, filled up with PAD.

    Of a sample with n tokens fairseq masks 0.15 n on average, rounded up or down at random. So in
    a batch the standard deviation of the sum is at most half of the root of the number of samples,
    and six deviations are enough.
    """
    most = math.ceil(MASKED_SHARE * len(target) + 3 * samples**0.5)
    rows = target.ne(PAD).nonzero().flatten()[:most]
    spare = (0, most - len(rows))
    return functional.pad(rows, spare), functional.pad(target[rows], spare, value=PAD)
