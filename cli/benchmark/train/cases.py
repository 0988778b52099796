"""What is trained, by which systems, and the commands that do it."""

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
    """So many updates or more: whole intervals of the log."""
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
    # What a machine without a GPU can run, to see that everything works.
    "tiny": Shape("transformer_tiny", 64, 64, 2, 2, 2),
}
PRECISIONS = ("bf16", "fp16")


class Case(NamedTuple):
    """A model, the tokens of its batches at most, a precision, and GPUs with a batch each."""

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
        warm_up: updates before anything is measured. Ours captures a graph for each of some two
            hundred sizes of batch when it meets it, the last of them late; the compiled baseline
            has a dozen or two; fairseq only fills its memory pool.
        heat: updates of up to 4096 tokens under the profiler before its record, fewer the larger
            they are. The GPU idles while a profiler starts, and cooled down it has higher clocks
            than in the updates that are measured.
        marks: between the updates of the record. Many for ours, whose updates differ in size and
            make small records.
        native: fairseq's own parts, by the same command.
        apex: fairseq takes apex's Adam and LayerNorm, as it does wherever apex imports.
        cudnn: cuDNN attention is left on, as fairseq comes.
        pack_tokens: batches are filled by real tokens; all others train on fairseq's.
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
    """A sentence if this machine cannot run the system, or the system not the case."""
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
    """The command of one run: ``updates`` updates, then those that are profiled."""
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
    """What the run finds in its environment besides the bench's own."""
    # The launchers set the policy before torch is loaded, which is too late below it.
    cudnn = "1" if SYSTEMS[system].cudnn else "0"
    return {"OMP_WAIT_POLICY": "passive", "LIGHTSEQ_CUDNN_ATTENTION": cudnn}


def _training(
    case: Case, how: System, data: Path, report: Path, updates: int, gpu: bool, workers: int
) -> Sequence[str]:
    """Words for lightseq-train, which adds optimizer, criterion and schedule for all alike."""
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
