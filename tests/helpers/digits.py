"""A toy translation task, digits, that a small model learns in seconds, and a model trained on
it."""

from __future__ import annotations

import copy
import functools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import helpers.parity as parity
import helpers.shared as shared
import torch
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_builder
from fairseq.dataclass.configs import GenerationConfig
from helpers.parity import LS, NATIVE, command_line
from torch import Tensor

from lightseq_fairseq.training.background import WRITER

SENTENCES = 100
DIGITS = (
    ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"],
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
)
TOY = {
    "encoder_embed_dim": 64,
    "encoder_ffn_embed_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "lr": 2e-3,
    "warmup_updates": 100,
    "clip_norm": 1.0,
    "weight_decay": 0.0,
    "update_freq": 1,
    "max_tokens": 1000,
}
UPDATES = 400  # BLEU 95; after 250, whether it exceeded 60 depended on the CPU


def write_digits(folder: Path) -> Path:
    """Writes German digits as source, and the same digits in English in reverse order as target.

    In "test" some digits have names that are in no dictionary.
    """
    rng = random.Random(3)
    for side, words in zip(("src", "tgt"), DIGITS, strict=True):
        (folder / f"dict.{side}.txt").write_text("".join(f"{word} 1\n" for word in words))
    for split, count in (("train", 2000), ("valid", SENTENCES), ("test", SENTENCES)):
        numbers = [[rng.randrange(10) for _ in range(rng.randint(6, 14))] for _ in range(count)]
        german, english = DIGITS
        source = [[german[i] for i in number] for number in numbers]
        if split == "test":
            source = [[w if rng.random() < 0.9 else f"{w}zig" for w in words] for words in source]
        for side, lines in (
            ("src", [" ".join(words) for words in source]),
            ("tgt", [" ".join(english[i] for i in reversed(number)) for number in numbers]),
        ):
            (folder / f"{split}.src-tgt.{side}").write_text("\n".join(lines) + "\n")
    return folder


@dataclass
class Toy:
    """The task, and two models with the same weights, trained by us.

    ``paths`` are checkpoints from the middle and from the end of training.
    """

    folder: Path
    task: Any
    ls: Any
    native: Any
    paths: list[Path]


def sentences(*lengths: int) -> Tensor:
    """Source sentences with these numbers of tokens, int64 [B, S], padded on the left."""
    padded = torch.ones(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in zip(padded, lengths, strict=True):
        row[-length:] = 4 + torch.arange(length) * 7 % 10
        row[-1] = 2
    return padded


@functools.cache
def toy() -> Toy:
    """Trained once in a run of tests, since training takes most of the time of these tests."""
    folder = shared.folder("digits")
    paths = [folder / "halfway.pt", folder / "last.pt"]
    with shared.locked(folder):
        if not paths[-1].exists():
            _train(write_digits(folder), paths)
    cfg = parity.parse(command_line(folder, LS, **TOY))
    task, model, _ = parity.build(cfg)
    model.load_state_dict(torch.load(paths[-1], weights_only=False)["model"], strict=True)
    native = task.build_model(parity.parse(command_line(folder, NATIVE, **TOY)).model)
    native.load_state_dict(model.state_dict(), strict=True)
    return Toy(folder, task, model.eval(), native.eval(), paths)


def _train(folder: Path, paths: list[Path]) -> None:
    cfg = parity.parse(command_line(folder, LS, **TOY))
    task, model, criterion = parity.build(cfg)
    trainer = parity.Trainer(cfg, task, model, criterion)
    batches = parity.batches(trainer, cfg)
    for path in paths:
        for _ in range(UPDATES // len(paths)):
            trainer.train_step(next(batches))
        trainer.consolidate_optimizer()
        trainer.save_checkpoint(str(path), {})
        WRITER.finish()  # files are written in a thread


@functools.cache
def exact() -> Toy:
    """The same in float64: in float32, roundings, which depend on the CPU, decide between
    hypotheses of equal scores."""
    ls, native = (copy.deepcopy(model).double() for model in (toy().ls, toy().native))
    return replace(toy(), ls=ls, native=native)


def trained_folder(place: Path) -> Path:
    """The model and a test set as ``lightseq-bench`` reads them, in the folder of all models."""
    folder = place / "trained"
    folder.mkdir()
    shutil.copy(toy().paths[-1], folder / "checkpoint.pt")
    for side, language in (("src", "en"), ("tgt", "de")):
        words = toy().folder / f"dict.{side}.txt"
        for name in (side, language):  # the checkpoint has its own names of the languages
            shutil.copy(words, folder / f"dict.{name}.txt")
        dictionary, stem = Dictionary.load(str(words)), folder / f"test.en-de.{language}"
        builder = make_builder(f"{stem}.bin", "mmap", len(dictionary))
        for line in (toy().folder / f"valid.src-tgt.{side}").read_text().splitlines():
            builder.add_item(dictionary.encode_line(line, add_if_not_exist=False))
        builder.finalize(f"{stem}.idx")
    return folder


def held_out(task: Any, left_pad: bool = True) -> Iterator[dict[str, Any]]:
    """Batches of the held-out sentences."""
    task.load_dataset("valid")
    dataset = task.dataset("valid")
    dataset.left_pad_source = left_pad
    return task.get_batch_iterator(dataset, max_tokens=800).next_epoch_itr(shuffle=False)


Hypotheses = dict[int, list[dict[str, Tensor]]]


def first_held_out(task: Any, count: int) -> Iterator[dict[str, Any]]:
    """One batch of the first held-out sentences, whose lengths differ as those of all."""
    held_out(task)  # loads them
    sentences = task.dataset("valid")
    yield sentences.collater([sentences[i] for i in range(count)])


def translate(
    toy: Toy, models: list[Any], left_pad: bool = True, by: Any = None, count: int = SENTENCES,
    **generation: Any,
) -> Hypotheses:  # fmt: skip
    """All hypotheses of each held-out sentence, or of the first ``count``, by the task's generator
    or by one of class ``by``."""
    generator = toy.task.build_generator(models, GenerationConfig(**generation), seq_gen_cls=by)
    found: Hypotheses = {}
    few = count < SENTENCES
    for sample in first_held_out(toy.task, count) if few else held_out(toy.task, left_pad):
        hypotheses = toy.task.inference_step(generator, models, sample)
        found |= dict(zip(sample["id"].tolist(), hypotheses, strict=True))
    assert len(found) == count
    return found
