"""Which dictionaries a model was trained with.

A fairseq checkpoint holds none: another dictionary of the same size loads without a word and
translates nonsense. Ours holds a digest of each, which a later command compares with what it has.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lightseq_fairseq.errors import UserError


def digests(task: Any) -> dict[str, str]:
    """Of the task's source and target dictionary: "<number of symbols>:<their SHA-256>".

    A user's task need not have either: its source may be pictures.
    """
    found = {}
    for side in ("source", "target"):
        try:
            symbols = getattr(getattr(task, f"{side}_dictionary"), "symbols", None)
        except NotImplementedError:  # FairseqTask's own
            continue
        if symbols is not None:
            text = "\n".join(symbols).encode()
            found[side] = f"{len(symbols)}:{hashlib.sha256(text).hexdigest()}"
    return found


def difference(task: Any, trained_with: dict[str, str] | None) -> str | None:
    """A sentence on the side of the task that has other symbols than a checkpoint's, or None.

    Sizes that differ are left to the embedding, which says so itself. None or {} says nothing.
    """
    for side, digest in digests(task).items():
        expected = (trained_with or {}).get(side, digest)
        if expected != digest and expected.partition(":")[0] == digest.partition(":")[0]:
            return (
                f"The {side} dictionary is not the one the checkpoint was trained with (same size, "
                "other symbols): use the data directory of that run, or binarise with its "
                f"dictionaries (lightseq-preprocess --{'src' if side == 'source' else 'tgt'}dict)."
            )
    return None


def check(task: Any, trained_with: dict[str, str] | None) -> None:
    """Refuse a checkpoint of other dictionaries than the task's.

    Raises:
        UserError: see `difference`.
    """
    if (sentence := difference(task, trained_with)) is not None:
        raise UserError(sentence)
