"""``lightseq-validate``: fairseq-validate that builds this package's model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lightseq_fairseq.base import families
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.checks.checkpoints import saved
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq
from lightseq_fairseq.cli.words.argv import is_given, value


@launcher("validate")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Measure the loss of a checkpoint on a binarised split, and the accuracy of a classifier.

    Takes every option of fairseq-validate, and checkpoints that lightseq-train or fairseq-train
    wrote. If you do not set them, it adds --max-tokens 4096 and --task: translation, or the
    checkpoint's task if the data are running text or sentences with labels. For sentences with
    labels it adds the checkpoint's --num-classes, --regression-target and criterion as well.

    \b
        lightseq-validate data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --valid-subset test
    """
    run_fairseq("validate", words, native=native, complete=_complete)


def _reading(*data: str) -> tuple[str, ...]:
    """The tasks for kinds of data; the first is the default if the checkpoint names none."""
    return tuple(task.name for task in families.tasks().values() if task.data in data)


_TEXT = _reading("running text", "text to mask")
_SENTENCES = _reading("sentences with labels")


def _complete(words: list[str]) -> list[str]:
    """The words with the flags that fairseq-validate has no defaults for and fails without."""
    added: list[str] = []
    if not is_given(words, ("--max-tokens", "--batch-size", "--max-sentences")):
        added += ["--max-tokens", "4096"]
    given = value(words, ("--task",))
    candidates = _tasks(words) if given is None else (given,)
    trained: dict[str, Any] = {}
    if len(candidates) > 1 or candidates[0] in _SENTENCES:
        from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

        path = value(words, ("--path",))
        trained = settings_of(saved(path and checkpoint_in(path)), "task")
    name = trained.get("_name") or trained.get("task")
    task = str(name) if name in candidates else candidates[0]
    if given is None:
        added += ["--task", task]
    if task == "sentence_prediction":
        head = str(trained.get("classification_head_name") or "sentence_classification_head")
        wanted = {"--num-classes": str(trained.get("num_classes", -1))}
        if not is_given(words, ("--criterion",)):  # the task reads its settings
            wanted |= {"--criterion": task, "--classification-head-name": head}
        for flag, text in wanted.items():
            if not is_given(words, (flag,)):
                added += [flag, text]
        if trained.get("regression_target"):
            added.append("--regression-target")
    return [*added, *words]


def _tasks(words: list[str]) -> tuple[str, ...]:
    """The tasks that the data folder among the words may belong to, by its dictionaries.

    Sentences with labels have input0/dict.txt, running text has dict.txt. Sentence pairs have
    dict.<language>.txt, and may have dict.txt as well, for --lm-path.
    """
    for folder in (Path(word.partition(os.pathsep)[0]) for word in words):
        if (folder / "input0" / "dict.txt").is_file():
            return _SENTENCES
        if (folder / "dict.txt").is_file() and not any(folder.glob("dict.*.txt")):
            return _TEXT
    return ("translation",)


if __name__ == "__main__":
    main()
