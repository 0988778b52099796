"""Runs of the examples' run.sh, without waiting for them; and words that each must refuse."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import helpers.forked_commands as forked_commands
from helpers.multi30k_runs import EXAMPLES

CODE = "a[$(touch hacked)]"  # bash would execute this if it evaluated the text as a number


def start(example: str, *words: str | Path) -> subprocess.Popen[str]:
    """Starts ``examples/<example>/run.sh`` with the commands of this environment."""
    return subprocess.Popen(
        ["bash", EXAMPLES / example / "run.sh", *words],
        env={**os.environ, "PATH": forked_commands.path()},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def assert_refused(example: str, *words: str) -> None:
    """The run must end early, with an error that names the first word."""
    process = start(example, *words)
    output, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert words[0] in errors and "== data" not in output
    assert not Path("hacked").exists()
