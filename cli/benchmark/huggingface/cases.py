"""The cases of ``lightseq-bench huggingface``, the systems, and the commands that run them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.huggingface.models import MODELS
from lightseq_fairseq.cli.benchmark.train.commands import FOR_TORCH

_RARE = 1e-6  # share of batches below which no shape is prepared for them
# Updates that are timed together: as many batches as group_by_length sorts together.
BLOCK = 50
DROPOUT = 0.1


class Work(NamedTuple):
    """What a model does.

    Attributes:
        head: the end of the name of its class.
        shortest, longest: tokens of a sentence, between which all lengths are equally frequent; 0:
            all have the length that the case says.
    """

    head: str
    shortest: int = 10
    longest: int = 128


# Kind of a case -> what the model does.
WORK = {
    "sentences": Work("ForSequenceClassification"),
    "pairs": Work("ForSequenceClassification", longest=70),  # as MNLI's: 40 tokens on average
    "tokens": Work("ForTokenClassification"),
    "mlm": Work("ForMaskedLM", 0, 0),
    "b": Work("Model"),  # features, without training
}


class Case(NamedTuple):
    """A model, what it does, its batches, and the rate of dropout.

    Attributes:
        kind: a key of `WORK`.
        batch: sentences of a batch.
        length: tokens of each sentence; 0: they differ.
        rate: of all dropout.
    """

    model: str
    kind: str
    batch: int
    length: int = 0
    rate: float = DROPOUT

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` names, as ``roberta_base/sentences32``,
        ``roberta_base/sentences32/p0``, ``bert_base/mlm512x64`` or ``roberta_base/b256``.

        Raises:
            UserError: there is no such case.
        """
        number = r"([1-9]\d*)"
        found = re.fullmatch(
            rf"(\w+)/(?:(sentences|pairs|tokens|b)|mlm{number}x){number}(/p0)?", text
        )
        model, kind, length, batch, without = found.groups() if found else [""] * 5
        if model not in MODELS or (kind == "b" and without):
            raise UserError(
                f"There is no case {text}: write <model>/sentences<batch>, <model>/pairs<batch>, "
                "<model>/tokens<batch> or <model>/mlm<block>x<batch>, for example "
                "roberta_base/sentences32, with /p0 to train without dropout, or <model>/b<batch> "
                f"for features; models are {', '.join(MODELS)}."
            )
        case = cls(model, kind or "mlm", int(batch), int(length or 0), 0.0 if without else DROPOUT)
        if case.longest > MODELS[model].positions:
            raise UserError(
                f"The case {text} is too large: {model} has {MODELS[model].positions} positions, "
                "so a block can have at most that many tokens."
            )
        return case

    def __str__(self) -> str:
        block = f"{self.length}x" if self.length else ""
        return f"{self.model}/{self.kind}{block}{self.batch}{'' if self.rate else '/p0'}"

    @property
    def work(self) -> Work:
        return WORK[self.kind]

    @property
    def trains(self) -> bool:
        return self.kind != "b"

    @property
    def longest(self) -> int:
        """Tokens of the longest sentence."""
        return self.length or self.work.longest


class System(NamedTuple):
    """How a case is run.

    Attributes:
        accelerated: by ``lightseq_fairseq.huggingface.accelerate``.
        trainer: with ``lightseq_fairseq.huggingface.Trainer``.
        mode: of torch.compile; None: the model is not compiled.
        grouped: a batch has sentences of similar length (``group_by_length``).
        multiple: sentences are padded to a multiple of this, so that shapes repeat. All shapes are
            compiled before the updates that are measured.
    """

    accelerated: bool = False
    trainer: bool = False
    mode: str | None = None
    grouped: bool = False
    multiple: int = 1


_COMPILED = System(mode="default", multiple=64)
_GRAPHS = System(mode="reduce-overhead", multiple=64)
SYSTEMS = {
    "ours": System(accelerated=True),
    "ours_trainer": System(accelerated=True, trainer=True),
    "transformers": System(),
    "transformers_grouped": System(grouped=True),
    "transformers_compiled": _COMPILED,
    "transformers_compiled_grouped": _COMPILED._replace(grouped=True, multiple=32),
    "transformers_graphs": _GRAPHS,
    "transformers_graphs_grouped": _GRAPHS._replace(grouped=True, multiple=32),
}


def why_not(system: str, case: Case) -> str | None:
    """The reason if the system cannot run the case on this machine, else None."""
    how = SYSTEMS[system]
    if how.trainer and not case.trains:
        return "features need no Trainer."
    if how.grouped and case.length:
        return "its sentences have one length."
    if how.mode is not None and not torch.cuda.is_available():
        return "it is compiled for a GPU."
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed."
    return None


def shapes(case: Case, system: str) -> list[int]:
    """The lengths to which a system pads sentences, longest first; none if it does not round.

    In random batches, one sentence of many is always among the longest.
    """
    how, shortest = SYSTEMS[system], case.length or case.work.shortest
    if how.multiple == 1:
        return []
    least = padded(shortest, how.multiple)
    lengths = range(padded(case.longest, how.multiple), least - 1, -how.multiple)

    def share(length: int) -> float:
        """Of random batches with sentences up to this length."""
        return ((length + 1 - shortest) / (case.longest + 1 - shortest)) ** case.batch

    return [length for length in lengths if how.grouped or share(length) > _RARE]


def padded(length: int, multiple: int) -> int:
    return length + -length % multiple


def in_blocks(updates: int) -> int:
    """``updates``, rounded up to whole blocks."""
    return updates + -updates % BLOCK


def command(
    case: Case, system: str, report: Path, warm_up: int, updates: int, workers: int, gpu: bool
) -> list[str]:
    """The command of one run, with ``updates`` updates or batches after the warm-up."""
    module = "training" if case.trains else "encoding"
    words = [sys.executable, "-m", f"{__package__}.{module}", "--report", str(report)]
    words += ["--case", str(case), "--system", system, "--began", str(time.time())]
    words += ["--warm-up", str(warm_up), "--updates", str(updates), "--workers", str(workers)]
    return words + ["--cpu"] * (not gpu)


def environment() -> dict[str, str]:
    """Environment variables of the run, in addition to the benchmark's own environment.

    A run sees one GPU: on several ones, transformers' Trainer would divide each batch.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return {**FOR_TORCH, "CUDA_VISIBLE_DEVICES": first, "HF_HUB_OFFLINE": "1"}
