"""Which dictionaries a model was trained with.

A fairseq checkpoint holds none: another dictionary of the same size loads without a word and
translates nonsense. Ours holds a digest of each, which a later command compares with what it has.
"""

from __future__ import annotations

import hashlib
from typing import Any

from lightseq_fairseq.errors import UserError


def digests(task: Any) -> dict[str, str]:
    """Of the task's source and target dictionary: "<number of symbols>:<their SHA-256>"."""
    sides = {"source": task.source_dictionary, "target": task.target_dictionary}
    return {
        side: f"{len(words)}:{hashlib.sha256(chr(10).join(words.symbols).encode()).hexdigest()}"
        for side, words in sides.items()
        if words is not None
    }


def check(task: Any, trained_with: dict[str, str] | None) -> None:
    """Compare the task's dictionaries with those of a checkpoint; None or {} says nothing.

    Sizes that differ are left to the embedding, which says so itself.

    Raises:
        UserError: naming the side that has other symbols.
    """
    for side, digest in digests(task).items():
        expected = (trained_with or {}).get(side, digest)
        if expected != digest and expected.partition(":")[0] == digest.partition(":")[0]:
            raise UserError(
                f"The {side} dictionary is not the one the checkpoint was trained with (same size, "
                "other symbols): use the data directory of that run, or binarise with its "
                f"dictionaries (lightseq-preprocess --{'src' if side == 'source' else 'tgt'}dict)."
            )
