"""The cases of ``lightseq-bench train``, the systems, and the commands that run them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from lightseq_fairseq.cli.benchmark.train.corpus import LONGEST, SOURCE, TARGET
from lightseq_fairseq.errors import UserError

LOG_INTERVAL = 50


def in_intervals(updates: int) -> int:
    """``updates`` rounded up to whole intervals of the log."""
    return -(-updates // LOG_INTERVAL) * LOG_INTERVAL


class Shape(NamedTuple):
    """A model: fairseq's name of the architecture, and its sizes."""

    arch: str
    width: int
    ffn: int
    heads: int
    encoder_layers: int = 6
    decoder_layers: int = 6
    normalize_before: bool = False
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0


DROPOUT = 0.1
_T2T_BIG = Shape("transformer_wmt_en_de_big_t2t", 1024, 4096, 16, 6, 6, True, 0.1, 0.1)
SHAPES = {
    "t2t_big": _T2T_BIG,
    "12e12d": _T2T_BIG._replace(encoder_layers=12, decoder_layers=12),
    "24e24d": _T2T_BIG._replace(encoder_layers=24, decoder_layers=24),
    "base": Shape("transformer_wmt_en_de", 512, 2048, 8),
    "iwslt": Shape("transformer_iwslt_de_en", 512, 1024, 4),
    # For machines without a GPU, to test that everything works.
    "tiny": Shape("transformer_tiny", 64, 64, 2, 2, 2),
}
PRECISIONS = ("bf16", "fp16")


class Case(NamedTuple):
    """A model, its --max-tokens, a precision, and the number of GPUs (each with its own batch)."""

    model: str
    max_tokens: int
    precision: str
    gpus: int = 1

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` names, as in ``t2t_big/4096/bf16`` or ``t2t_big/4096/bf16/x8``.

        Raises:
            UserError: there is no such case.
        """
        model, _, rest = text.partition("/")
        tokens, _, rest = rest.partition("/")
        precision, several, gpus = rest.partition("/x")
        if (
            model not in SHAPES
            or precision not in PRECISIONS
            or not tokens.isdecimal()
            or (several and not (gpus.isdecimal() and int(gpus) > 1))
        ):
            raise UserError(
                f"There is no case {text}: a case is <model>/<max-tokens>/<precision>, with a "
                f"model of {', '.join(SHAPES)} and a precision of {' or '.join(PRECISIONS)}, "
                "for example t2t_big/4096/bf16, and for eight GPUs t2t_big/4096/bf16/x8."
            )
        if int(tokens) < LONGEST:
            raise UserError(f"There is no case {text}: the longest sentence has {LONGEST} tokens.")
        return cls(model, int(tokens), precision, int(gpus or 1))

    def __str__(self) -> str:
        return "/".join(map(str, self[:3])) + f"/x{self.gpus}" * (self.gpus > 1)

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]


class System(NamedTuple):
    """How a case is trained.

    Attributes:
        warm_up: updates before the measurement. Ours captures a graph for each of about 200 batch
            sizes when it first meets the size, which may be late; the compiled baseline has one or
            two dozen sizes; fairseq only fills its memory pool.
        heat: updates under the profiler before it records, for batches of up to 4096 tokens; fewer
            for larger batches. The GPU idles and cools while a profiler starts, and then has higher
            clocks than in the measured updates.
        marks: marks between the recorded updates. Many for ours, whose updates differ in size and
            make small records.
        native: run the same command with fairseq's own model and trainer.
        apex: let fairseq use apex's Adam and LayerNorm, as it does if apex can be imported.
        cudnn: keep cuDNN attention on, as in stock fairseq.
        pack_tokens: fill batches by real tokens; all other systems train on fairseq's batches.
    """

    warm_up: int = 150
    heat: int = 5
    marks: int = 11
    native: bool = True
    apex: bool = False
    cudnn: bool = False
    pack_tokens: bool = False


SYSTEMS = {
    "ours": System(warm_up=4000, heat=150, marks=31, native=False),
    "ours_packed": System(warm_up=4000, heat=150, marks=31, native=False, pack_tokens=True),
    "fairseq_no_cudnn": System(),
    "fairseq_no_cudnn_apex": System(apex=True),
    "fairseq": System(cudnn=True),
    "torch_compile": System(warm_up=500, heat=50),
}


def why_not(system: str, case: Case) -> str | None:
    """The reason if this machine cannot run the system, or the system cannot run the case."""
    if SYSTEMS[system].apex and importlib.util.find_spec("apex") is None:
        return "apex is not installed."
    if system == "torch_compile" and case.precision != "bf16":
        return "the baseline scales no loss, it trains in bf16 only."
    if system == "torch_compile" and case.gpus > 1:
        return "the baseline trains on one GPU."
    if 0 < torch.cuda.device_count() < case.gpus:
        return f"this machine has {torch.cuda.device_count()} GPU(s)."
    return None


def command(
    case: Case, system: str, data: Path, report: Path, updates: int, gpu: bool, workers: int
) -> list[str]:
    """The command of one run: ``updates`` updates, then the profiled ones."""
    how = SYSTEMS[system]
    here = f"{__package__}.{'compiled' if system == 'torch_compile' else 'measured_trainer'}"
    words = [sys.executable]
    if case.gpus > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    words += ["-m", here, "--report", str(report), "--updates", str(updates)]
    heat = max(how.heat * 4096 // max(case.max_tokens, 4096), 5) if gpu else 1
    words += ["--heat", str(heat), "--marks", str(how.marks)]
    if system == "torch_compile":
        words += ["--case", str(case), "--data", str(data), "--workers", str(workers)]
        return words
    if not how.apex:
        words.append("--without-apex")
    last = updates + heat + how.marks
    return [*words, "--", *_training(case, how, data, report, last, gpu, workers)]


def environment(system: str) -> dict[str, str]:
    """Environment variables of the run, in addition to the benchmark's own environment."""
    # The launchers set the policy before torch is loaded, which is too late below it.
    cudnn = "1" if SYSTEMS[system].cudnn else "0"
    return {"OMP_WAIT_POLICY": "passive", "LIGHTSEQ_CUDNN_ATTENTION": cudnn}


def _training(
    case: Case, how: System, data: Path, report: Path, updates: int, gpu: bool, workers: int
) -> Sequence[str]:
    """Words for lightseq-train, which adds the same optimizer, criterion and schedule for all."""
    shape = case.shape
    flags = {
        "--arch": f"ls_{shape.arch}",
        "--encoder-layers": shape.encoder_layers,
        "--decoder-layers": shape.decoder_layers,
        "--dropout": DROPOUT,
        "--max-tokens": case.max_tokens,
        "--max-update": updates,
        "--num-workers": workers,
        "--seed": 1,
        "--distributed-world-size": case.gpus,
        "--source-lang": SOURCE,
        "--target-lang": TARGET,
        "--save-dir": report.with_suffix(".checkpoints"),
        "--log-format": "json",
        "--log-interval": LOG_INTERVAL,
    }
    words = [str(data), *(str(word) for pair in flags.items() for word in pair)]
    words += ["--share-all-embeddings", "--no-save", "--disable-validation", f"--{case.precision}"]
    words += ["--native"] * how.native + ["--pack-tokens"] * how.pack_tokens
    if case.gpus > 1 and not gpu:
        words += ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp"]
    return words + ["--cpu"] * (not gpu)
