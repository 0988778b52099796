#!/usr/bin/env python3
"""Measure on one GPU what sending gradients in pieces costs an update.

    python -m scripts.measure_overlap --folder /tmp/overlap -- \\
        --arch ls_transformer_wmt_en_de_big_t2t --max-tokens 8192 --bf16

Trains on the benchmark's random corpus, in three ways by turns, each in a process of its own:

    alone   as one rank, without pieces
    pieces  as one of two ranks, whose collectives do nothing: events, flushes and launches remain
    copies  like pieces, but for each all-reduce small kernels read and write the piece once, one
            after another on the communication stream, while backward runs

Prints milliseconds per update and what each way costs over the first. Arguments after -- go to
lightseq-train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

WAYS = ("alone", "pieces", "copies")
WINDOW = 50  # updates; the host is at most two of them ahead of the GPU
CHUNK = 1 << 17  # elements that one kernel copies: so few that it needs few multiprocessors


def collective(way: str) -> Callable[..., None]:
    """What runs in place of ``torch.distributed.all_reduce``."""
    import torch

    graphs: dict[int, Any] = {}

    def all_reduce(x: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        if way != "copies" or x.dtype == torch.float64:  # float64: sums and counts
            return
        if not x.is_cuda:
            x.mul_(1)
            return
        if x.data_ptr() not in graphs:
            graph = graphs[x.data_ptr()] = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for chunk in x.split(CHUNK):
                chunk.mul_(1)
            graph.capture_end()
        graphs[x.data_ptr()].replay()

    return all_reduce


def measure(way: str, folder: Path, updates: int, words: list[str]) -> float:
    """Milliseconds per update: the median over windows of the second half of the run."""
    import torch

    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from lightseq_fairseq.cli import train
    from lightseq_fairseq.cli.benchmark.train import corpus
    from lightseq_fairseq.step.exchange import Ranks
    from lightseq_fairseq.training import captured
    from lightseq_fairseq.training.trainer import Trainer

    data = corpus.ensure(folder / "corpus", 300_000)
    starts: list[float] = []
    step = Trainer.train_step

    def train_step(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        starts.append(time.perf_counter())
        return step(self, *arguments, **keywords)

    ranks = Ranks() if way == "alone" else Ranks(2)
    words = [
        str(data.folder), "--save-dir", str(folder / "saves"), "--disable-validation", "--no-save",
        "--max-update", str(updates), "--log-interval", "50", "--distributed-world-size", "1",
        *words,
    ]  # fmt: skip
    with (
        mock.patch.object(Trainer, "train_step", train_step),
        mock.patch.object(captured, "_ranks", lambda trainer: ranks),
        mock.patch.object(torch.distributed, "all_reduce", collective(way)),
    ):
        train.main(words, standalone_mode=False)
    marks = starts[updates // 2 :: WINDOW]
    return statistics.median((b - a) / WINDOW for a, b in pairwise(marks)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the corpus")
    parser.add_argument("--turns", type=int, default=3, help="runs of each way (default: 3)")
    parser.add_argument(
        "--updates", type=int, default=3000, help="updates of a run (default: 3000)"
    )
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="arguments of lightseq-train, after --")
    arguments = parser.parse_args()
    folder, updates, words = arguments.folder, arguments.updates, arguments.words
    if updates < 4 * WINDOW:
        parser.error(f"--updates must be at least {4 * WINDOW}")
    if arguments.way:
        found = measure(arguments.way, folder, updates, words)
        arguments.report.write_text(json.dumps(found))
        return
    folder.mkdir(parents=True, exist_ok=True)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.turns):
        for way in WAYS:
            report = folder / "ms.json"
            command = [
                sys.executable, "-m", "scripts.measure_overlap", "--folder", str(folder),
                "--updates", str(updates), "--way", way, "--report", str(report), "--", *words,
            ]  # fmt: skip
            # Otherwise each process would time the algorithms of cuBLASLt itself, and may choose
            # others.
            subprocess.run(command, check=True, env={**os.environ, "LIGHTSEQ_LINEAR_SEARCH": "0"})
            times[way].append(json.loads(report.read_text()))
    for way, found in times.items():
        costs = [x / base - 1 for x, base in zip(found, times["alone"], strict=True)]
        shown = " ".join(f"{x:.3f}" for x in found)
        print(f"{way:7} {shown} ms, median cost {100 * statistics.median(costs):+.2f}%")


if __name__ == "__main__":
    main()
