"""Runs of the scripts in examples/multi30k."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import helpers.forked_commands as forked_commands

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FOLDER = EXAMPLES / "multi30k"


def script(name: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the recipe's scripts."""
    return subprocess.run(
        command(name, *words), cwd=ROOT,
        env={**os.environ, "PATH": forked_commands.path(), **variables},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def command(name: str, *words: str | Path, python: str | None = None) -> list[str]:
    """The command line; ``python`` runs it if it is a module, by default forked."""
    program = ["bash", str(FOLDER / name)]
    if name.endswith(".py"):
        python = python or str(forked_commands.python())
        program = [python, "-m", f"examples.multi30k.{Path(name).stem}"]
    return [*program, *map(str, words)]
