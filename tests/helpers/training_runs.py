"""Whole training runs of a tiny Transformer in this process, by fairseq's own main()."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import parity  # isort: skip  (prepares fairseq)
from helpers.parity import TEXT as _TEXT, parse, write_corpus  # isort: skip

from fairseq import checkpoint_utils
from fairseq import trainer as native_trainer
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq_cli import train

from lightseq_fairseq.cli.checks import own_flags
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.step.training_step import TrainingStep
from lightseq_fairseq.training import process
from lightseq_fairseq.training.resuming import ResumableTrainer
from lightseq_fairseq.training.trainer import Trainer

LS = {
    "arch": "ls_transformer_tiny",
    "optimizer": "ls_adam",
    "criterion": "ls_label_smoothed_cross_entropy",
}
NATIVE = {name: value.removeprefix("ls_") for name, value in LS.items()}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": True, "fp16_init_scale": 128},
    "bf16": {"bf16": True},
}
ON_GPU = {**LS, "cpu": None, "encoder_embed_dim": 64, "encoder_attention_heads": 2}

_FLAGS: dict[str, Any] = {
    "task": "translation",
    "dataset-impl": "raw",
    "source-lang": "src",
    "target-lang": "tgt",
    "encoder-embed-dim": 16,
    "encoder-ffn-embed-dim": 32,
    "encoder-layers": 1,
    "decoder-layers": 1,
    "share-decoder-input-output-embed": True,
    "dropout": 0.2,
    "attention-dropout": 0.1,
    "activation-dropout": 0.1,
    "label-smoothing": 0.1,
    "adam-betas": "(0.9, 0.98)",
    "weight-decay": 0.01,
    "clip-norm": 1.0,
    "lr": 5e-3,
    "lr-scheduler": "inverse_sqrt",
    "warmup-updates": 4,
    "max-tokens": 96,
    "seed": 3,
    "num-workers": 0,
    "log-format": "none",
    "max-update": 12,
    "cpu": True,
    "disable-validation": True,
}

# BART in translation; write_corpus writes its data.
BART = {**LS, "arch": "ls_bart_base", "encoder_attention_heads": 2, "decoder_attention_heads": 2}
# Marian; its logits have a bias, and its feed-forward layers silu.
MARIAN = {**BART, "arch": "ls_marian_base"}

# BART in pre-training; write_text writes its data.
NOISED: dict[str, Any] = {
    **BART, "task": "denoising", "criterion": "ls_cross_entropy", "label_smoothing": None,
    "source_lang": None, "target_lang": None, "tokens_per_sample": 16, "mask": 0.3,
    "mask_length": "span-poisson", "replace_length": 1, "mask_random": 0.1, "rotate": 0,
}  # fmt: skip

# A language model; its data are written by helpers.parity.write_text.
TEXT: dict[str, Any] = {
    **_TEXT,
    "arch": "ls_transformer_lm",
    "optimizer": "ls_adam",
    "criterion": "ls_cross_entropy",
    "sample_break_mode": "complete",
    "decoder_attention_heads": 2,
    "max_tokens": 48,
}

# RoBERTa in pre-training and in fine-tuning; write_text and write_classes write its data.
_ROBERTA: dict[str, Any] = {
    "arch": "ls_roberta_base",
    "optimizer": "ls_adam",
    "share_decoder_input_output_embed": None,
    "encoder_attention_heads": 2,
    "attention_dropout": 0.1,
    "num_workers": 1,
    # Where a test replaces the workers, fairseq's buffers load in threads of this process. Two of
    # them at the same time would draw masks from the same global NumPy generator, and others on a
    # busy machine.
    "data_buffer_size": 0,
}
MASKED: dict[str, Any] = {
    **parity.MASKED,
    **_ROBERTA,
    "criterion": "ls_masked_lm",
    "sample_break_mode": "complete",
    "max_positions": 32,
}
CLASSES: dict[str, Any] = {
    **parity.CLASSES,
    **_ROBERTA,
    "criterion": "ls_sentence_prediction",
    "pooler_dropout": 0.1,
}
BART_CLASSES = {
    **CLASSES, "arch": "ls_bart_base", "add_prev_output_tokens": True, "decoder_layers": 1,
    "decoder_attention_heads": 2,
}  # fmt: skip


def corpus(folder: Path) -> Path:
    """Data whose epochs have 7 updates."""
    return write_corpus(folder, pairs=64)


def command_line(data: Path, save_dir: Path, flags: dict[str, Any]) -> list[str]:
    argv = [str(data), "--save-dir", str(save_dir)]
    for name, value in {**_FLAGS, **flags}.items():
        if value is True:
            argv.append(f"--{name}")
        elif value is not None:
            argv += [f"--{name}", str(value)]
    return argv


@contextmanager
def fresh_process() -> Iterator[None]:
    """Resets what fairseq and this package keep in global variables from run to run."""
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    metrics.reset()
    logging.root.setLevel(logging.INFO)  # as in a command, by fairseq_cli.train
    with (
        mock.patch.object(checkpoint_utils, "PathManager", checkpoint_utils.PathManager),
        mock.patch.object(checkpoint_utils, "os", checkpoint_utils.os),
    ):
        try:
            yield
        finally:
            # A signal that ends a run may come within torch.no_grad(), which then has no end.
            torch.set_grad_enabled(True)


def configure(data: Path, save_dir: Path, flags: dict[str, Any]) -> Any:
    """fairseq's configuration; in the names of flags "_" stands for "-"."""
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    # Flags that are not fairseq's.
    own = {"pack_tokens": True} if named.pop("pack-tokens", None) else {}
    args = Namespace(**{x: named.pop(x.replace("_", "-"), None) for x in own_flags._OF_COMMON})
    cfg = parse(command_line(data, save_dir, named))
    vars(cfg.model).update(own)
    return own_flags.with_own(lambda _: cfg, args)


