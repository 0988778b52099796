"""Files of dictionaries that fairseq cannot read: it names neither the file nor the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.base import utf8
from lightseq_fairseq.base.errors import UserError

_LINE = re.compile(r".* \d+( #fairseq:overwrite)?\s*")


def add_from_file(original: Callable[..., None], self: Any, f: Any) -> None:
    try:
        original(self, f)
    except Exception as error:
        if not isinstance(f, str) or isinstance(error, OSError):
            raise
        raise UserError(_fault(f) or f"The dictionary {f} cannot be read: {error}") from error


def _fault(path: str) -> str | None:
    """The sentence about the first line that is wrong; raises UserError if it is not UTF-8."""
    with open(path, "rb") as file:
        for number, line in enumerate(utf8.lines(file, path), 1):
            if not _LINE.fullmatch(line):
                return (
                    f"Line {number} of {path} is not a word and its count with a space between "
                    "them, so the file is no dictionary: use a dict.txt or dict.<language>.txt of "
                    "lightseq-preprocess."
                )
    return None
