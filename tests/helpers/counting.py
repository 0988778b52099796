"""A toy text that a small language model learns in seconds: numbers as words, which increase by a
step."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers.parity as parity
import helpers.shared as shared
import torch
from fairseq import utils
from fairseq.dataclass.configs import GenerationConfig
from helpers.parity import LS, NATIVE, TEXT, command_line
from torch import Tensor

from lightseq_fairseq.training.background import WRITER

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "and"]
LIMIT = 40  # positions of the model
FLAGS: dict[str, Any] = {
    **TEXT,
    "sample_break_mode": "eos",
    "tokens_per_sample": LIMIT,
    "decoder_embed_dim": 32,
    "decoder_input_dim": 32,
    "decoder_output_dim": 32,
    "decoder_ffn_embed_dim": 64,
    "decoder_attention_heads": 4,
    "decoder_layers": 2,
    "lr": 2e-3,
    "warmup_updates": 50,
    "clip_norm": 1.0,
    "weight_decay": 0.0,
    "update_freq": 1,
    "max_tokens": 1000,
}
UPDATES = 160


def write_counting(folder: Path) -> Path:
    """Write sentences such as "three five seven nine one".

    Each sentence has a step from 1 to 3; in 10% of the places it is one larger.
    """
    rng = random.Random(5)

    def sentence() -> str:
        number, step = rng.randrange(10), rng.randint(1, 3)
        words = []
        for _ in range(rng.randint(3, 12)):
            words.append(WORDS[number])
            number = (number + step + (rng.random() < 0.1)) % 10
        return " ".join(words)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dict.txt").write_text("".join(f"{word} 1\n" for word in WORDS))
    for split, count in (("train", 1500), ("valid", 100), ("test", 40)):
        lines = [sentence() for _ in range(count)]
        if split == "test":  # some words are in no dictionary
            lines = [line.replace("four five", "four fivety") for line in lines]
        (folder / split).write_text("\n".join(lines) + "\n")
    return folder


@dataclass
class Toy:
    """The task, our model and fairseq's with the same weights, and our checkpoint at ``path``."""

    folder: Path
    task: Any
    ls: Any
    native: Any
    path: Path


@functools.cache
def toy() -> Toy:
    """Trained once in a run of tests, as that of `digits`."""
    folder = shared.folder("counting")
    path = folder / "ours.pt"
    with shared.locked(folder):
        if not path.exists():
            _train(write_counting(folder), path)
    task, model, _ = parity.build(parity.parse(command_line(folder, LS, **FLAGS)))
    model.load_state_dict(torch.load(path, weights_only=False)["model"], strict=True)
    native = task.build_model(parity.parse(command_line(folder, NATIVE, **FLAGS)).model)
    native.load_state_dict(model.state_dict(), strict=True)
    return Toy(folder, task, model.eval(), native.eval(), path)


def _train(folder: Path, path: Path) -> None:
    cfg = parity.parse(command_line(folder, LS, **FLAGS))
    task, model, criterion = parity.build(cfg)
    trainer = parity.Trainer(cfg, task, model, criterion)
    batches = parity.batches(trainer, cfg)
    for _ in range(UPDATES):
        trainer.train_step(next(batches))
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {})
    WRITER.finish()  # the file is written in a thread


def variant(**flags: Any) -> tuple[Any, Any, Any]:
    """The task, our model and fairseq's with the same weights, not trained.

    The weights are large, so that no two tokens have equal scores.
    """
    given = {**FLAGS, **flags}
    task, ours, _ = parity.build(parity.parse(command_line(toy().folder, LS, **given)))
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter).mul_(0.3))
    native = task.build_model(parity.parse(command_line(toy().folder, NATIVE, **given)).model)
    native.load_state_dict(ours.state_dict(), strict=True)
    return task, ours.eval(), native.eval()


def prompts(*lengths: int) -> list[Tensor]:
    """Prompts of the given numbers of words: int64, with the eos that fairseq's reader appends."""
    return [
        torch.tensor([*(4 + (3 * place + n * n) % 10 for n in range(length)), 2])
        for place, length in enumerate(lengths)
    ]


def sample(task: Any, given: Sequence[Tensor], device: str = "cpu") -> Any:
    """One batch of all prompts, as fairseq-interactive makes it."""
    lengths = [len(tokens) for tokens in given]
    dataset = task.build_dataset_for_inference(list(given), lengths)
    batch = dataset.collater([dataset[i] for i in range(len(given))])
    return utils.move_to_cuda(batch) if device == "cuda" else batch


def generate(
    task: Any, models: list[Any], given: Sequence[Tensor], by: Any = None, on_cpu: bool = False,
    **options: Any,
) -> dict[int, list[Any]]:  # fmt: skip
    """All hypotheses of each prompt, by the task's generator or by a generator of class ``by``."""
    generator = task.build_generator(models, GenerationConfig(**options), seq_gen_cls=by)
    device = "cpu" if on_cpu else next(models[0].parameters()).device.type
    found = task.inference_step(generator, models, sample(task, given, device))
    return dict(enumerate(found))
