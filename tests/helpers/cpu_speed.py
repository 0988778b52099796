"""Our time on a CPU relative to fairseq's, for training steps and translations."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import helpers.parity as parity
import torch
from fairseq.dataclass.configs import GenerationConfig
from helpers.parity import LS, NATIVE, command_line

VOCABULARY, EOS = 4000, 2
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
    """Writes sentences as long as WMT's (lognormal, mean 28, sigma 0.55), with words by Zipf's
    law."""
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


def step_ratios(folder: Path, max_tokens: int, steps: int) -> list[float]:
    """Our seconds per step divided by fairseq's. The systems alternate, so that both see the same
    load."""
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
    # The first step allocates memory, so it is not measured.
    return [ls / native for ls, native in zip(*seconds.values(), strict=True)][1:]


def translation_ratios(folder: Path, passes: int) -> list[float]:
    """Our seconds divided by fairseq's for 32 sentences, beam 5, 30 tokens each; one ratio per
    pass."""
    runs: dict[str, Any] = {}
    torch.manual_seed(3)
    source = torch.randint(4, VOCABULARY, (32, 28))
    source[:, -1] = EOS
    sample = {
        "id": torch.arange(len(source)),
        "net_input": {
            "src_tokens": source,
            "src_lengths": torch.full((len(source),), source.shape[1]),
        },
    }
    how = GenerationConfig(beam=5, max_len_a=0, max_len_b=29, min_len=29)
    for name, systems in (("ls", LS), ("native", NATIVE)):
        cfg = parity.parse(command_line(folder, systems, **SETTING, max_tokens=2000))
        task, model, _ = parity.build(cfg)
        with torch.no_grad():
            # some may end at once, which both systems allow
            model.decoder.embed_tokens.weight[EOS] = 0
        runs[name] = task, model.eval(), task.build_generator([model], how)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    lengths: dict[str, list[int]] = {}
    for _ in range(passes + 1):
        for name, (task, model, generator) in runs.items():
            start = time.process_time()
            found = task.inference_step(generator, [model], sample)
            seconds[name].append(time.process_time() - start)
            lengths[name] = [len(best["tokens"]) for best, *_ in found]
    assert lengths["ls"] == lengths["native"] == [30] * 32
    return [ls / native for ls, native in zip(*seconds.values(), strict=True)][1:]
