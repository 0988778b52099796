"""On a CPU our training step takes no longer than 1.25 times fairseq's on the same batches."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from parity import LS, NATIVE, command_line

VOCABULARY = 4000
SETTING = {
    "encoder_embed_dim": 256,
    "encoder_ffn_embed_dim": 1024,
    "encoder_attention_heads": 4,
    "encoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_layers": 3,
    "share_all_embeddings": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "update_freq": 1,
}


def write_wmt_like(folder: Path) -> Path:
    """Sentences as long as WMT's (lognormal, mean 28, sigma 0.55), words by Zipf's law."""
    rng = random.Random(5)
    words = [f"w{i}" for i in range(VOCABULARY - 4)]
    weights = [1 / (rank + 10) for rank in range(len(words))]
    for side in ("src", "tgt"):
        (folder / f"dict.{side}.txt").write_text("".join(f"{word} 1\n" for word in words))
        rng.seed(5)
        lines = []
        for _ in range(600):
            length = min(max(round(rng.lognormvariate(3.18, 0.55)), 2), 100)
            lines.append(" ".join(rng.choices(words, weights, k=length)))
        (folder / f"train.src-tgt.{side}").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    # What is measured is the work, in seconds of this process, whatever else the machine does.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def step_ratios(folder: Path, max_tokens: int, steps: int) -> list[float]:
    """Our seconds a step over fairseq's, step by step, so that both saw the same machine."""
    runs: dict[str, Any] = {}
    for name, systems, trainer_class in (
        ("ls", LS, parity.Trainer),
        ("native", NATIVE, parity.NativeTrainer),
    ):
        cfg = parity.parse(command_line(folder, systems, **SETTING, max_tokens=max_tokens))
        trainer = trainer_class(cfg, *parity.build(cfg))
        runs[name] = (trainer, parity.batches(trainer, cfg))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in runs}
    for _ in range(steps + 1):
        for name, (trainer, batches) in runs.items():
            samples = next(batches)
            (batch,) = samples
            counts = batch if isinstance(batch, dict) else vars(batch)
            sizes[name].append((counts["nsentences"], counts["ntokens"]))
            start = time.process_time()
            trainer.train_step(samples)
            seconds[name].append(time.process_time() - start)
    assert sizes["ls"] == sizes["native"]
    # The first step allocates.
    return [ls / native for ls, native in zip(*seconds.values(), strict=True)][1:]


def test_step_time(tmp_path: Path, one_thread: None) -> None:
    ratios = step_ratios(write_wmt_like(tmp_path), max_tokens=2000, steps=4)
    assert statistics.median(ratios) <= 1.25, ratios
