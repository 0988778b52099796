"""The cases of ``lightseq-bench train``, and the systems.

Translation models train on fairseq's batches of sentence pairs, language models on blocks of
running text of one length, and RoBERTa on such blocks with masked tokens, on samples of many
lengths, or on sentences with classes. BART trains on texts and their summaries, or restores noised
blocks of text, and NLLB trains on verses.
"""

from __future__ import annotations

import importlib.util
import re
from enum import Enum
from typing import NamedTuple

import torch

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.train.corpus import LONGEST, SENTENCES, SUMMARIES, VERSES
from lightseq_fairseq.cli.benchmark.train.shapes import (
    BART,
    LANGUAGE,
    MARIAN,
    MASKED,
    NLLB,
    SHAPES,
    TRANSLATION,
    Shape,
)

LOG_INTERVAL = 50
PRECISIONS = ("bf16", "fp16", "fp8")


def in_intervals(updates: int) -> int:
    """``updates`` rounded up to whole intervals of the log."""
    return -(-updates // LOG_INTERVAL) * LOG_INTERVAL


class Data(Enum):
    """What a case trains on."""

    PAIRS = "sentence pairs"
    TEXT = "blocks of text"
    MASKED = "blocks of masked text"
    MIX = "masked samples of many lengths"
    CLASSES = "sentences with classes"
    SUMMARIES = "texts and their summaries"
    NOISED = "noised blocks of text"
    VERSES = "pairs of verses"


class Size(NamedTuple):
    """A form of the second word of a case: [word][number][x<times>].

    Attributes:
        models: that have cases of this form.
        number: what the number counts; default: its value if it is left out, 0 if it may not be.
        times: the default of <times>; 0: it may not be left out; None: there is no x<times>.
    """

    word: str
    models: list[str]
    data: Data
    number: str
    default: int = 0
    times: int | None = None


MIX = "bertmix"
SIZES = (
    Size("", TRANSLATION + MARIAN, Data.PAIRS, "max-tokens"),
    Size("", NLLB, Data.VERSES, "max-tokens"),
    Size("", LANGUAGE, Data.TEXT, "block", times=0),
    Size("", MASKED, Data.MASKED, "block", times=0),
    Size(MIX, MASKED, Data.MIX, "max-tokens", 16_384),
    Size("sentences", MASKED, Data.CLASSES, "batch"),
    Size("summaries", BART, Data.SUMMARIES, "max-tokens", 16_384),
    Size("denoising", BART, Data.NOISED, "block", times=32),
    Size("verses", NLLB, Data.VERSES, "batch", 64),
)
# Tokens of the longest sample, where neither the model nor a block limits it.
LONGEST_OF = {
    Data.PAIRS: LONGEST, Data.VERSES: VERSES.source.longest, Data.CLASSES: SENTENCES.longest + 1,
    Data.SUMMARIES: SUMMARIES.source.longest,
}  # fmt: skip


class Case(NamedTuple):
    """A model, the size of its batches, a precision, and the number of GPUs (each with its own
    batch).

    Attributes:
        max_tokens: of a batch: --max-tokens, or the tokens of its blocks.
        precision: fp8 is --bf16 --fp8.
        block: tokens of a block of text; 0 if samples have many lengths.
        sentences: of a batch for fine-tuning; 0 for all other cases.
    """

    model: str
    max_tokens: int
    precision: str
    gpus: int = 1
    block: int = 0
    sentences: int = 0

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` names, as in ``t2t_big/4096/bf16``, ``t2t_big/4096/bf16/x8``,
        ``gpt2_124m/1024x32/bf16``, ``roberta_large/bertmix/bf16``,
        ``roberta_base/sentences32/bf16`` or ``bart_large/denoising512/bf16``.

        Raises:
            UserError: there is no such case.
        """
        count = r"[1-9]\d*"
        pattern = rf"([\w.]+)/([a-z]*)({count})?(?:x({count}))?/(\w+)(?:/x({count}))?"
        found = re.fullmatch(pattern, text)
        model, word, number, times, precision, gpus = found.groups() if found else [""] * 6
        fitting = [
            size for size in SIZES
            if word == size.word and model in size.models and (number or size.default)
            and (times or size.times if size.times is not None else not times)
        ]  # fmt: skip
        if not fitting or precision not in PRECISIONS or gpus == "1":
            raise UserError(_no_case(text))
        size = fitting[0]
        counted = int(number or size.default)
        positions = SHAPES[model].positions
        longest = LONGEST_OF.get(size.data, positions)
        case = cls(model, counted, precision, int(gpus or 1))
        if size.number == "batch":
            return case._replace(max_tokens=counted * longest, sentences=counted)
        if size.number == "max-tokens" and counted < longest:
            raise UserError(
                f"The case {text} is too small: the longest sentence has {longest} tokens, so "
                "max-tokens must be at least that."
            )
        if size.number == "block":
            if 0 < positions < counted:
                raise UserError(
                    f"The case {text} is too large: {model} has {positions} positions, so a block "
                    "can have at most that many tokens."
                )
            blocks = int(times or size.times or 1)
            return case._replace(max_tokens=counted * blocks, block=counted)
        return case

    def __str__(self) -> str:
        size = self.size
        number = self.sentences or self.block or self.max_tokens
        text = size.word + ("" if number == size.default else str(number))
        if self.block and self.blocks != size.times:
            text += f"x{self.blocks}"
        return f"{self.model}/{text}/{self.precision}" + f"/x{self.gpus}" * (self.gpus > 1)

    @property
    def size(self) -> Size:
        """The form of the case's name."""
        number = "batch" if self.sentences else "block" if self.block else "max-tokens"
        return next(x for x in SIZES if self.model in x.models and x.number == number)

    @property
    def data(self) -> Data:
        return self.size.data

    @property
    def blocks(self) -> int:
        """Blocks of a batch; if samples have many lengths, samples padded to ``longest`` each."""
        return self.max_tokens // self.longest

    @property
    def longest(self) -> int:
        """Tokens of a block, or of the longest source; without pairs, positions of the model."""
        return self.block or self.shape.positions or LONGEST_OF[self.data]

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def has_pairs(self) -> bool:
        """Whether a sample has a source and a target."""
        return self.data in (Data.PAIRS, Data.VERSES, Data.SUMMARIES, Data.NOISED)

    def words(self, dictionary: int) -> int:
        """Number of word embeddings of the model; ``dictionary``: number of words of its corpus."""
        adds_mask = self.shape.is_masked or self.data is Data.NOISED  # fairseq's task does
        return dictionary + adds_mask


def _no_case(text: str) -> str:
    return (
        f"There is no case {text}: write <model>/<max-tokens>/<precision>, for example "
        "t2t_big/4096/bf16, or t2t_big/4096/bf16/x8 for eight GPUs, with a model of "
        f"{', '.join(TRANSLATION + NLLB + MARIAN)}; or <model>/<block>x<batch>/<precision>, for "
        "example "
        f"gpt2_124m/1024x32/bf16, with a model of {', '.join(LANGUAGE + MASKED)}; or "
        f"<model>/{MIX}/<precision> or <model>/sentences<batch>/<precision>, with a model "
        f"of {', '.join(MASKED)}; or <model>/summaries/<precision> or "
        f"<model>/denoising<block>/<precision>, with a model of {', '.join(BART)}; or "
        f"<model>/verses/<precision>, with a model of {', '.join(NLLB)}. Precisions are "
        f"{', '.join(PRECISIONS)}."
    )


class System(NamedTuple):
    """How a case is trained.

    Attributes:
        warm_up: updates before the measurement. Ours captures a graph for each of about 200 batch
            sizes when it first meets the size, which may be late; the compiled baseline has one or
            two dozen sizes; fairseq only fills its memory pool. See `warm_up`.
        heat: updates under the profiler before it records, for batches of up to 4096 tokens; fewer
            for larger batches. The GPU idles and cools while a profiler starts, and then has higher
            clocks than in the measured updates.
        marks: marks between the recorded updates. Many for ours, whose updates differ in size and
            make small records.
        native: run the same command with fairseq's own model and trainer.
        apex: let fairseq use apex's Adam and LayerNorm, as it does if apex can be imported.
        cudnn: keep cuDNN attention on, as in stock fairseq.
        pack_tokens: fill batches by real tokens; all other systems of translation train on
            fairseq's batches.
        compiled: a baseline of `compiled`, without fairseq's training.
        package: that must be installed.
    """

    warm_up: int = 150
    heat: int = 5
    marks: int = 11
    native: bool = True
    apex: bool = False
    cudnn: bool = False
    pack_tokens: bool = False
    compiled: bool = False
    package: str | None = None


SYSTEMS = {
    "ours": System(warm_up=4000, heat=150, marks=31, native=False),
    "ours_packed": System(warm_up=4000, heat=150, marks=31, native=False, pack_tokens=True),
    "fairseq_no_cudnn": System(),
    "fairseq_no_cudnn_apex": System(apex=True, package="apex"),
    "fairseq": System(cudnn=True),
    "torch_compile": System(warm_up=500, heat=50, compiled=True),
    "torch_compile_padded": System(compiled=True),
    "transformers": System(compiled=True, package="transformers"),
    "transformers_graphs": System(compiled=True, package="transformers"),
}


def warm_up(system: str, case: Case) -> int:
    """Updates before the measurement if the user names no number."""
    how = SYSTEMS[system]
    # Batches of one size need no more than fairseq does.
    if (case.block and not case.has_pairs) or (how.compiled and case.shape.is_masked):
        return System().warm_up
    # The samples of a batch are equally long, so ours has far fewer sizes than for pairs.
    # Batches of equally many sentences differ little, too. Updates of large models take long.
    return min(how.warm_up, 1000) if case.shape.hugging_face else how.warm_up


def why_not(system: str, case: Case) -> str | None:
    """The reason if this machine cannot run the system, or the system cannot run the case."""
    how = SYSTEMS[system]
    if case.precision == "fp8" and (how.native or how.compiled):
        return "only lightseq-train has --fp8."
    if case.precision == "fp8" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < (8, 9):
            return f"--fp8 needs compute capability 8.9, but this GPU has {major}.{minor}."
    if system == "torch_compile_padded" and case.data is not Data.MIX:
        return f"it pads samples to the longest, and only {MIX} has samples to pad."
    if how.package == "transformers" and not case.shape.hugging_face:
        return "transformers has no model of these sizes here."
    if how.compiled and case.data is Data.CLASSES:
        return "the baselines without fairseq only pre-train RoBERTa."
    if how.compiled and not how.package and case.shape.hugging_face and case.has_pairs:
        return "BART, NLLB and Marian are compared with those of Hugging Face transformers."
    if how.package and importlib.util.find_spec(how.package) is None:
        return f"{how.package} is not installed."
    if how.compiled and case.precision != "bf16":
        return "this baseline has no loss scaling, so it trains in bf16 only."
    if how.compiled and case.gpus > 1:
        return "this baseline trains on one GPU only."
    if how.pack_tokens and case.block:
        return "blocks of equal length have no pads."
    if how.pack_tokens and (case.sentences or not case.has_pairs):
        return "--pack-tokens counts the tokens of sentence pairs."
    if 0 < torch.cuda.device_count() < case.gpus:
        return f"this machine has {torch.cuda.device_count()} GPU(s)."
    return None
