"""``lightseq-validate``: fairseq-validate that builds this package's model."""

from __future__ import annotations

import os
from pathlib import Path

import click

from lightseq_fairseq.cli.start import defaults
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq


@launcher("validate")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Measure the loss of a checkpoint on a binarised split.

    Takes every option of fairseq-validate, and checkpoints that lightseq-train or fairseq-train
    wrote. If you do not set them, it adds --max-tokens 4096 and --task translation, or the task
    of other data: language_modeling for running text, sentence_prediction for sentences with
    labels.

    \b
        lightseq-validate data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --valid-subset test
    """
    # fairseq-validate has no default for these and fails without them. The task takes settings from
    # the criterion.
    if not defaults.is_given(words, ("--max-tokens", "--batch-size", "--max-sentences")):
        words = ["--max-tokens", "4096", *words]
    if not defaults.is_given(words, ("--task",)):
        words = ["--task", _task(words), *words]
    is_prediction = defaults.value(words, ("--task",)) == "sentence_prediction"
    if is_prediction and not defaults.is_given(words, ("--criterion",)):
        words = ["--criterion", "sentence_prediction", *words]
    run_fairseq("validate", words, native=native)


def _task(words: list[str]) -> str:
    """The task of the data folder among the words, by its dictionaries.

    Sentences with labels have input0/dict.txt, running text has a dict.txt. Sentence pairs may have
    one for --lm-path, beside their own.
    """
    folders = [Path(word.partition(os.pathsep)[0]) for word in words]
    if any((folder / "input0" / "dict.txt").is_file() for folder in folders):
        return "sentence_prediction"
    is_text = any(
        (folder / "dict.txt").is_file() and not any(folder.glob("dict.*.txt")) for folder in folders
    )
    return "language_modeling" if is_text else "translation"


if __name__ == "__main__":
    main()
