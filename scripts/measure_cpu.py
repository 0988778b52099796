#!/usr/bin/env python3
"""Measure on a CPU: parity in float64, time of steps and of translations, packing.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python -m scripts.measure_cpu

Writes scripts/results/cpu.json; takes a minute. PYTHONPATH is needed because functions of the tests
measure parity and the time of steps.
"""

from __future__ import annotations

import argparse
import datetime
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import helpers.cpu_speed as speed  # prepares fairseq
import helpers.parity as parity
import numpy as np
import torch
from fairseq.data import Dictionary, LanguagePairDataset, data_utils, indexed_dataset

from lightseq_fairseq.packing import Granularity
from lightseq_fairseq.result_rows import current_commit, write
from lightseq_fairseq.training.batch import PackingPairs

RESULTS = Path(__file__).resolve().parent / "results" / "cpu.json"


def parity_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the largest deviation from fairseq over 50 updates, for the test's four models."""
    rows = []
    corpus = parity.write_corpus(folder)
    for norm, norm_name in (({}, "post-norm"), (parity.PRE_NORM, "pre-norm")):
        for shared, name in (({}, "separate"), (parity.SHARED, "shared")):
            native, ours = (
                parity.train(parity.command_line(corpus, systems, **norm, **shared), 50)
                for systems in (parity.NATIVE, parity.LS)
            )
            found = parity.largest_deviation(ours, native)
            rows.append({"case": f"parity/{norm_name}/{name}", **found._asdict()})
    return rows


def speed_rows(folder: Path) -> list[dict[str, Any]]:
    """Return our time relative to fairseq's: of a step at two batch sizes, and of translating."""
    folder = speed.write_wmt_like(folder)
    found = {
        "step/2000 tokens": speed.step_ratios(folder, 2000, 12),
        "step/200 tokens": speed.step_ratios(folder, 200, 60),
        "translate/32 sentences": speed.translation_ratios(folder, 12),
    }
    rows = []
    for case, ratios in found.items():
        p20, p50, p80 = (float(np.quantile(ratios, q)) for q in (0.2, 0.5, 0.8))
        rows.append({"case": case, "p20": p20, "p50": p50, "p80": p80})
    return rows


def binarised(folder: Path, pairs: int, vocabulary: int = 40000) -> Any:
    """Return a data set of WMT-like sentence lengths (lognormal, mean 28, sigma 0.55) in files."""
    rng = np.random.default_rng(5)
    lengths = np.clip(np.rint(rng.lognormal(3.18, 0.55, pairs)), 2, 200).astype(int)
    translated = np.clip(np.rint(lengths * rng.normal(1.03, 0.15, pairs)), 2, None).astype(int)
    dictionary = Dictionary()
    sides: list[Any] = []
    for name, counts in (("src", lengths), ("tgt", translated)):
        path = str(folder / name)
        builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", vocab_size=vocabulary)
        for count in counts:
            words = torch.from_numpy(rng.integers(4, vocabulary, count + 1))
            words[-1] = dictionary.eos()
            builder.add_item(words)
        builder.finalize(f"{path}.idx")
        side = indexed_dataset.make_dataset(path, "mmap")
        sides += [side, side.sizes, dictionary]
    return LanguagePairDataset(*sides)


def packing_rows(folder: Path) -> list[dict[str, Any]]:
    """Return target tokens per second: of a worker's CPU time, and of a loader with two workers."""
    dataset = binarised(folder, 100_000)
    packing = PackingPairs(dataset, Granularity(128))
    with data_utils.numpy_seed(1):
        indices = dataset.ordered_indices()
    batches = list(dataset.batch_by_size(indices, max_tokens=4096, required_batch_size_multiple=8))
    random.Random(1).shuffle(batches)

    rows = []
    for system, make in (
        ("ours", packing.__getitems__),
        ("fairseq", lambda batch: dataset.collater([dataset[i] for i in batch])),
    ):
        rates = []
        for batch in batches[:200]:
            start = time.process_time()
            make(batch)
            rates.append(dataset.tgt_sizes[batch].sum() / (time.process_time() - start))
        p20, p50, p80 = (np.quantile(rates, q) for q in (0.2, 0.5, 0.8))
        figures = {"tokens_per_s": p50, "tokens_per_s_p20": p20, "tokens_per_s_p80": p80}
        rows.append({"case": "packing/4096 tokens", "system": system, **figures})

    for system, source, limit in (("ours", packing, None), ("fairseq", dataset, 200)):
        loader = torch.utils.data.DataLoader(
            source, batch_sampler=batches[:limit], collate_fn=source.collater, num_workers=2
        )
        samples = iter(loader)
        next(samples)  # starts the workers
        start, start_cpu = time.perf_counter(), time.process_time()
        counts = [s.ntokens if system == "ours" else s["ntokens"] for s in samples]
        figures = {
            "tokens_per_s": sum(counts) / (time.perf_counter() - start),
            "main_us_per_batch": (time.process_time() - start_cpu) * 1e6 / len(counts),
        }
        rows.append({"case": "packing/loader with 2 workers", "system": system, **figures})
    return rows


def main() -> None:
    # No options; --help must not measure.
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    torch.set_num_threads(1)
    common = {
        "commit": current_commit(),
        "date": datetime.date.today().isoformat(),
        "gpu": "none",
        "torch": torch.__version__,
        "system": "ours",
    }
    rows = []
    for measure in (parity_rows, speed_rows, packing_rows):
        with tempfile.TemporaryDirectory() as folder:
            rows += [{**common, **row} for row in measure(Path(folder))]
    write(rows, RESULTS)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
