"""Sentence pairs of several languages, for --task translation_multi_simple_epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.parity as parity

LANGUAGES = ("aa", "bb", "cc")
SIZES = {"aa-bb": 40, "aa-cc": 14}  # sentence pairs
TASK: dict[str, Any] = {
    "task": "translation_multi_simple_epoch",
    "source_lang": None,
    "target_lang": None,
    "dataset_impl": None,
    "lang_pairs": "aa-bb,bb-aa,aa-cc",
    "langs": "aa,bb,cc",
    "sampling_method": "temperature",
    "encoder_langtok": "src",
    "decoder_langtok": True,
    "share_all_embeddings": True,
}


def write(folder: Path, seed: int = 1) -> Path:
    """Writes binarised pairs, of which the validation text is the test set, too.

    The languages have the same dictionary; V = 97.
    """
    raw = folder / "raw"
    for number, (pair, size) in enumerate(SIZES.items()):
        texts = parity.write_corpus(raw / pair, size, seed=seed + number)
        for side, language in zip(("src", "tgt"), pair.split("-"), strict=True):
            for split in ("train", "valid"):
                (texts / f"{split}.src-tgt.{side}").rename(texts / f"{split}.{language}")
        source, target = pair.split("-")
        prefixes = {"train": "train", "valid": "valid", "test": "valid"}.items()
        cli_runs.succeed(
            "preprocess", "-s", source, "-t", target, "--destdir", folder, "--workers", "1",
            "--srcdict", texts / "dict.src.txt", "--joined-dictionary",
            *(word for split, name in prefixes for word in (f"--{split}pref", texts / name)),
        )  # fmt: skip
    return folder


def words(folder: Path) -> list[str]:
    """The words of the dictionary, in the order of their rows."""
    text = (folder / "dict.aa.txt").read_text()
    return [line.rpartition(" ")[0] for line in text.splitlines()]
