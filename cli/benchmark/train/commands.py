"""The command and the environment of a run of ``lightseq-bench train``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightseq_fairseq.cli.benchmark.train.cases import LOG_INTERVAL, SYSTEMS, Case, Data, System
from lightseq_fairseq.cli.benchmark.train.corpus import LABELS, SOURCE, TARGET
from lightseq_fairseq.cli.benchmark.train.shapes import DROPOUT, WARM_UP, Shape
from lightseq_fairseq.cli.profiling import measured_trainer

# Variables that torch reads when it is imported. The launchers set them, too, but the benchmark's
# programs import torch before they call the launchers.
FOR_TORCH = {"OMP_WAIT_POLICY": "passive", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def command(
    case: Case, system: str, data: Path, report: Path, updates: int, gpu: bool, workers: int
) -> list[str]:
    """The command of one run: ``updates`` updates, then the profiled ones."""
    how = SYSTEMS[system]
    here = f"{__package__}.compiled" if how.compiled else measured_trainer.__name__
    words = [sys.executable]
    if case.gpus > 1:
        words += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    words += ["-m", here, "--report", str(report), "--updates", str(updates)]
    heat = max(how.heat * 4096 // max(case.max_tokens, 4096), 5) if gpu else 1
    words += ["--heat", str(heat), "--marks", str(how.marks)]
    if how.compiled:
        words += ["--case", str(case), "--system", system]
        words += ["--log-interval", str(LOG_INTERVAL)]
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
    # fairseq has no Marian: its Transformer of the same sizes, with relu, stands for it.
    arch = "transformer" if case.shape.is_marian and how.native else case.shape.arch
    flags = {
        "--arch": f"ls_{arch}",
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
    words += ["--share-all-embeddings"] * case.has_pairs
    words += norm_flags(case.shape)
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
    if case.has_pairs:
        return _flags_of_pairs(case)
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


def _flags_of_pairs(case: Case) -> dict[str, object]:
    """As `_data_flags`, of models with a source and a target."""
    shape = case.shape
    sizes: dict[str, object] = {
        "--encoder-layers": shape.encoder_layers,
        "--decoder-layers": shape.decoder_layers,
    }
    if shape.hugging_face:
        sizes |= {**width_flags(shape), "--update-freq": 1}
    if case.data is Data.NOISED:
        return {
            "--task": "denoising", **sizes, **noise_flags(case),
            "--required-batch-size-multiple": 1, "--batch-size": case.blocks,
        }  # fmt: skip
    sizes |= {"--max-tokens": case.max_tokens, "--source-lang": SOURCE, "--target-lang": TARGET}
    if case.sentences:
        sizes |= {"--required-batch-size-multiple": 1, "--batch-size": case.sentences}
    return sizes


def width_flags(shape: Shape) -> dict[str, object]:
    """fairseq's flags -> the widths of a model of Hugging Face that has a source and a target."""
    found: dict[str, object] = {"--attention-dropout": shape.attention_dropout}
    for side in ("encoder", "decoder"):
        found |= {
            f"--{side}-embed-dim": shape.width, f"--{side}-ffn-embed-dim": shape.ffn,
            f"--{side}-attention-heads": shape.heads,
        }  # fmt: skip
    return found


def norm_flags(shape: Shape) -> list[str]:
    return ["--encoder-normalize-before", "--decoder-normalize-before"] * shape.is_nllb


def noise_flags(case: Case) -> dict[str, object]:
    """Flags of the task "denoising": the noise of Lewis et al. (2019), section 3."""
    return {
        "--tokens-per-sample": case.block, "--sample-break-mode": "none", "--mask": 0.3,
        "--mask-length": "span-poisson", "--poisson-lambda": 3.5, "--replace-length": 1,
        "--mask-random": 0.1, "--rotate": 0, "--permute-sentences": 1,
    }  # fmt: skip


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
