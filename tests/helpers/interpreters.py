"""Runs of Python in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightseq_fairseq

ROOT = Path(lightseq_fairseq.__file__).parents[1]


def run_code(code: str, *, path: tuple[Path, ...] = (), flags: str = "-Wdefault") -> Any:
    """Runs ``code`` in a new interpreter that finds this package, with ``path`` before it on its
    path."""
    inherited = "" if "-S" in flags else os.environ.get("PYTHONPATH", "")
    search = os.pathsep.join([*map(str, (*path, ROOT)), inherited])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *flags.split(), "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python`` with ``words``."""
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)
