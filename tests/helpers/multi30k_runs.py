"""Runs of the scripts in examples/multi30k."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = EXAMPLES / "multi30k"
# The commands of the environment that these tests run in.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def script(name: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One of the recipe's scripts."""
    program = sys.executable if name.endswith(".py") else "bash"
    return subprocess.run(
        [program, str(FOLDER / name), *map(str, words)],
        env={**os.environ, "PATH": PATH, **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
