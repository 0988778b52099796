"""Checks of sentences with labels."""

from __future__ import annotations

import os

import click
import numpy as np

from lightseq_fairseq.base import utf8
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request, binarised
from lightseq_fairseq.cli.checks.checkpoints import saved
from lightseq_fairseq.cli.checks.pairs import folders_of, splits, subset_flag
from lightseq_fairseq.plugins import conditions
from lightseq_fairseq.plugins.settings import option

_HOW = (
    "binarise it with lightseq-preprocess --only-source and a --destdir that ends in {name}, as "
    "fairseq's examples/roberta do"
)


def classes(request: Request) -> None:
    """Raises UserError if the data of sentence_prediction are incomplete or do not match.

    The sentences are in the folder input0, those of a pair also in input1, the labels in label.
    Other commands than lightseq-train take the kind of the labels from the checkpoint. If the file
    cannot be read, which is reported later, the labels are not checked.
    """
    from fairseq.data import Dictionary

    from lightseq_fairseq.base import dictionaries

    command, args = request.command, request.args
    has_labels = command == "train" or args.num_classes >= 1
    if has_labels and args.num_classes < 1:
        raise UserError(
            "--num-classes is missing: set it to the number of classes, or with "
            "--regression-target to the number of values of a sentence."
        )
    family = conditions.family_of(args.arch) if command == "train" else None
    for flag in family.needs if family else ():
        if not getattr(args, option(flag)):
            raise UserError(f"--arch {args.arch} needs {flag} with --task {args.task}: add it.")
    (folder, *_) = folders_of(args)
    has_classes = has_labels and not args.regression_target
    for name in ("input0", "label") if has_classes else ("input0",):
        if not os.path.isfile(os.path.join(folder, name, "dict.txt")):
            has_text = os.path.isfile(os.path.join(folder, "dict.txt"))
            above = os.path.dirname(os.path.abspath(folder))
            if has_text and os.path.isfile(os.path.join(above, name, "dict.txt")):
                raise UserError(f"{folder} is only a part of the data: use the folder {above}.")
            have = "running text, and no" if has_text else "no"
            raise UserError(
                f"{folder} contains {have} {name}/dict.txt, which --task {args.task} reads: "
                f"{_HOW.format(name=name)}."
            )
    if has_classes and command == "train":
        known = dictionaries.labels(Dictionary.load(os.path.join(folder, "label", "dict.txt")))
        if len(known) < args.num_classes:
            request.say(
                f"--num-classes is {args.num_classes}, but the data have {len(known)} labels: "
                f"{', '.join(known[:9])}."
            )
    if has_classes and command != "train":
        _same_labels(command, args.path.partition(os.pathsep)[0], folder)
    words = Dictionary.load(os.path.join(folder, "input0", "dict.txt"))
    words.add_symbol("<mask>")
    for _, split in splits(command, args, [folder]):
        stem = os.path.join(folder, "input0", split)
        sentences = binarised.find(stem, None)
        if sentences is None:
            raise UserError(
                f"{folder}/input0 contains no {split} split: {_HOW.format(name='input0')}, or "
                f"choose another split with {subset_flag(request, split)}."
            )
        counts = {stem: len(sentences.lengths)}
        binarised.check_words(sentences, len(words), everywhere=False)
        other = os.path.join(folder, "input1", split)
        if (seconds := binarised.find(other, None)) is not None:
            binarised.check_words(seconds, len(words), everywhere=False)
            counts[other] = len(seconds.lengths)
        labels = os.path.join(folder, "label", split)
        if has_classes:
            counts[labels] = _labels(labels, args.num_classes, command)
        elif has_labels:
            counts[f"{labels}.label"] = _values(f"{labels}.label", args.num_classes)
        for path, count in counts.items():
            if count != counts[stem]:
                raise UserError(
                    f"{stem} has {counts[stem]} sentences, but {path} has {count}: make both "
                    "again, from text files with equal numbers of lines."
                )


def _same_labels(command: str, path: str, folder: str) -> None:
    """Compares the labels of ``folder`` with those of training.

    fairseq stores no labels, so for its checkpoints those of the training folder are compared. This
    is only a note: another folder may have that name by now.

    Raises:
        UserError: a label means another class in the checkpoint.
    """
    from fairseq.data import Dictionary

    from lightseq_fairseq.base import dictionaries
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    if not (state := saved(path)):
        return
    file = os.path.join("label", "dict.txt")
    found = dictionaries.labels(Dictionary.load(os.path.join(folder, file)))
    trained = ((state.get("extra_state") or {}).get("dictionaries") or {}).get("label")
    if trained is not None:
        if (sentence := dictionaries.moved_label(found, trained.split("\n"))) is not None:
            raise UserError(sentence)
        return
    there = os.path.join(str(settings_of(state, "task").get("data") or ""), file)
    if os.path.isfile(there):
        others = dictionaries.labels(Dictionary.load(there))
        if (sentence := dictionaries.moved_label(found, others)) is not None:
            click.echo(f"lightseq-{command}: note: {sentence}", err=True)


def _labels(stem: str, classes: int, command: str) -> int:
    """The number of labels in a binarised file.

    Raises:
        UserError: the file is missing, or a line is not exactly one of the ``classes`` classes.
    """
    from fairseq.data import Dictionary

    found = binarised.find(stem, None)
    if found is None:
        raise UserError(f"{stem}.idx, the labels, does not exist: {_HOW.format(name='label')}.")
    dictionary = Dictionary()
    tokens = np.asarray(found.tokens, np.int64) - found.first_id
    lines = np.repeat(np.arange(len(found.lengths)), found.lengths)
    is_class = tokens != dictionary.eos()
    counts = np.bincount(lines[is_class], minlength=len(found.lengths))
    if (counts != 1).any():
        line = int(np.argmax(counts != 1)) + 1
        raise UserError(
            f"Line {line} of the labels {stem} has {counts[line - 1]} words, but a label is one "
            "word: correct it, and binarise the labels again."
        )
    labels = tokens[is_class] - dictionary.nspecial
    if labels.min() < 0:
        line = int(np.argmax(labels < 0)) + 1
        raise UserError(
            f"Line {line} of the labels {stem} is not in label/dict.txt: binarise the labels "
            "again, with the same --srcdict for all splits."
        )
    if labels.max() >= classes:
        have = f"The labels {stem} have at least {labels.max() + 1} classes"
        if command == "validate":
            raise UserError(
                f"{have}, but the checkpoint has {classes}: binarise them with the label/dict.txt "
                "of its run (lightseq-preprocess --srcdict), and remove other labels."
            )
        raise UserError(f"{have}, but --num-classes is {classes}: raise it.")
    return len(labels)


def _values(path: str, count: int) -> int:
    """The number of lines of a file with ``count`` numbers each.

    Raises:
        UserError: the file does not exist, or a line contains something else.
    """
    if not os.path.isfile(path):
        raise UserError(
            f"{path} does not exist, from which --regression-target reads a line of --num-classes "
            "numbers for each sentence: write it, or remove --regression-target."
        )
    with open(path, "rb") as file:
        lines = [line.rstrip() for line in utf8.lines(file, path)]
    for number, line in enumerate(lines, 1):
        try:
            values = [float(x) for x in line.split()]
        except ValueError:
            values = []
        if len(values) != count:
            raise UserError(
                f"Line {number} of {path} is not {count} numbers, as --num-classes says: {line!r}. "
                "Correct the line or the flag."
            )
    return len(lines)
