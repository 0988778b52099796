"""What the examples share: their arguments, and padding of batches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainingArguments


def arguments(description: str | None, given: Sequence[str] | None, steps: int) -> Any:
    """The example's arguments; given: by default those of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="a model of Hugging Face; default: a small new one")
    parser.add_argument("--output", default="huggingface-run", help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=steps, help="updates")
    parser.add_argument("--data", help="folder with train.de and train.en, for translation")
    return parser.parse_args(given)


def settings(args: Any, learning_rate: float = 1e-3) -> dict[str, Any]:
    """Settings of ``TrainingArguments``, the same for both Trainers."""
    on_gpu = torch.cuda.is_available()
    return {
        "output_dir": args.output, "max_steps": args.steps, "learning_rate": learning_rate,
        "per_device_train_batch_size": 32, "warmup_steps": args.steps // 10,
        "logging_steps": max(args.steps // 5, 1), "save_strategy": "no", "report_to": [],
        "bf16": on_gpu, "use_cpu": not on_gpu, "seed": 1,
    }  # fmt: skip


def training_arguments(args: Any, learning_rate: float = 1e-3) -> TrainingArguments:
    return TrainingArguments(**settings(args, learning_rate))


class Padding:
    """A collator that pads each entry of the items with its own number.

    Args:
        pads: name of an entry -> the number; other entries are not sequences.
    """

    def __init__(self, **pads: int) -> None:
        self.pads = pads

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = {}
        for name in items[0]:
            values = [torch.as_tensor(item[name]) for item in items]
            if name in self.pads:
                batch[name] = pad_sequence(values, True, self.pads[name])
            else:
                batch[name] = torch.stack(values)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        steps = torch.arange(int(lengths.max()))
        batch["attention_mask"] = (steps < lengths[:, None]).long()
        return batch
