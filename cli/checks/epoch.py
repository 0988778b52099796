"""The amount of training data, which a recipe's schedule depends on."""

from __future__ import annotations

import argparse
import copy
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import binarised
from lightseq_fairseq.cli.words.defaults import Epoch
from lightseq_fairseq.cli.words.registries import data_of

# The most sentences whose batches are counted. With 4 million pairs it takes 3 s on a CPU core.
_MOST = 5_000_000
# Data whose sentences the model limits, and not the task -> the setting of the model's positions;
# by default there are as many as tokens in a block.
_POSITIONS = {"running text": "max_target_positions", "text to mask": "max_positions"}


def of_command(argv: Sequence[str]) -> Epoch | None:
    """The epoch of the first word that is a folder of binarised training data; None if there is
    none, or if its files cannot be read. Of several shards, joined by ":", it is the first.
    """
    for word in argv:
        folder = Path(word.partition(os.pathsep)[0])
        if not word.startswith("-") and folder.is_dir():
            # "*": a folder for each language
            for place in ("train*.idx", "input0/train*.idx", "*/train*.idx"):
                if files := sorted(folder.glob(place)):
                    return _of_files(files)
    return None


def counted(epoch: Epoch, args: argparse.Namespace) -> Epoch:
    """``epoch`` with the number of batches that fairseq makes of the first epoch.

    fairseq pads sentences, rounds the sizes of batches, and leaves out sentences that are too long;
    each task adds tokens or cuts texts in its way. More than `_MOST` sentences are not counted.

    Args:
        args: the parsed command; its checks have passed.
    """
    if epoch.sentences > _MOST:
        return epoch
    from fairseq import tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from lightseq_fairseq.training import full_batches

    with _silence():
        cfg = convert_namespace_to_omegaconf(copy.deepcopy(args))
        data, seed = cfg.dataset, cfg.common.seed
        task = tasks.setup_task(cfg.task)
        model = None  # its positions
        if setting := _POSITIONS.get(data_of(args.task) or ""):
            model = getattr(args, setting, None) or args.tokens_per_sample
        task.load_dataset(data.train_subset, combine=True, epoch=1)
        iterator = task.get_batch_iterator(
            task.dataset(data.train_subset),
            max_tokens=data.max_tokens,
            max_sentences=data.batch_size,
            max_positions=utils.resolve_max_positions(task.max_positions(), model, data.max_tokens),
            ignore_invalid_inputs=True,
            required_batch_size_multiple=data.required_batch_size_multiple,
            seed=seed + 1 if data.update_ordered_indices_seed else seed,
        )
        if getattr(cfg.model, "pack_tokens", False):
            full_batches.refill(iterator, data.max_tokens, data.batch_size)
        return epoch._replace(batches=len(iterator.frozen_batches))


@contextmanager
def _silence() -> Iterator[None]:
    """Without log lines: the run writes them again."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _of_files(files: Sequence[Path]) -> Epoch | None:
    """The files of a pair of languages, ``train.de-en.de`` and ``train.de-en.en``, are one text."""
    texts: dict[tuple[Path, str], np.ndarray] = {}
    for file in files:
        try:
            found = binarised.find(os.fspath(file.with_suffix("")), None)
        except UserError:
            return None
        if found is None:
            return None
        name = file.stem.rpartition(".")[0] if file.stem.count(".") > 1 else file.stem
        pair = file.parent, name
        lengths = found.lengths
        other = texts.get(pair, lengths)
        if len(other) != len(lengths):
            return None
        texts[pair] = np.maximum(other, lengths)
    return Epoch(
        sum(len(lengths) for lengths in texts.values()),
        sum(int(lengths.sum()) for lengths in texts.values()),
    )