def run(data: Path, save_dir: Path, native: bool = False, **flags: Any) -> list[float]:
    """The losses of the updates of one run, as passed to the meters.

    ``native`` trains with fairseq's own Trainer.
    """
    losses: list[float] = []
    flags.setdefault("distributed_world_size", 1)  # fairseq's default: all GPUs

    class Recorded(native_trainer.Trainer if native else Trainer):  # type: ignore[misc]
        def __init__(self, cfg: Any, task: Any, *others: Any) -> None:
            super().__init__(cfg, task, *others)
            reduce_metrics = task.reduce_metrics

            def recorded(logging_outputs: Any, criterion: Any) -> Any:
                if self.model.training:
                    losses.append(float(sum(output["loss"] for output in logging_outputs)))
                return reduce_metrics(logging_outputs, criterion)

            task.reduce_metrics = recorded

    with fresh_process(), mock.patch.object(train, "Trainer", Recorded):
        is_rank = "distributed_rank" in flags
        main = train.main if is_rank else patching.around(train.main, process.main)
        main(configure(data, save_dir, flags))
    return losses


def trained(folder: Path, name: str = "checkpoint_last.pt") -> dict[str, torch.Tensor]:
    """Parameters and moments in a checkpoint of the run in ``folder``, by their path in the
    file."""
    state = torch.load(folder / name, weights_only=False)
    return _tensors({key: state[key] for key in ("model", "last_optimizer_state")}, "")


