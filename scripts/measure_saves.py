#!/usr/bin/env python3
"""Measure how many seconds of training a checkpoint costs.

    python -m scripts.measure_saves --folder /tmp/saves -- --arch ls_transformer_wmt_en_de_big_t2t

Trains on the benchmark's random corpus, which it writes to the folder, and saves every 600 updates.
The cost of a save is the time of the 51 updates from the save on, minus the time of 51 updates at
the speed of the 50 updates before it. Arguments after -- go to lightseq-train.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

WINDOW = 50  # updates; the host is at most two of them ahead of the GPU
EVERY = 12 * WINDOW  # updates between saves; enough to finish writing to the disk


def watch(starts: list[float]) -> None:
    """Append the start time of each update to ``starts``."""
    from lightseq_fairseq.training.trainer import Trainer

    step = Trainer.train_step

    def train_step(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        starts.append(time.perf_counter())
        return step(self, *arguments, **keywords)

    Trainer.train_step = train_step  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder for the corpus and the checkpoints"
    )
    parser.add_argument(
        "--saves", type=int, default=4, help="number of checkpoints to save (default: 4)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=300_000,
        help="number of sentence pairs in the corpus (default: 300000)",
    )
    parser.add_argument("words", nargs="*", help="arguments of lightseq-train, after --")
    arguments = parser.parse_args()

    from lightseq_fairseq.cli import train
    from lightseq_fairseq.cli.benchmark.train import corpus

    data = corpus.ensure(arguments.folder / "corpus", arguments.pairs)
    saves = arguments.folder / "saves"
    shutil.rmtree(saves, ignore_errors=True)
    starts: list[float] = []
    watch(starts)
    words = [
        str(data.folder), "--save-dir", str(saves), "--disable-validation",
        "--no-epoch-checkpoints", "--keep-interval-updates", "1",
        "--save-interval-updates", str(EVERY),
        "--max-update", str(EVERY * arguments.saves + WINDOW + 1), "--log-interval", "50",
        *arguments.words,
    ]  # fmt: skip
    train.main(words, standalone_mode=False)
    costs = []
    for save in range(EVERY, EVERY * arguments.saves + 1, EVERY):
        # Update save + 1 starts after the state has been copied, so the copy is in the time of
        # update `save`.
        with_save = starts[save + WINDOW] - starts[save - 1]
        without = (starts[save - 1] - starts[save - 1 - WINDOW]) * (WINDOW + 1) / WINDOW
        costs.append(with_save - without)
        print(f"save at update {save}: {without:.3f} s without it, {costs[-1]:+.3f} s with it")
    size = max(path.stat().st_size for path in saves.glob("*.pt"))
    print(f"median {statistics.median(costs):.3f} s per save of {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
