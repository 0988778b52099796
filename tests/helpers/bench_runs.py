"""Runs of ``lightseq-bench train`` in this process; each training that it starts is a process of
its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from lightseq_fairseq.cli import bench


def bench_train(*words: object) -> Result:
    return CliRunner().invoke(bench.main, ["train", *map(str, words)])


def bench_once(
    folder: Path, case: str, systems: Sequence[str], *corpus: object
) -> tuple[Any, dict[str, Any]]:
    """The result of the command, which must succeed, and its rows by system; ``corpus`` holds
    further words."""
    output = folder / "rows.json"
    done = bench_train(
        "--case", case, "--systems", ",".join(systems),
        "--updates", 40, "--warm-up", 5, "--rounds", 1, "--workers", 0, *corpus,
        "--output", output, "--logs", folder / "logs",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return done, {row["system"]: row for row in json.loads(output.read_text())}
