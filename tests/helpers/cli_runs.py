"""Runs of launchers in this process, on a corpus of a few lines."""

from __future__ import annotations

import gc
import hashlib
import importlib
import logging
import multiprocessing
import random
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.compositions  # noqa: F401  (makes runs faster, and prepares fairseq)
from click.testing import CliRunner, Result

# isort: split
import fairseq_cli.train
from fairseq import checkpoint_utils, sequence_scorer
from fairseq.data import data_utils
from fairseq.tasks.language_modeling import LanguageModelingTask

SPLITS = {"train": 40, "valid": 6, "test": 6}
WORDS = 20

# One layer each, three updates: enough for a checkpoint.
SMALL = shlex.split(
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--max-update 3 --max-tokens 200 --num-workers 0 --no-epoch-checkpoints --cpu"
)


def run(command: str, *words: str | Path, input: bytes | None = None) -> Result:
    """Runs ``lightseq-<command>`` with ``words``; ``input`` is its standard input.

    Afterwards fairseq's modules are as before.
    """
    module = importlib.import_module(f"lightseq_fairseq.cli.{command.replace('-', '_')}")
    with unchanged():
        return CliRunner().invoke(module.main, [str(word) for word in words], input)


def succeed(command: str, *words: str | Path) -> str:
    """Runs it and returns its output; fails unless the exit status is 0."""
    result = run(command, *words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def validated(*words: str | Path) -> str:
    """Runs lightseq-validate and returns the line that it prints of the loss.

    A handler of the log, such as caplog's, may lack the line: fairseq-validate removes every second
    handler of the root logger.
    """
    (line,) = (line for line in succeed("validate", *words).splitlines() if "| valid on '" in line)
    return line


def most_workers(*words: str | Path) -> int:
    """Trains, and returns how many data loader processes ran at the same time after an update.

    Garbage collection is off: it would end them, after a wait of 5 s for each.
    """
    before, counts = set(multiprocessing.active_children()), []
    step = fairseq_cli.train.validate_and_save

    def counted(*arguments: Any) -> Any:
        result = step(*arguments)
        counts.append(len(set(multiprocessing.active_children()) - before))
        return result

    gc.disable()
    try:
        with mock.patch.object(fairseq_cli.train, "validate_and_save", counted):
            succeed("train", *words)
        return max(counts)
    finally:
        gc.enable()


@contextmanager
def unchanged() -> Iterator[None]:
    """Undoes the changes that a launcher run makes in fairseq's modules and in the root logger."""
    places = (
        (fairseq_cli.train, "Trainer"),
        (fairseq_cli.train, "main"),
        (checkpoint_utils, "load_checkpoint_to_cpu"),
        (checkpoint_utils, "PathManager"),
        (checkpoint_utils, "os"),
        (data_utils, "batch_by_size"),
        (sequence_scorer.SequenceScorer, "generate"),
        (LanguageModelingTask, "eval_lm_dataloader"),
    )
    patches = [mock.patch.object(module, name, getattr(module, name)) for module, name in places]
    # fairseq's preprocess logs into a file, too, whose folder may be gone when the next run logs.
    loggers = [logging.getLogger(), logging.getLogger("fairseq_cli.preprocess")]
    handlers, level = [list(logger.handlers) for logger in loggers], loggers[0].level
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
        for logger, before in zip(loggers, handlers, strict=True):
            logger.handlers[:] = before
        loggers[0].setLevel(level)
        vars(checkpoint_utils.save_checkpoint).pop("best", None)


def write_text(folder: Path, words: int = WORDS) -> None:
    """Writes train/valid/test.de and .en into ``folder``: every word w7 translates to v7."""
    source = random.Random(words)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in SPLITS.items():
        lines = [source.choices(range(words), k=source.randint(3, 9)) for _ in range(count)]
        for language, letter in (("de", "w"), ("en", "v")):
            text = "".join(" ".join(f"{letter}{i}" for i in line) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text)


def binarise(folder: Path, words: int = WORDS) -> Path:
    """A data folder made from `write_text` by lightseq-preprocess."""
    write_text(folder / "text", words)
    prefixes = {split: str(folder / "text" / split) for split in SPLITS}
    succeed(
        "preprocess", "-s", "de", "-t", "en", "--destdir", folder / "data",
        *(word for split, prefix in prefixes.items() for word in (f"--{split}pref", prefix)),
    )  # fmt: skip
    return folder / "data"


# A language model of the same size.
SMALL_TEXT = shlex.split(
    "--task language_modeling --decoder-layers 2 --decoder-embed-dim 16 --decoder-input-dim 16 "
    "--decoder-output-dim 16 --decoder-ffn-embed-dim 24 --decoder-attention-heads 2 "
    "--tokens-per-sample 16 --max-target-positions 32 --max-tokens 128 --max-update 3 "
    "--no-epoch-checkpoints --num-workers 0 --cpu"
)


def binarise_text(folder: Path, words: int = WORDS) -> Path:
    """A data folder of running text made by lightseq-preprocess; some words consist of two
    subwords."""
    source = random.Random(words)
    (folder / "text").mkdir(parents=True, exist_ok=True)
    prefixes: list[str | Path] = []
    for split, count in (("train", 60), ("valid", 12), ("test", 24)):
        lines = [source.choices(range(words), k=source.randint(0, 9)) for _ in range(count)]
        text = [" ".join(f"w{i}" + "@@" * (i % 5 == 4) for i in line) + " w0\n" for line in lines]
        (folder / "text" / split).write_text("".join(text))
        prefixes += [f"--{split}pref", folder / "text" / split]
    succeed("preprocess", "--only-source", "--destdir", folder / "data", *prefixes)
    return folder / "data"


def digests(folder: Path) -> dict[Path, str]:
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "preprocess.log"
    }
