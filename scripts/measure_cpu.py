#!/usr/bin/env python3
"""Measure on a CPU: parity in float64, time of steps and of translations, packing.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python -m scripts.measure_cpu

Writes scripts/results/cpu.json; takes a minute. PYTHONPATH is needed because functions of the tests
measure parity and the time of steps.
With --packing it prints the speed of packing text, in tokens per second of a core, and writes
nothing.
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
from fairseq.data import (
    Dictionary,
    LanguagePairDataset,
    MonolingualDataset,
    TokenBlockDataset,
    data_utils,
    indexed_dataset,
)
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import OmegaConf

from lightseq_fairseq.base.result_rows import current_commit, write
from lightseq_fairseq.memory.packing import Granularity
from lightseq_fairseq.training.batch import packing
from lightseq_fairseq.training.batch.pairs import PackingPairs

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


def text_file(folder: Path, tokens: int = 4_000_000, vocabulary: int = 50264) -> Any:
    """Return memory-mapped lines as long as paragraphs (lognormal, mean 88, sigma 0.6)."""
    rng = np.random.default_rng(5)
    lengths = np.clip(np.rint(rng.lognormal(4.3, 0.6, tokens // 90)), 1, None).astype(int)
    builder = indexed_dataset.make_builder(f"{folder}/train.bin", "mmap", vocab_size=vocabulary)
    for length in lengths:
        words = torch.from_numpy(rng.integers(4, vocabulary, length + 1))
        words[-1] = 2
        builder.add_item(words)
    builder.finalize(f"{folder}/train.idx")
    return indexed_dataset.make_dataset(f"{folder}/train", "mmap")


def masked_text(folder: Path, vocabulary: int, breaks: str) -> Any:
    """Return what fairseq's task ``masked_lm`` loads, in blocks of 512 tokens or lines."""
    dictionary = Dictionary()
    for word in range(vocabulary - dictionary.nspecial):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(f"{folder}/dict.txt")
    config = MaskedLMConfig(
        data=str(folder), tokens_per_sample=512, sample_break_mode=breaks, seed=1
    )
    task = MaskedLMTask.setup_task(OmegaConf.structured(config))
    task.load_dataset("train")
    return task.datasets["train"]


def text_packing_rows(folder: Path) -> list[dict[str, Any]]:
    """Return tokens per second of a core, for batches of 16384 tokens of text and masked text."""
    file, words = text_file(folder), 50264
    datasets: dict[str, Any] = {}
    for breaks, block in (("none", 1024), ("complete", 1024), ("eos", 1024)):
        blocks = TokenBlockDataset(file, file.sizes, block, 1, 2, breaks, include_targets=True)
        datasets[f"text/{breaks}"] = MonolingualDataset(
            blocks, blocks.sizes, Dictionary(), shuffle=True, targets=["future"]
        )
        datasets[f"masked text/{breaks}"] = masked_text(folder, words, breaks)
    rows = []
    for case, dataset in datasets.items():
        batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens=16384)
        random.Random(1).shuffle(batches)
        packed = packing(dataset, Granularity(512, 12288))
        for system, make, limit in (
            ("ours", packed.__getitems__, 200),
            ("fairseq", lambda batch, of=dataset: of.collater([of[i] for i in batch]), 10),
        ):
            rates = []
            for batch in batches[:limit]:
                tokens = sum(dataset.num_tokens(index) for index in batch)
                start = time.process_time()
                make(batch)
                rates.append(tokens / (time.process_time() - start))
            p20, p50, p80 = (np.quantile(rates, q) for q in (0.2, 0.5, 0.8))
            figures = {"tokens_per_s": p50, "tokens_per_s_p20": p20, "tokens_per_s_p80": p80}
            rows.append({"case": f"packing/{case}", "system": system, **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--packing", action="store_true", help="only print the speed of packing text"
    )
    torch.set_num_threads(1)
    if parser.parse_args().packing:
        with tempfile.TemporaryDirectory() as folder:
            for row in text_packing_rows(Path(folder)):
                print(f"{row['case']:28} {row['system']:8} {row['tokens_per_s'] / 1e6:8.2f} M/s")
        return
    common = {
        "commit": current_commit(),
        "date": datetime.date.today().isoformat(),
        "gpu": "none",
        "torch": torch.__version__,
        "system": "ours",
    }
    rows = []
    for measure in (parity_rows, speed_rows, packing_rows, text_packing_rows):
        with tempfile.TemporaryDirectory() as folder:
            rows += [{**common, **row} for row in measure(Path(folder))]
    write(rows, RESULTS)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
