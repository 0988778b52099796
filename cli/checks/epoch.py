"""The amount of training data, which a recipe's warm-up depends on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import binarised
from lightseq_fairseq.cli.words.defaults import Epoch


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
