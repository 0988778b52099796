"""Result rows of measurements: their commit, their JSON file, and tables of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError

SOURCE = Path(__file__).resolve()


def current_commit() -> str:
    """The commit of the git clone that holds this code, or the environment variable COMMIT.

    COMMIT takes precedence; it is meant for copies of the code without git history.

    Raises:
        UserError: there is neither a clone nor COMMIT.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    # Also ask for this file: an installed package may be inside the clone of another project.
    command = ["git", "-C", str(SOURCE.parent), "rev-parse", "HEAD", f"HEAD:./{SOURCE.name}"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError(
            "The commit of this code is unknown, because it is not in a git clone: set it with "
            "COMMIT=..."
        ) from None
    return done.stdout.split()[0]


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a JSON list with one row per line, so that diffs are readable.

    Raises:
        UserError: the file cannot be written; it is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    with files.atomic_writer(path) as file:
        file.write(f"[\n{lines}\n]\n".encode())


def tabulate() -> Callable[..., str]:
    """The function ``tabulate`` of the package tabulate, which the extra `bench` installs.

    Call this before a long measurement whose results will be printed as a table.

    Raises:
        UserError: tabulate is not installed.
    """
    try:
        from tabulate import tabulate
    except ImportError:
        raise UserError(
            "Tables need the package tabulate, which is not installed: run pip install tabulate, "
            "or pip install 'lightseq-fairseq[bench]'."
        ) from None
    function: Callable[..., str] = tabulate
    return function


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1, form: str = "simple"
) -> list[str]:
    """The lines of a table. Cells are printed as they are.

    Args:
        texts: number of columns, from the first on, that are left-aligned; the others are
            right-aligned.
        form: tabulate's name of the format: "simple" for a terminal, "pipe" for Markdown.
    """
    sides = ["left"] * texts + ["right"] * (len(head) - texts)
    lay_out = tabulate()
    return lay_out(rows, head, form, disable_numparse=True, colalign=sides).splitlines()
