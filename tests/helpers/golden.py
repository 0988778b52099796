"""Golden files: on a line what is done, and below it, indented, what the answer is.

A line that begins with ``# `` is the title of the lines below it; one with ``#:`` is a comment.
"""

from __future__ import annotations

import re
from pathlib import Path


def titled(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Title -> what is done, and the answer, of each line below it."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in re.split(r"^# ", path.read_text(), flags=re.M)[1:]:
        title, *lines = (line for line in part.splitlines() if line and not line.startswith("#:"))
        assert [line.startswith("  ") for line in lines] == [False, True] * (len(lines) // 2), title
        found[title] = [(done, said[2:]) for done, said in zip(lines[::2], lines[1::2])]
    return found


def refusals(test: str, title: str) -> list[tuple[str, str]]:
    """The lines below a title of refusals.txt, which is beside the file of the test."""
    return titled(Path(test).with_name("refusals.txt"))[title]


def matches(answer: str, golden: str) -> bool:
    """Whether the answer is the file's, in which ``...`` stands for any text."""
    return bool(re.fullmatch(".*".join(map(re.escape, golden.split("..."))), answer, re.S))
