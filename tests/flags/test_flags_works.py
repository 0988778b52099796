"""Every setting that docs/flags.md answers with "works" in training: the captured step does it.

Each line of settings is trained twice without dropout, by us on the captured step and by fairseq.
Losses, logged statistics, requests to torch and written files agree, and each setting changes some
of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils, trainer
from fairseq.modules import transformer_layer
from helpers.flag_runs import Proofs, lines, prove, proven, table
from helpers.flag_training import Trace, train

from lightseq_fairseq.fairseq_compat.overlay import Overlay

SAVE = "--no-save None "
LINES = lines("train: ")
# Settings -> why fairseq's own step is used
OTHER_PARTS = {
    "--label-smoothing None | --criterion cross_entropy": "our step does not support the criterion",
    "--adam-betas None | --optimizer sgd": "the optimizer is not ls_adam or adafactor",
}
CPU, EXPORT = "--cpu", "--export"
PROVEN: Proofs = {("train", table.WORKS): proven(*LINES, *OTHER_PARTS, CPU, EXPORT)}
Run = Callable[[str, bool], Trace]


@pytest.mark.parametrize("line", LINES)
def test_ours_does_what_fairseq_does(run: Run, line: str) -> None:
    tolerance = 3e-3 if {"--fp16", "--bf16"} & {*line.split()} else 1e-5
    ours, _ = prove(line, run, functools.partial(Trace.agrees, tolerance=tolerance))
    assert ours.refusals == []
    assert ours.error.startswith("FloatingPointError: Minimum" if "--min-loss" in line else "")
    assert bool(ours.error) == ("--min-loss" in line)


@pytest.mark.parametrize("line", OTHER_PARTS)
def test_with_other_parts_fairseqs_step_is_taken(run: Run, line: str) -> None:
    ours, _ = prove(line, run, Trace.agrees)
    (reason,) = ours.refusals
    assert reason.startswith(OTHER_PARTS[line]) and not ours.error


def test_a_gpu_is_left_alone(inputs: dict[str, Path], tmp_path: Path) -> None:
    def run(line: str, native: bool) -> Trace:
        with_gpu = Overlay(torch, cuda=Overlay(torch.cuda, is_available=lambda: True))
        with mock.patch.object(trainer, "torch", with_gpu):
            return train(inputs, tmp_path / "save", line or "--cpu None", native)

    ours, _ = prove(CPU, run, Trace.agrees)
    assert ours.refusals == [] and not ours.error


def test_the_checkpoint_is_of_a_model_for_export(inputs: dict[str, Path], tmp_path: Path) -> None:
    """fairseq chooses LayerNorms that TorchScript supports; TorchScript can compile the whole
    model."""
    norm = transformer_layer.LayerNorm

    def run(line: str, native: bool) -> list[bool]:
        folder = tmp_path / f"native{line}" if native else tmp_path
        train(inputs, folder, SAVE + line, native)
        with mock.patch.object(transformer_layer, "LayerNorm", side_effect=norm) as spy:
            (model,), _ = checkpoint_utils.load_model_ensemble([str(folder / "checkpoint_last.pt")])
        model.eval()
        tokens = torch.tensor([[4, 5, 2]])
        scores, _ = torch.jit.script(model)(tokens, torch.tensor([3]), tokens)
        torch.testing.assert_close(scores, model(tokens, torch.tensor([3]), tokens)[0])
        return [call.kwargs["export"] for call in spy.call_args_list]

    ours, _ = prove(EXPORT, run, operator.eq)
    assert ours and all(ours)
