"""Result rows: the commit that they name, the file that keeps them, the table that shows them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightseq_fairseq.checkpoints import files
from lightseq_fairseq.errors import UserError

SOURCE = Path(__file__).resolve()


def current_commit() -> str:
    """The commit of this code's clone; COMMIT names it where the code came without its history.

    Raises:
        UserError: neither is there.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    # This file's name too: an installed package may lie within the clone of something else.
    command = ["git", "-C", str(SOURCE.parent), "rev-parse", "HEAD", f"HEAD:./{SOURCE.name}"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError("This code is no git clone: name its commit with COMMIT=...") from None
    return done.stdout.split()[0]


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A JSON list, one row a line, so that differences are readable.

    Raises:
        UserError: the file cannot be written; it is as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    with files.replaced(path) as file:
        file.write(f"[\n{lines}\n]\n".encode())


def tabulate() -> Callable[..., str]:
    """The function that lays out a table, for which the extra `bench` brings a package.

    Whoever measures first and prints then asks for it before the first measurement.

    Raises:
        UserError: it is not installed.
    """
    try:
        from tabulate import tabulate
    except ImportError:
        raise UserError(
            "Tables need the package tabulate: pip install 'lightseq-fairseq[bench]' brings it, "
            "and so does pip install tabulate."
        ) from None
    function: Callable[..., str] = tabulate
    return function


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1, form: str = "simple"
) -> list[str]:
    """The lines of a table: so many columns of ``texts``, then numbers, as the cells have them.

    Args:
        form: how it is drawn, of tabulate's names: "simple" for a terminal, "pipe" in Markdown.
    """
    sides = ["left"] * texts + ["right"] * (len(head) - texts)
    lay_out = tabulate()
    return lay_out(rows, head, form, disable_numparse=True, colalign=sides).splitlines()
