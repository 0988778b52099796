"""Every setting that docs/flags.md leaves to fairseq's own step, with one rank.

Each line of settings is trained twice without dropout, by us and by fairseq. The log says why the
captured step was not used. Losses, logged statistics and files agree, and each setting changes some
of them.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import pytest
import torch
from fairseq import trainer, utils
from fairseq.data import indexed_dataset, language_pair_dataset
from helpers.flag_runs import Proofs, launch, prove, proven, table
from helpers.flag_training import Trace, train

# Reason in the log -> settings, see `flag_runs.prove`
LINES = {
    "--memory-efficient-bf16": "--memory-efficient-bf16",
    "--memory-efficient-fp16": "--fp16-init-scale 64 | --memory-efficient-fp16",
    "--encoder-layerdrop": "--encoder-layers 3 | --encoder-layerdrop 0.5",
    "--decoder-layerdrop": "--decoder-layers 3 | --decoder-layerdrop 0.5",
    "sentences are padded to length buckets": "--num-batch-buckets 2",
}
EMA = (
    "--no-save None | --store-ema --ema-decay 0.5 --ema-update-freq 2 --ema-fp32 "
    "--ema-seed-model {averaged}",
    "--no-save None --store-ema --ema-decay 0.5 | --ema-start-update 3",
)
CACHE = "--empty-cache-freq 2"
ALIGNMENTS = "--load-alignments"
PROVEN: Proofs = {("train", table.FALLBACK): proven(*LINES.values(), *EMA, CACHE, ALIGNMENTS)}
Run = Callable[[str, bool], Trace]


@pytest.mark.parametrize("reason", LINES)
def test_fairseqs_step_is_taken_and_does_what_fairseq_does(run: Run, reason: str) -> None:
    tolerance = 3e-3 if "16" in reason else 1e-5
    ours, _ = prove(LINES[reason], run, functools.partial(Trace.agrees, tolerance=tolerance))
    assert ours.refusals == [reason] and not ours.error


def average(folder: Path) -> dict[str, torch.Tensor]:
    """The moving averages in a checkpoint, without the biases of the keys: softmax does not depend
    on them, so they are only noise."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    found = {
        f"{kind} {name}": x
        for kind, values in state["extra_state"].items()
        if kind.startswith("ema")
        for name, x in values.items()
    }
    return {n: x for n, x in found.items() if not n.endswith(("_float_tensor", "k_proj.bias"))}


@pytest.mark.parametrize("line", EMA)
def test_moving_average(inputs: dict[str, Path], tmp_path: Path, line: str) -> None:
    averaged = "--no-save None --store-ema --ema-fp32 --ema-decay 0"
    train(inputs, tmp_path / "seed", averaged, native=True)
    given = {**inputs, "averaged": tmp_path / "seed" / "checkpoint_last.pt"}
    traces = []

    def run(line: str, native: bool) -> dict[str, torch.Tensor]:
        traces.append(train(given, tmp_path / str(len(traces)), line, native))
        return average(tmp_path / str(len(traces) - 1))

    def agree(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
        return some.keys() == others.keys() and all(
            torch.allclose(x, others[name], rtol=1e-4, atol=1e-5) for name, x in some.items()
        )

    ours, _ = prove(line, run, agree)
    assert ours and traces[0].refusals == ["--store-ema"]
    assert traces[0].agrees(traces[1])


@contextmanager
def feigned_gpu() -> Iterator[mock.Mock]:
    """fairseq's step runs as if there were a GPU; yields the mock of torch.cuda.empty_cache."""
    step = trainer.Trainer.train_step

    def with_gpu(self: Any, *arguments: Any) -> Any:
        self.cuda, self.cuda_env = True, SimpleNamespace(total_memory_in_GB=1.0)
        try:
            return step(self, *arguments)
        finally:
            self.cuda, self.cuda_env = False, None

    with (
        mock.patch.object(trainer.Trainer, "train_step", with_gpu),
        mock.patch.object(trainer.Trainer, "_check_grad_norms"),
        mock.patch.object(utils, "move_to_cuda", lambda sample, device=None: sample),
        mock.patch.object(torch.cuda, "max_memory_allocated", return_value=0),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats"),
        mock.patch.object(torch.cuda, "empty_cache") as empty_cache,
    ):
        yield empty_cache


def test_cache_is_emptied(inputs: dict[str, Path], tmp_path: Path) -> None:
    traces = []

    def run(line: str, native: bool) -> int:
        with feigned_gpu() as empty_cache:
            traces.append(train(inputs, tmp_path / "save", line, native))
        return int(empty_cache.call_count)

    prove(CACHE, run, operator.eq)
    assert traces[0].refusals == [CACHE.split()[0]] and not traces[0].error


def test_alignments_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = cli_runs.binarise(tmp_path)
    builder = indexed_dataset.make_builder(str(data / "train.align.de-en.bin"), "mmap")
    for _ in range(cli_runs.SPLITS["train"]):
        builder.add_item(torch.tensor([0, 0], dtype=torch.int32))
    builder.finalize(str(data / "train.align.de-en.idx"))

    def run(line: str, native: bool) -> int:
        collate = language_pair_dataset.collate
        with mock.patch.object(language_pair_dataset, "collate", side_effect=collate) as spy:
            launch("train", data, tmp_path / line / str(native), line + " --native" * native, True)
        batches = [call.args[0] for call in spy.call_args_list]
        return sum(samples[0].get("alignment") is not None for samples in batches)

    prove(ALIGNMENTS, run, operator.eq)
    assert caplog.text.count("step: fairseq's own (the data have alignments") == 1
