"""``--fp8`` on a GPU: a captured step equals an eager one, and follows the references."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.training_runs as runs
import pytest
import torch
from helpers.ops_testing import skip_without_fp8
from helpers.parity import write_text
from helpers.training_runs import ON_GPU, captured_graphs

from lightseq_fairseq.step import training_step

pytestmark = pytest.mark.gpu

FP8: dict[str, Any] = {**ON_GPU, "bf16": True, "fp8": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "gelu": {"activation_fn": "gelu"},
    "silu": {"activation_fn": "silu"},
    "three-micro-batches": {"update_freq": 3},
    "recomputed": {"checkpoint_activations": True},
}


@pytest.fixture(autouse=True)
def with_fp8() -> None:
    skip_without_fp8()


Run = Callable[..., tuple[list[float], list[str], int]]


@pytest.fixture
def run(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs with the given flags, captured or eager.

    Returns the losses, the reports of the updates as text, with counts of saturated numbers, and
    the number of graphs.
    """
    wait = training_step.StepReport.wait

    def get(
        name: str, captured: bool = True, corpus: Path = data, **flags: Any
    ) -> tuple[list[float], list[str], int]:
        states: list[str] = []

        def recorded(self: training_step.StepReport) -> list[float]:
            values = wait(self)
            states.append(repr(values))
            return values

        monkeypatch.setattr(training_step.StepReport, "wait", recorded)
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", str(int(captured)))
        caplog.set_level(logging.INFO)
        caplog.clear()
        losses = runs.run(corpus, tmp_path / name, **flags)
        return losses, states, captured_graphs(caplog.text)

    return get


def scales_in(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    return dict(state["extra_state"]["lightseq_fp8"])


def assert_same_files(ours: Path, theirs: Path) -> None:
    assert runs.differing(runs.trained(ours), runs.trained(theirs)) == []
    assert runs.differing(scales_in(ours), scales_in(theirs)) == []


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_captured_and_eager_are_equal(tmp_path: Path, flags: dict[str, Any], run: Run) -> None:
    flags = {**FP8, **flags, "max_update": 24}
    losses, states, graphs = run("captured", **flags)
    assert (losses, states, 0) == run("eager", captured=False, **flags)
    assert len(losses) == 24 and graphs >= 2
    assert_same_files(tmp_path / "captured", tmp_path / "eager")


def test_captured_and_eager_are_equal_on_running_text(tmp_path: Path, run: Run) -> None:
    flags = {**runs.TEXT, "bf16": True, "fp8": True, "cpu": None, "max_update": 24}
    flags |= {f"decoder_{side}_dim": 64 for side in ("embed", "input", "output", "ffn_embed")}
    flags["corpus"] = write_text(tmp_path / "text")
    losses, states, graphs = run("captured", **flags)
    assert (losses, states, 0) == run("eager", captured=False, **flags)
    assert len(losses) == 24 and graphs >= 2
    assert_same_files(tmp_path / "captured", tmp_path / "eager")


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_losses_are_near_those_of_bf16(data: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    flags = {**FP8, **flags, "max_update": 42, "no_save": True}
    losses = runs.run(data, tmp_path / "fp8", **flags)
    near = runs.run(data, tmp_path / "bf16", **{**flags, "fp8": None})
    assert losses != near
    torch.testing.assert_close(losses, near, rtol=0.03, atol=0)


def test_first_scales_are_those_of_a_cpu(data: Path, tmp_path: Path) -> None:
    """Before the first update changes the weights; but for rounding, which may cross a power of
    two."""
    plain = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "max_update": 1}
    for name, more in (("gpu", {}), ("cpu", {"cpu": True})):
        runs.run(data, tmp_path / name, **{**FP8, **plain, **more})
    ours, theirs = scales_in(tmp_path / "gpu"), scales_in(tmp_path / "cpu")
    assert ours.keys() == theirs.keys()
    for name, table in ours.items():
        torch.testing.assert_close(table[:, 1], theirs[name][:, 1], rtol=0.2, atol=0, msg=name)
        assert (torch.log2(table[:, 0] / theirs[name][:, 0]).abs() <= 1).all()


def test_a_resumed_run_is_the_whole_one(data: Path, tmp_path: Path) -> None:
    flags = {**FP8, "max_update": 24, "save_interval_updates": 9}
    whole = runs.run(data, tmp_path / "whole", **flags)
    restore = {"restore_file": str(tmp_path / "whole/checkpoint_2_9.pt")}
    assert runs.run(data, tmp_path / "rest", **flags, **restore) == whole[9:]
    assert_same_files(tmp_path / "rest", tmp_path / "whole")


def test_a_gradient_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path) -> None:
    runs.assert_stops_and_goes_on(data, tmp_path, **FP8)


@pytest.mark.parametrize("sharded", [{}, {"zero_sharding": "os"}], ids=["whole", "sharded"])
def test_two_ranks_are_one_with_twice_the_batches(
    data: Path, tmp_path: Path, sharded: dict[str, Any]
) -> None:
    """On one GPU they share it, over gloo."""
    flags = {**FP8, "dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
    flags |= {"no_save": True, "max_update": 12}
    both = runs.run_ranks(data, tmp_path / "ranks", 2, **flags, **sharded)
    assert both[0] == both[1]
    expected = runs.run(data, tmp_path / "one", **flags, update_freq=2)
    torch.testing.assert_close(both[0], expected, rtol=2e-2, atol=0)