def _tensors(state: Any, name: str) -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {name: state}
    if not isinstance(state, (dict, list, tuple)):
        return {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {k: v for key, value in items for k, v in _tensors(value, f"{name}/{key}").items()}


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not bitwise equal in two results of ``trained``."""
    assert ours.keys() == theirs.keys() != set()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def captured_graphs(log: str) -> int:
    """The number of graphs that the run has captured, rounded down to a power of two."""
    return max(map(int, re.findall(r"captured (\d+) CUDA graphs", log)), default=0)


@contextmanager
def nan_in_update(number: int) -> Iterator[None]:
    """Makes a parameter NaN during one update, counted from 1 in this process, and restores it
    afterwards."""
    step, calls = TrainingStep.update, 0

    def planted(self: TrainingStep, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != number:
            return step(self, *arguments)
        # Products in fp8 read weights that were cast after the update before.
        fc1 = self.model.encoder.layers[0].fc1
        place = (fc1.bias if self.fp8.is_on else fc1.weight).data.view(-1)[:1]
        kept = place.clone()
        place.fill_(math.nan)
        report = step(self, *arguments)
        place.copy_(kept)
        return report

    with mock.patch.object(TrainingStep, "update", planted):
        yield


def assert_stops_and_goes_on(data: Path, folder: Path, **flags: Any) -> None:
    """A run stops at a NaN in its tenth update, and resumes from the checkpoint that it saves
    then."""
    run(data, folder / "before", **flags, max_update=9)
    with nan_in_update(10), pytest.raises(FloatingPointError) as caught:
        run(data, folder / "run", **flags, max_update=20)
    crash = folder / "run/crash.pt"
    sentence = str(caught.value)
    assert sentence.startswith("gradients are Nan/Inf in update 10: training has diverged. Lower ")
    assert f"With --restore-file {crash} --reset-dataloader it continues from" in sentence
    assert differing(trained(crash.parent, crash.name), trained(folder / "before")) == []
    flags.update(max_update=13, reset_dataloader=True)
    found = [
        run(data, folder / "rest", **flags, restore_file=str(file), no_save=True)
        for file in (crash, folder / "before/checkpoint_last.pt")
    ]
    assert len(found[0]) == 4
    assert found[0] == found[1]


def signalled(number: int, update: int, rank: int = 0) -> Any:
    """Sends a signal to a rank during an update, counted from 1."""
    begin = ResumableTrainer._local_cumulative_training_time

    def clock(self: ResumableTrainer) -> float:
        is_it = not torch.distributed.is_initialized() or torch.distributed.get_rank() == rank
        if is_it and self.get_num_updates() == update - 1 and self.model.training:
            os.kill(os.getpid(), number)
        return begin(self)

    return mock.patch.object(ResumableTrainer, "_local_cumulative_training_time", clock)


def run_ranks(
    data: Path, save_dir: Path, ranks: int, start: Callable[..., None] | None = None, **flags: Any
) -> list[list[float]]:
    """The losses of each rank of one distributed run on this machine; the ranks may share one
    GPU.

    start: is called in each rank instead of ``run_rank``, with its arguments.
    """
    save_dir.mkdir()
    flags = {
        "distributed_world_size": ranks, "distributed_no_spawn": True, "ddp_backend": "legacy_ddp",
        "distributed_init_method": f"file://{save_dir}/rendezvous", **flags,
    }  # fmt: skip
    of_rank = functools.partial(start or run_rank, data, save_dir, flags)
    if flags.get("cpu", True):
        children = [fork(functools.partial(of_rank, rank)) for rank in range(ranks)]
        statuses = [exit_status(child) for child in children]
    else:  # CUDA does not work in a forked process
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=of_rank, args=(rank,)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        statuses = [process.exitcode for process in processes]
    assert statuses == [0] * ranks
    return [json.loads((save_dir / f"rank{rank}").read_text()) for rank in range(ranks)]


def run_rank(data: Path, save_dir: Path, flags: dict[str, Any], rank: int) -> None:
    gpus = 0 if flags.get("cpu", True) else torch.cuda.device_count()
    backend = "gloo" if gpus < flags["distributed_world_size"] else "nccl"
    device = rank % gpus if gpus else rank
    main = patching.around(train.main, process.main)
    start = functools.partial(distributed_utils.distributed_main, device, main, kwargs={})
    with mock.patch.object(train, "main", start):
        losses = run(data, save_dir, **flags, distributed_rank=rank, distributed_backend=backend)
    (save_dir / f"rank{rank}").write_text(json.dumps(losses))


def fork(work: Callable[[], None]) -> int:
    """Starts ``work`` in a child process that ends afterwards; returns the child's process id."""
    importlib.import_module("torch._dynamo")  # optimizers do, for seconds: not in each child
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def exit_status(child: int) -> int:
    """The exit status; if a signal has ended the child, minus its number."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_a_fork(work: Callable[[], None]) -> int:
    """Runs ``work`` in a child process; returns its exit status."""
    return exit_status(fork(work))


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def limit_files(size: int, killed: bool) -> None:
    """From now on no file can grow beyond ``size`` bytes: writing more raises OSError, or kills the
    process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if killed else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
