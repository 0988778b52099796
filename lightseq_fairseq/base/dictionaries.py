"""Checks that a checkpoint is used with the dictionaries it was trained with.

A fairseq checkpoint holds no dictionary. With a wrong dictionary of the same size the model loads
without an error, but its output is nonsense. Our checkpoints hold a digest of each dictionary, and
the labels of a classifier in their order. Later commands compare them with their task's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

from lightseq_fairseq.base.errors import UserError


def digests(task: Any) -> dict[str, str]:
    """Digests of the task's "source" and "target" dictionary: "<number of symbols>:<SHA-256>"; and
    "label", the words of a classifier's labels, one on each line.

    A task may lack a dictionary, for example if its source is images; then so does the result.
    """
    found = {}
    for side in ("source", "target"):
        try:
            symbols = getattr(getattr(task, f"{side}_dictionary", None), "symbols", None)
        except NotImplementedError:  # raised by FairseqTask's default property
            continue
        if symbols is not None:
            found[side] = digest(symbols)
    of_labels = getattr(task, "label_dictionary", None)
    # With numbers as labels, fairseq's task has its only dictionary here.
    if of_labels is not None and of_labels is not getattr(task, "dictionary", None):
        found["label"] = "\n".join(labels(of_labels))
    return found


def digest(symbols: Sequence[str]) -> str:
    """ "<number of symbols>:<SHA-256>"."""
    text = "\n".join(symbols).encode()
    return f"{len(symbols)}:{hashlib.sha256(text).hexdigest()}"


def labels(dictionary: Any) -> list[str]:
    """The words of a dictionary of labels, in the order of the classes."""
    words = dictionary.symbols[dictionary.nspecial :]
    # lightseq-preprocess fills dictionaries up, and fairseq's task adds <mask>.
    return [word for word in words if not re.fullmatch(r"madeupword\d{4}|<mask>", word)]


def moved_label(found: Sequence[str], trained: Sequence[str]) -> str | None:
    """A sentence that names a label that means another class than in training, or None."""
    for number, (word, other) in enumerate(zip(found, trained)):
        if word != other:
            return (
                f"Class {number} is the label {word} in label/dict.txt, but the checkpoint was "
                f"trained with {other} as this class: binarise the labels with the label/dict.txt "
                "of that run (lightseq-preprocess --srcdict)."
            )
    return None


def difference(task: Any, trained_with: dict[str, str] | None) -> str | None:
    """A sentence that names a dictionary whose symbols differ from the checkpoint's, or None.

    Different sizes are not reported here: loading the embedding reports them. If ``trained_with``
    is None or {}, nothing is compared.
    """
    for side, digest in digests(task).items():
        if side == "label":
            continue
        expected = (trained_with or {}).get(side, digest)
        if expected != digest and expected.partition(":")[0] == digest.partition(":")[0]:
            flag = "--srcdict" if side == "source" else "--tgtdict"
            return (
                f"The {side} dictionary is not the one that the checkpoint was trained with (same "
                "size, other words): use the data folder of that run, or binarise the data with "
                f"its dictionary (lightseq-preprocess {flag})."
            )
    return None


def other_labels(task: Any, trained_with: dict[str, str] | None) -> str | None:
    """`moved_label` for the labels of the task and of a checkpoint; None if one has none."""
    found, trained = (each.get("label") for each in (digests(task), trained_with or {}))
    if found is None or trained is None:
        return None
    return moved_label(found.split("\n"), trained.split("\n"))


def check(task: Any, trained_with: dict[str, str] | None) -> None:
    """Check that the task has the checkpoint's dictionaries and labels.

    Raises:
        UserError: a dictionary differs, see `difference`, or labels do, see `moved_label`.
    """
    for differs in (difference, other_labels):
        if (sentence := differs(task, trained_with)) is not None:
            raise UserError(sentence)
