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
from lightseq_fairseq.cli.benchmark.train.corpus import SENTENCE_PAIRS, SUMMARIES, VERSES, Sides

# Updates that are timed together: as many batches as group_by_length sorts together.
BLOCK = 50


class Work(NamedTuple):
    """What a model does.

    Attributes:
        word: before the numbers in the name of a case.
        lengths: tokens of a sentence, shortest and longest: all between are equally frequent. Or
            the lengths of pairs. None: all have the length that the case says, or are images.
        in_blocks: the case says the length.
        classes: of a sentence, of each token, or of an image.
    """

    word: str
    lengths: tuple[int, int] | Sides | None = None
    in_blocks: bool = False
    classes: int = 2

    @property
    def has_target(self) -> bool:
        """Whether its sentences are pairs of a source and a target."""
        return isinstance(self.lengths, Sides)


# Kind of a case -> what the model does. Pairs are as long as those of ``lightseq-bench train``.
WORK = {
    "sentences": Work("sentences", (10, 128)),
    "pairs": Work("pairs", (10, 70)),  # one sentence, as MNLI's: 40 tokens on average
    "tokens": Work("tokens", (10, 128), classes=9),  # as in CoNLL-2003
    "mlm": Work("mlm", in_blocks=True),
    "b": Work("b", (10, 128)),  # features, without training
    "text": Work("", in_blocks=True),
    "images": Work("", classes=1000),
    "summaries": Work("summaries", SUMMARIES),
    "translation": Work("", SENTENCE_PAIRS),
    "verses": Work("", VERSES),
}


class Case(NamedTuple):
    """A model, what it does, its batches, and whether it drops anything.

    Attributes:
        kind: a key of `WORK`.
        batch: sentences, pairs or images of a batch.
        length: tokens of each sentence; 0: they differ.
        dropout: the model's published rates.
    """

    model: str
    kind: str
    batch: int
    length: int = 0
    dropout: bool = True

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` names, as ``roberta_base/sentences32``,
        ``roberta_base/sentences32/p0``, ``gpt2/1024x32``, ``marian_big/128`` or
        ``roberta_base/b256``.

        Raises:
            UserError: there is no such case.
        """
        number = r"([1-9]\d*)"
        found = re.fullmatch(rf"(\w+)/([a-z]*)(?:{number}x)?{number}(/p0)?", text)
        name, word, length, batch, without = found.groups("") if found else [""] * 5
        name = name or text.partition("/")[0]
        if name not in MODELS:
            raise UserError(f"There is no case {text}: models are {', '.join(MODELS)}.")
        model = MODELS[name]
        forms = {(WORK[kind].word, WORK[kind].in_blocks): kind for kind in model.heads}
        kind = forms.get((word, bool(length)))
        if kind is None or (without and (kind == "b" or not model.rates)):
            raise UserError(_no_case(text, name))
        if int(length or 0) > model.positions:
            raise UserError(
                f"The case {text} is too large: {name} has {model.positions} positions, so a block "
                "can have at most that many tokens."
            )
        return cls(name, kind, int(batch), int(length or 0), not without)

    def __str__(self) -> str:
        block = f"{self.length}x" if self.length else ""
        without = "" if self.dropout else "/p0"
        return f"{self.model}/{self.work.word}{block}{self.batch}{without}"

    @property
    def work(self) -> Work:
        return WORK[self.kind]

    @property
    def trains(self) -> bool:
        return self.kind != "b"

    @property
    def has_pads(self) -> bool:
        """Whether the sentences of a batch have many lengths."""
        return self.work.lengths is not None


def _no_case(text: str, name: str) -> str:
    """Says which cases the model ``name`` has."""
    model = MODELS[name]
    kinds = [WORK[kind] for kind in model.heads if kind != "b"]
    forms = [f"{name}/{work.word}{'<block>x' * work.in_blocks}<batch>" for work in kinds]
    without = ", with /p0 at the end to train without dropout" * bool(model.rates)
    features = f", or {name}/b<batch> for features" * ("b" in model.heads)
    return f"There is no case {text}: write {', '.join(forms)}{without}{features}."


class System(NamedTuple):
    """How a case is run.

    Attributes:
        accelerated: by ``lightseq_fairseq.huggingface.accelerate``.
        trainer: with ``lightseq_fairseq.huggingface.Trainer``.
        mode: of torch.compile; None: the model is not compiled.
        grouped: a batch has sentences of similar length (``group_by_length``).
        multiple: sentences are padded to a multiple of this, so that shapes repeat; of pairs, both
            sides. All shapes are compiled before the updates that are measured.
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
    if how.grouped and not case.has_pads:
        return "all its samples have one size."
    if how.mode is not None and not torch.cuda.is_available():
        return "it is compiled for a GPU."
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed."
    return None


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
