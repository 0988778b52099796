"""Every setting that docs/flags.md leaves to fairseq's own step, on one rank.

Each line of settings is trained twice, by us and by fairseq, without dropout: the log says why the
captured step was not taken, and losses, logged statistics and files agree all the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cli_runs
import flag_runs
import pytest
import torch
from fairseq import trainer, utils
from fairseq.data import indexed_dataset, language_pair_dataset
from fairseq.modules import layer_drop
from flag_runs import Proofs, Trace, launch, names, table, train

from lightseq_fairseq.fairseq_compat.overlay import Overlay

# The reason that the log gives -> settings
LINES = {
    "--memory-efficient-bf16": "--memory-efficient-bf16",
    "--memory-efficient-fp16": "--memory-efficient-fp16 --fp16-init-scale 64",
    "--encoder-layerdrop": "--encoder-layers 3 --encoder-layerdrop 0.5",
    "--decoder-layerdrop": "--decoder-layers 3 --decoder-layerdrop 0.5",
    "batches of bucketed lengths": "--num-batch-buckets 2",
}
EMA = (
    "--store-ema --ema-decay 0.5 --ema-update-freq 2 --ema-fp32 --ema-seed-model {averaged}",
    "--store-ema --ema-decay 0.5 --ema-start-update 3",
)
CACHE = "--empty-cache-freq 2"
ALIGNMENTS = "--load-alignments"
PROVEN: Proofs = {
    ("train", table.FALLBACK): names(*LINES.values(), *EMA, CACHE, ALIGNMENTS)
    & flag_runs.rows("train", table.FALLBACK)
}
SIXTEEN_BITS = ("--memory-efficient-bf16", "--memory-efficient-fp16")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return flag_runs.inputs(tmp_path_factory.mktemp("inputs"))


def both(inputs: dict[str, Path], folder: Path, line: str) -> tuple[Trace, Trace]:
    def run(name: str) -> Trace:
        # fairseq draws which layers are left out; the rest of our step draws, too.
        generator = torch.Generator().manual_seed(1)
        draws = SimpleNamespace(uniform_=lambda: torch.rand(3, generator=generator))
        with mock.patch.object(layer_drop, "torch", Overlay(torch, empty=lambda count: draws)):
            return train(inputs, folder / name, line, native=name == "theirs")

    return run("ours"), run("theirs")


@pytest.mark.parametrize("reason", LINES)
def test_fairseqs_step_is_taken_and_does_what_fairseq_does(
    inputs: dict[str, Path], tmp_path: Path, reason: str
) -> None:
    ours, theirs = both(inputs, tmp_path, LINES[reason])
    assert ours.refusals == [reason]
    assert ours.agrees(theirs, 3e-3 if reason in SIXTEEN_BITS else 1e-5), (vars(ours), vars(theirs))
    plain = train(inputs, tmp_path / "plain", "", native=True)
    assert not theirs.agrees(plain, 1e-5)


def average(folder: Path) -> dict[str, torch.Tensor]:
    """Parameters' moving average in a file; keys' biases, which softmax ignores, are noise."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    found = {
        f"{kind} {name}": x
        for kind, values in state["extra_state"].items()
        if kind.startswith("ema")
        for name, x in values.items()
    }
    return {n: x for n, x in found.items() if not n.endswith(("_float_tensor", "k_proj.bias"))}


def agree(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(
        torch.allclose(x, others[name], rtol=1e-4, atol=1e-5) for name, x in some.items()
    )


@pytest.mark.parametrize("line", EMA)
def test_moving_average(inputs: dict[str, Path], tmp_path: Path, line: str) -> None:
    line = "--no-save None " + line
    train(
        inputs,
        tmp_path / "seed",
        "--no-save None --store-ema --ema-fp32 --ema-decay 0",
        native=True,
    )
    inputs = {**inputs, "averaged": tmp_path / "seed" / "checkpoint_last.pt"}
    ours, theirs = both(inputs, tmp_path, line)
    assert ours.refusals == ["--store-ema"]
    assert ours.agrees(theirs, 1e-5)
    expected = average(tmp_path / "theirs")
    assert agree(average(tmp_path / "ours"), expected)
    for part in re.findall(r"--ema-\S+(?: [^-]\S*)?", line):
        train(inputs, tmp_path / part, line.replace(part, ""), native=True)
        assert not agree(average(tmp_path / part), expected), part


@contextmanager
def feigned_gpu() -> Iterator[mock.Mock]:
    """fairseq's step believes in a GPU; gives what stands for torch.cuda.empty_cache."""
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
    counts = []
    for native in (False, True):
        with feigned_gpu() as empty_cache:
            trace = train(inputs, tmp_path / str(native), CACHE, native)
        assert native or trace.refusals == ["--empty-cache-freq"]
        counts.append(empty_cache.call_count)
    with feigned_gpu() as empty_cache:
        train(inputs, tmp_path / "plain", "", native=True)
    assert counts[0] == counts[1] > empty_cache.call_count


def test_alignments_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = cli_runs.binarise(tmp_path)
    builder = indexed_dataset.make_builder(str(data / "train.align.de-en.bin"), "mmap")
    for _ in range(cli_runs.SPLITS["train"]):
        builder.add_item(torch.tensor([0, 0], dtype=torch.int32))
    builder.finalize(str(data / "train.align.de-en.idx"))
    counts = []
    for own in ("", " --native"):
        collate = language_pair_dataset.collate
        with mock.patch.object(language_pair_dataset, "collate", side_effect=collate) as spy:
            launch("train", data, tmp_path / own.strip(), ALIGNMENTS + own, ok=True)
        batches = [call.args[0] for call in spy.call_args_list]
        counts.append(sum(samples[0].get("alignment") is not None for samples in batches))
    assert counts[0] == counts[1] > 0
    assert caplog.text.count("training takes fairseq's own steps: alignments") == 1
