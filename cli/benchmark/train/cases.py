"""The cases of ``lightseq-bench train``, the systems, and the commands that run them.

Translation models train on fairseq's batches of sentence pairs, language models on blocks of
running text of one length, and RoBERTa on such blocks with masked tokens, on samples of many
lengths, or on sentences with classes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.train.corpus import LABELS, LONGEST, SENTENCES, SOURCE, TARGET

LOG_INTERVAL = 50
# Variables that torch reads when it is imported. The launchers set them, too, but the benchmark's
# programs import torch before they call the launchers.
FOR_TORCH = {"OMP_WAIT_POLICY": "passive", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def in_intervals(updates: int) -> int:
    """``updates`` rounded up to whole intervals of the log."""
    return -(-updates // LOG_INTERVAL) * LOG_INTERVAL


class Shape(NamedTuple):
    """A model: fairseq's name of the architecture, and its sizes.

    Attributes:
        encoder_layers: 0 for a language model.
        decoder_layers: 0 for RoBERTa, which has a LayerNorm after its embedding.
        activation: of the feed-forward sublayers, by its name in torch.nn.functional.
        tied: the output projection is the embedding.
        positions: size of the table of learned positions; 0: positions are sinusoidal.
    """

    arch: str
    width: int
    ffn: int
    heads: int
    encoder_layers: int = 6
    decoder_layers: int = 6
    normalize_before: bool = False
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation: str = "relu"
    tied: bool = True
    positions: int = 0

    @property
    def is_language_model(self) -> bool:
        return self.encoder_layers == 0

    @property
    def is_masked(self) -> bool:
        """Whether the model is RoBERTa, which restores masked tokens."""
        return self.decoder_layers == 0

    def words(self, dictionary: int) -> int:
        """Number of word embeddings of the model; ``dictionary``: number of words of its corpus."""
        return dictionary + self.is_masked  # fairseq's task adds <mask>


DROPOUT = 0.1
WARM_UP = 4000  # updates, in all systems
UNUSED_POSITIONS = 2  # first rows of fairseq's table of positions, which no token uses
_T2T_BIG = Shape("transformer_wmt_en_de_big_t2t", 1024, 4096, 16, 6, 6, True, 0.1, 0.1)
_GPT2 = Shape("transformer_lm_gpt2_small", 1024, 4096, 16, 0, 24, True, 0.1, 0.0, "gelu", False)
_ROBERTA = Shape("roberta_base", 768, 3072, 12, 12, 0, False, 0.1, 0.0, "gelu", positions=512)
SHAPES = {
    "t2t_big": _T2T_BIG,
    "12e12d": _T2T_BIG._replace(encoder_layers=12, decoder_layers=12),
    "24e24d": _T2T_BIG._replace(encoder_layers=24, decoder_layers=24),
    "base": Shape("transformer_wmt_en_de", 512, 2048, 8),
    "iwslt": Shape("transformer_iwslt_de_en", 512, 1024, 4),
    # For machines without a GPU, to test that everything works.
    "tiny": Shape("transformer_tiny", 64, 64, 2, 2, 2),
    # GPT-2's smallest model. fairseq's "gpt2" archs are larger and have sinusoidal positions.
    "gpt2_124m": Shape("transformer_lm_gpt3_small", 768, 3072, 12, 0, 12, True, 0.1, 0.0, "gelu",
                       positions=1024),
    "lm_base": Shape("transformer_lm", 512, 2048, 8, 0, 6, tied=False),
    "gpt2_small": _GPT2,
    # The counterpart of "tiny".
    "lm_tiny": _GPT2._replace(
        arch="transformer_lm_gpt2_tiny", width=64, ffn=64, heads=1, decoder_layers=2
    ),
    "roberta_base": _ROBERTA,
    "roberta_large": _ROBERTA._replace(
        arch="roberta_large", width=1024, ffn=4096, heads=16, encoder_layers=24
    ),
    # The counterpart of "tiny"; fairseq has no such arch.
    "roberta_tiny": _ROBERTA._replace(width=64, ffn=64, heads=2, encoder_layers=2),
}  # fmt: skip
MASKED = [model for model, shape in SHAPES.items() if shape.is_masked]
LANGUAGE = [model for model, shape in SHAPES.items() if shape.is_language_model]
TRANSLATION = [model for model in SHAPES if model not in MASKED + LANGUAGE]
PRECISIONS = ("bf16", "fp16", "fp8")


class Data(Enum):
    """What a case trains on."""

    PAIRS = "sentence pairs"
    TEXT = "blocks of text"
    MASKED = "blocks of masked text"
    MIX = "masked samples of many lengths"
    CLASSES = "sentences with classes"


MIX, MIX_TOKENS, CLASSES = "bertmix", 16_384, "sentences"


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
        ``gpt2_124m/1024x32/bf16``, ``roberta_large/bertmix/bf16`` or
        ``roberta_base/sentences32/bf16``.

        Raises:
            UserError: there is no such case.
        """
        size_of_batch = rf"([1-9]\d*)(?:x([1-9]\d*))?|({MIX})([1-9]\d*)?|{CLASSES}([1-9]\d*)"
        found = re.fullmatch(rf"(\w+)/(?:{size_of_batch})/(\w+)(?:/x([1-9]\d*))?", text)
        words = found.groups() if found else [""] * 8
        model, size, blocks, mix, tokens, sentences, precision, gpus = words
        if (
            model not in SHAPES
            or (model in TRANSLATION) != (size is not None and blocks is None)
            or (size is None and model not in MASKED)
            or precision not in PRECISIONS
            or gpus == "1"
        ):
            raise UserError(
                f"There is no case {text}: write <model>/<max-tokens>/<precision>, for example "
                "t2t_big/4096/bf16, or t2t_big/4096/bf16/x8 for eight GPUs, with a model of "
                f"{', '.join(TRANSLATION)}; or <model>/<block>x<batch>/<precision>, for example "
                f"gpt2_124m/1024x32/bf16, with a model of {', '.join(LANGUAGE + MASKED)}; or "
                f"<model>/{MIX}/<precision> or <model>/{CLASSES}<batch>/<precision>, with a model "
                f"of {', '.join(MASKED)}. Precisions are "
                f"{', '.join(PRECISIONS)}."
            )
        if sentences:
            most = int(sentences) * (SENTENCES.longest + 1)
            return cls(model, most, precision, int(gpus or 1), 0, int(sentences))
        positions = SHAPES[model].positions
        longest = positions if mix else LONGEST
        most = int(tokens or MIX_TOKENS) if mix else int(size)
        if blocks is None and most < longest:
            raise UserError(
                f"The case {text} is too small: the longest sentence has {longest} tokens, so "
                "max-tokens must be at least that."
            )
        if blocks is not None and 0 < positions < most:
            raise UserError(
                f"The case {text} is too large: {model} has {positions} positions, so a block can "
                "have at most that many tokens."
            )
        block = most if blocks else 0
        return cls(model, most * int(blocks or 1), precision, int(gpus or 1), block)

    def __str__(self) -> str:
        size = f"{self.block}x{self.blocks}" if self.block else str(self.max_tokens)
        if self.data is Data.MIX:
            size = MIX if self.max_tokens == MIX_TOKENS else f"{MIX}{self.max_tokens}"
        if self.sentences:
            size = f"{CLASSES}{self.sentences}"
        return f"{self.model}/{size}/{self.precision}" + f"/x{self.gpus}" * (self.gpus > 1)

    @property
    def data(self) -> Data:
        if self.sentences:
            return Data.CLASSES
        if self.shape.is_masked:
            return Data.MASKED if self.block else Data.MIX
        return Data.TEXT if self.block else Data.PAIRS

    @property
    def blocks(self) -> int:
        """Blocks of a batch; if samples have many lengths, samples padded to ``longest`` each."""
        return self.max_tokens // self.longest

    @property
    def longest(self) -> int:
        """Tokens of a block, or else positions of the model."""
        return self.block or self.shape.positions

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]


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
}


