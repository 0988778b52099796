"""Batches of padded pairs for Hugging Face's models, of few sizes.

The samples are fairseq's; the batches are not. As experienced users do, the samples are grouped by
length, so that a batch has few pads, and lengths are rounded up, so that batches have few sizes.
All batches of a run are drawn before its first update, so that data costs no time.

Shapes: B = sentences, S = tokens of a source, L = tokens of a target, with pads.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from lightseq_fairseq.cli.benchmark.train.batches import PaddedPairs
from lightseq_fairseq.cli.benchmark.train.cases import Case, Data
from lightseq_fairseq.cli.benchmark.train.commands import noise_flags
from lightseq_fairseq.cli.benchmark.train.corpus import SOURCE, TARGET
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD

DRAWN = 64  # maximum number of batches; they are used in a cycle
LEAST = 16  # lengths are multiples of it; of long texts, multiples of an 16th of the longest


def drawn(data: Path, case: Case, count: int, workers: int) -> list[PaddedPairs]:
    """Up to ``count`` different batches, at most `DRAWN`; pinned if there is a GPU.

    Raises:
        ValueError: the corpus has not enough samples for one batch.
    """
    dataset = _noised(data, case) if case.data is Data.NOISED else _pairs(data)
    steps = step(case.longest), LEAST
    groups = grouped(dataset.sizes, steps, case.sentences or case.blocks, case)
    if not groups:
        raise ValueError(f"no batch of {case} can be made of {data}")
    order = np.random.default_rng(1).permutation(len(groups))[: min(count, DRAWN)]
    collate = partial(padded, steps=steps, collater=dataset.collater)
    return list(
        DataLoader(
            dataset, batch_sampler=[groups[i] for i in order], collate_fn=collate,
            num_workers=workers, pin_memory=torch.cuda.is_available(),
        )
    )  # fmt: skip


def step(longest: int) -> int:
    """Lengths of a side are multiples of it."""
    return max(LEAST, -(-longest // (16 * 8)) * 8)


def grouped(sizes: Any, steps: tuple[int, int], sentences: int, case: Case) -> list[list[int]]:
    """Batches of samples of similar lengths; samples that are left over are dropped.

    Args:
        sizes: [samples, 2] lengths of source and target.
        sentences: of a batch, if all lengths are equal or --batch-size is set; otherwise a batch
            has as many as fit into the max-tokens of the case, a multiple of eight if it can.
    """
    rounded = np.asarray(sizes).reshape(len(sizes), -1)
    source, target = rounded[:, 0], rounded[:, -1]
    rows = -(-source // steps[0]) * steps[0]
    groups = []
    for length in np.unique(rows):
        its = np.flatnonzero(rows == length)
        its = its[np.argsort(target[its], kind="stable")]
        many = sentences
        if not (case.sentences or case.block):
            many = case.max_tokens // int(length)
            many = many // 8 * 8 or many
        groups += its[: len(its) // many * many].reshape(-1, many).tolist()
    return groups


def padded(samples: Any, steps: tuple[int, int], collater: Any) -> PaddedPairs:
    """fairseq's batch with both lengths rounded up to multiples of ``steps``."""
    batch = collater(samples)
    inputs = batch["net_input"]
    sides = inputs["src_tokens"], inputs["prev_output_tokens"], batch["target"]
    by = steps[0], steps[1], steps[1]
    rounded = (functional.pad(x, (0, -x.shape[1] % n), value=PAD) for x, n in zip(sides, by))
    return PaddedPairs(*rounded)


def _pairs(data: Path) -> Any:
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    cfg = TranslationConfig(data=str(data), source_lang=SOURCE, target_lang=TARGET)
    cfg.train_subset, cfg.dataset_impl, cfg.required_seq_len_multiple = "train", None, 1
    cfg.left_pad_source = False
    task = TranslationTask.setup_task(cfg)
    task.load_dataset("train")
    dataset = task.dataset("train")
    dataset.sizes = np.stack([dataset.src_sizes, dataset.tgt_sizes], 1)
    return dataset


def _noised(data: Path, case: Case) -> Any:
    """Blocks of text with the noise of the command, drawn from torch's generator."""
    from fairseq.tasks.denoising import DenoisingTask

    parser = argparse.ArgumentParser()
    DenoisingTask.add_args(parser)
    flags = (str(word) for pair in noise_flags(case).items() for word in pair)
    args = parser.parse_args([str(data), *flags])
    args.dataset_impl, args.seed, args.bpe = None, 1, None
    task = DenoisingTask.setup_task(args)
    task.load_dataset("train")
    return task.dataset("train")
