"""Where the rows of a table were measured: GPU, torch, commit and date, for the tables' modules."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from lightseq_fairseq.base.result_rows import table

Row = dict[str, Any]
# The cells of a line of a table, and the result rows that they come from.
Line = tuple[Sequence[str], Sequence[Row]]


def sourced_table(
    head: Sequence[str],
    lines: Sequence[Line],
    texts: int,
    about: str,
    between: Sequence[str] = (),
) -> list[str]:
    """Return a table, and below it the conditions and the sources of its rows.

    If there are several sources, each has a letter, and the last column has a line's letters.

    Args:
        texts: number of left-aligned columns.
        about: the conditions that all rows share, without a full stop.
        between: lines between the table and its conditions.
    """
    sources = [dict.fromkeys(map(source, rows)) for _, rows in lines]
    distinct = list(dict.fromkeys(its for found in sources for its in found))
    if len(distinct) == 1:
        cells: list[Sequence[str]] = [cells for cells, _ in lines]
        note = _sentence(f"{'; '.join(distinct[0])}; {about}")
        return [*table(head, cells, texts, "pipe"), "", *between, note]
    letters = dict(zip(distinct, ascii_letters, strict=False))
    marks = [", ".join(letters[its] for its in found) for found in sources]
    marked = [[*line, mark] for (line, _), mark in zip(lines, marks, strict=True)]
    shared = [part for part, *others in zip(*distinct, strict=True) if {part} == {part, *others}]
    below = "; ".join(
        f"*{letter}*: " + ", ".join(part for part in its if part not in shared)
        for its, letter in letters.items()
    )
    note = _sentence("; ".join([*shared, about])) + f" Sources: {below}."
    return [*table([*head, "source"], marked, texts, "pipe"), "", *between, note]


def machine(row: Row) -> str:
    """Return the GPU's name, or "two CPU cores"."""
    return "two CPU cores" if row["gpu"] == "none" else str(row["gpu"])


def source(row: Row) -> tuple[str, str, str]:
    """Return machine, version of torch, and commit with date."""
    return machine(row), f"torch {row['torch']}", f"commit {row['commit'][:10]} ({row['date']})"


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