def warm_up(system: str, case: Case) -> int:
    """Updates before the measurement if the user names no number."""
    how = SYSTEMS[system]
    # Batches of one size need no more than fairseq does.
    if case.block or (how.compiled and case.shape.is_masked):
        return System().warm_up
    # The samples of a batch are equally long, so ours has far fewer sizes than for pairs.
    # Batches of equally many sentences differ little, too.
    return min(how.warm_up, 1000) if case.shape.is_masked else how.warm_up


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
    if system == "transformers" and not case.shape.is_masked:
        return "transformers runs only RoBERTa here."
    if how.compiled and case.sentences:
        return "the baselines without fairseq only pre-train RoBERTa."
    if how.package and importlib.util.find_spec(how.package) is None:
        return f"{how.package} is not installed."
    if how.compiled and case.precision != "bf16":
        return "this baseline has no loss scaling, so it trains in bf16 only."
    if how.compiled and case.gpus > 1:
        return "this baseline trains on one GPU only."
    if how.pack_tokens and case.block:
        return "blocks of equal length have no pads."
    if how.pack_tokens and case.data is not Data.PAIRS:
        return "--pack-tokens counts the tokens of sentence pairs."
    if 0 < torch.cuda.device_count() < case.gpus:
        return f"this machine has {torch.cuda.device_count()} GPU(s)."
    return None


