"""Checks that a checkpoint is used with the dictionaries it was trained with.

A fairseq checkpoint holds no dictionary. With a wrong dictionary of the same size the model loads
without an error, but its output is nonsense. Our checkpoints hold a digest of each dictionary, and
later commands compare it with the dictionaries of their task.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lightseq_fairseq.errors import UserError


def digests(task: Any) -> dict[str, str]:
    """Digests of the task's "source" and "target" dictionary: "<number of symbols>:<SHA-256>".

    A task may lack either dictionary, for example if its source is images; then so does the result.
    """
    found = {}
    for side in ("source", "target"):
        try:
            symbols = getattr(getattr(task, f"{side}_dictionary", None), "symbols", None)
        except NotImplementedError:  # raised by FairseqTask's default property
            continue
        if symbols is not None:
            text = "\n".join(symbols).encode()
            found[side] = f"{len(symbols)}:{hashlib.sha256(text).hexdigest()}"
    return found


def difference(task: Any, trained_with: dict[str, str] | None) -> str | None:
    """A sentence that names a dictionary whose symbols differ from the checkpoint's, or None.

    Different sizes are not reported here: loading the embedding reports them. If ``trained_with``
    is None or {}, nothing is compared.
    """
    for side, digest in digests(task).items():
        expected = (trained_with or {}).get(side, digest)
        if expected != digest and expected.partition(":")[0] == digest.partition(":")[0]:
            flag = "--srcdict" if side == "source" else "--tgtdict"
            return (
                f"The {side} dictionary is not the one that the checkpoint was trained with (same "
                "size, other words): use the data folder of that run, or binarise the data with "
                f"its dictionary (lightseq-preprocess {flag})."
            )
    return None


def check(task: Any, trained_with: dict[str, str] | None) -> None:
    """Check that the task has the checkpoint's dictionaries.

    Raises:
        UserError: a dictionary differs, see `difference`.
    """
    if (sentence := difference(task, trained_with)) is not None:
        raise UserError(sentence)
