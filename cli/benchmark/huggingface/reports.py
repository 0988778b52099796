"""The arguments of a run, and its report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from lightseq_fairseq.cli.benchmark.huggingface.cases import SYSTEMS, Case
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter


def arguments(description: str | None) -> argparse.Namespace:
    """Parses the arguments that `cases.command` passes to a program."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--case", type=Case.parse, required=True)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--began", type=float, required=True)  # time.time()
    for flag in ("--warm-up", "--updates", "--workers"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def write(given: argparse.Namespace, model: Any, memory: MemoryMeter, found: Any) -> None:
    """Writes the report: ``found``, memory, and calls that our layers did not compute."""
    import lightseq_fairseq.huggingface as lightseq

    found["peak_gib"] = memory.peak() / 2**30
    if not given.cpu:
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if SYSTEMS[given.system].accelerated:
        coverage = lightseq.report(model)
        print(coverage, flush=True)
        found["fallbacks"] = sum(coverage.fallbacks.values())
    given.report.write_text(json.dumps(found) + "\n", encoding="utf-8")
