"""Where result rows come from and how they are kept: what every measuring script shares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def current_commit() -> str:
    """The commit of this tree; COMMIT names it where the tree came without its history."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        sys.exit("this tree is no git clone; name its commit with COMMIT=...")


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A JSON list, one row a line, so that differences are readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