def command(
    case: Case, system: str, data: Path, report: Path, updates: int, gpu: bool, workers: int
) -> list[str]:
    """The command of one run: ``updates`` updates, then the profiled ones."""
    how = SYSTEMS[system]
    here = f"{__package__}.{'compiled' if how.compiled else 'measured_trainer'}"
    words = [sys.executable]
    if case.gpus > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    words += ["-m", here, "--report", str(report), "--updates", str(updates)]
    heat = max(how.heat * 4096 // max(case.max_tokens, 4096), 5) if gpu else 1
    words += ["--heat", str(heat), "--marks", str(how.marks)]
    if how.compiled:
        words += ["--case", str(case), "--system", system]
        return [*words, "--data", str(data), "--workers", str(workers)]
    if not how.apex:
        words.append("--without-apex")
    last = updates + heat + how.marks
    return [*words, "--", *_training(case, how, data, report, last, gpu, workers)]


def environment(system: str) -> dict[str, str]:
    """Environment variables of the run, in addition to the benchmark's own environment."""
    cudnn = "1" if SYSTEMS[system].cudnn else "0"
    return {**FOR_TORCH, "LIGHTSEQ_CUDNN_ATTENTION": cudnn}


def _training(
    case: Case, how: System, data: Path, report: Path, updates: int, gpu: bool, workers: int
) -> Sequence[str]:
    """Arguments of lightseq-train, which adds the same optimizer, criterion, schedule for all."""
    flags = {
        "--arch": f"ls_{case.shape.arch}",
        "--dropout": DROPOUT,
        **_data_flags(case),
        "--max-update": updates,
        "--warmup-updates": WARM_UP,
        "--num-workers": workers,
        "--seed": 1,
        "--distributed-world-size": case.gpus,
        "--save-dir": report.with_suffix(".checkpoints"),
        "--log-format": "json",
        "--log-interval": LOG_INTERVAL,
    }
    words = [str(data), *(str(word) for pair in flags.items() for word in pair)]
    words += ["--share-all-embeddings"] * (case.data is Data.PAIRS)
    words += ["--no-save", "--disable-validation"]
    words += ["--bf16", "--fp8"] if case.precision == "fp8" else [f"--{case.precision}"]
    words += ["--native"] * how.native + ["--pack-tokens"] * how.pack_tokens
    if case.gpus > 1 and not how.native:
        words += ["--zero-sharding", "os"]  # the fastest: see docs/several-gpus.md
    if case.gpus > 1 and not gpu:
        words += ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    return words + ["--cpu"] * (not gpu)


def _data_flags(case: Case) -> dict[str, object]:
    """fairseq's flags for the task, the sizes of the model, and the batches."""
    shape = case.shape
    if case.data is Data.PAIRS:
        return {
            "--encoder-layers": shape.encoder_layers,
            "--decoder-layers": shape.decoder_layers,
            "--max-tokens": case.max_tokens,
            "--source-lang": SOURCE,
            "--target-lang": TARGET,
        }
    # Otherwise fairseq makes batches of fewer samples if the number is no multiple of 8.
    by_samples = {
        "--required-batch-size-multiple": 1,
        "--batch-size": case.sentences or case.blocks,
    }
    if case.data is Data.CLASSES:
        task = {"--task": "sentence_prediction", "--num-classes": LABELS}
        return {**task, **roberta_flags(shape), **by_samples}
    samples = {"--sample-break-mode": "none", "--tokens-per-sample": case.block, **by_samples}
    if case.data is Data.MIX:  # each sample is a line; fairseq sorts samples by length
        samples = {
            "--sample-break-mode": "eos",
            "--tokens-per-sample": case.longest,
            "--max-tokens": case.max_tokens,
        }
    if shape.is_masked:
        return {"--task": "masked_lm", **roberta_flags(shape), **samples}
    return {
        "--task": "language_modeling",
        "--decoder-layers": shape.decoder_layers,
        "--attention-dropout": shape.attention_dropout,
        "--max-target-positions": shape.positions or case.block,
        **samples,
    }


def roberta_flags(shape: Shape) -> dict[str, object]:
    """fairseq's flags -> the sizes of a RoBERTa."""
    return {
        "--encoder-layers": shape.encoder_layers,
        "--encoder-embed-dim": shape.width,
        "--encoder-ffn-embed-dim": shape.ffn,
        "--encoder-attention-heads": shape.heads,
        "--attention-dropout": shape.attention_dropout,
        "--max-positions": shape.positions,
    }
