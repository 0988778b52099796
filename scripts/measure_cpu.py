#!/usr/bin/env python3
"""Measures what needs no GPU: distance from fairseq in float64, time of a training step.

    OMP_NUM_THREADS=1 python scripts/measure_cpu.py

Writes scripts/results/cpu.json. Takes a minute; the figures are those of the tests' own functions.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from result_rows import current_commit, write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import parity  # noqa: E402
import test_cpu_speed as speed  # noqa: E402
from test_parity import PRE_NORM, SHARED  # noqa: E402

RESULTS = ROOT / "scripts" / "results" / "cpu.json"


def parity_rows(folder: Path) -> list[dict[str, Any]]:
    """Largest deviation from fairseq over 50 updates, of each of the four models of the test."""
    rows = []
    corpus = parity.write_corpus(folder)
    for norm, norm_name in (({}, "post-norm"), (PRE_NORM, "pre-norm")):
        for shared, name in (({}, "separate"), (SHARED, "shared")):
            native, ours = (
                parity.train(parity.command_line(corpus, systems, **norm, **shared), 50)
                for systems in (parity.NATIVE, parity.LS)
            )
            found = parity.largest_deviation(ours, native)
            rows.append({"case": f"parity/{norm_name}/{name}", **found._asdict()})
    return rows


def speed_rows(folder: Path) -> list[dict[str, Any]]:
    """Our time of a step over fairseq's at two batch sizes, one thread."""
    folder = speed.write_wmt_like(folder)
    rows = []
    for max_tokens, steps in ((2000, 12), (200, 60)):
        ratios = sorted(speed.step_ratios(folder, max_tokens, steps))
        p20, p80 = ratios[len(ratios) // 5], ratios[len(ratios) * 4 // 5]
        figures = {"p20": p20, "p50": statistics.median(ratios), "p80": p80}
        rows.append({"case": f"step/{max_tokens} tokens", **figures})
    return rows


def main() -> None:
    torch.set_num_threads(1)
    common = {
        "commit": current_commit(),
        "date": datetime.date.today().isoformat(),
        "gpu": "none",
        "torch": torch.__version__,
        "system": "ours",
    }
    rows = []
    for measure in (parity_rows, speed_rows):
        with tempfile.TemporaryDirectory() as folder:
            rows += [{**common, **row} for row in measure(Path(folder))]
    write(rows, RESULTS)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
