"""Whole runs on a GPU: a captured step is the same step as one launched kernel by kernel."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs as runs
from parity import write_corpus

from lightseq_fairseq.training import step

pytestmark = pytest.mark.gpu

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": True, "fp16_init_scale": 128},
    "bf16": {"bf16": True},
}
ON_GPU = {**runs.LS, "cpu": None, "encoder_embed_dim": 64, "encoder_attention_heads": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


def graphs(caplog: pytest.LogCaptureFixture) -> int:
    """How many graphs the run has captured, to a power of two."""
    found = re.findall(r"captured (\d+) CUDA graphs", caplog.text)
    return max(map(int, found), default=0)


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("update_freq", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_and_eager_are_equal(
    data: Path, tmp_path: Path, precision: str, update_freq: int, clip: float,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = {**ON_GPU, **PRECISIONS[precision], "clip_norm": clip, "update_freq": update_freq}
    flags["max_update"] = 24
    caplog.set_level(logging.INFO)
    captured = runs.run(data, tmp_path / "captured", **flags)
    assert graphs(caplog) >= 2
    caplog.clear()
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    eager = runs.run(data, tmp_path / "eager", **flags)
    assert graphs(caplog) == 0
    assert captured == eager
    assert len(captured) == 24
    ours, theirs = (runs.trained(tmp_path / name) for name in ("captured", "eager"))
    assert ours.keys() == theirs.keys() != set()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_overflows_are_skipped_as_fairseq_skips_them(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The scale doubles every third update until it is too large, again and again.
    flags = {**ON_GPU, "fp16": True, "fp16_init_scale": 2**13, "fp16_scale_window": 3}
    flags.update(max_update=40, log_interval=1)
    caplog.set_level(logging.INFO)
    found = {}
    for name, native in (("ours", False), ("native", True)):
        caplog.clear()
        flags.update(runs.NATIVE if native else runs.LS)
        runs.run(data, tmp_path / name, native=native, **flags)
        state = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)
        scales = re.findall(r"setting loss scale to: ([\d.]+)", caplog.text)
        found[name] = (
            scales,
            state["last_optimizer_state"]["loss_scale"],
            state["optimizer_history"][-1]["num_updates"],
        )
    assert len(found["ours"][0]) >= 2
    assert found["ours"] == found["native"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_stops_the_run(
    data: Path, tmp_path: Path, precision: str
) -> None:
    flags = {
        **ON_GPU,
        **PRECISIONS[precision],
        "lr": 1e30,
        "lr_scheduler": "fixed",
        "warmup_updates": 0,
        "clip_norm": 0.0,
    }
    with pytest.raises(FloatingPointError, match="gradients are Nan/Inf in update"):
        runs.run(data, tmp_path / "run", **flags)
    state = torch.load(tmp_path / "run/crash.pt", weights_only=False)
    assert state["optimizer_history"][-1]["num_updates"] >= 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_repeats_the_losses(data: Path, tmp_path: Path, precision: str) -> None:
    flags = {**ON_GPU, **PRECISIONS[precision], "max_update": 24, "save_interval_updates": 9}
    whole = runs.run(data, tmp_path / "whole", **flags)
    restore = {"restore_file": str(tmp_path / "whole/checkpoint_2_9.pt")}
    rest = runs.run(data, tmp_path / "rest", **flags, **restore)
    assert rest == whole[9:]


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_either_goes_on_from_the_others_checkpoint(
    data: Path, tmp_path: Path, precision: str, ours_first: bool
) -> None:
    flags = {**ON_GPU, **PRECISIONS[precision]}
    first, second = (
        {**flags, **(runs.LS if ours else runs.NATIVE), "native": not ours}
        for ours in (ours_first, not ours_first)
    )
    runs.run(data, tmp_path / "both", **first)
    rest = runs.run(data, tmp_path / "both", **{**second, "max_update": 24})
    alone = runs.run(data, tmp_path / "alone", **{**first, "max_update": 24})
    assert len(rest) == 12
    assert rest == pytest.approx(alone[12:], rel=0.05)


def test_validation_and_saving_do_not_disturb(data: Path, tmp_path: Path) -> None:
    flags = {**ON_GPU, "bf16": True, "max_update": 24}
    alone = runs.run(data, tmp_path / "alone", **flags)
    flags.update(disable_validation=None, valid_subset="train", validate_interval_updates=5)
    flags.update(save_interval_updates=4)
    assert runs.run(data, tmp_path / "both", **flags) == alone


@pytest.mark.large
def test_memory_stays_flat_over_twenty_thousand_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of fifteen shapes, of which thirteen may have graphs beside the update's."""
    monkeypatch.setattr("lightseq_fairseq.graphs.MOST_GRAPHS", 14)
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=2000, longest=60)
    run, reserved, captured = step.TrainingStep.run, [], []

    def recorded(self: step.TrainingStep, *arguments: Any) -> Any:
        reserved.append(torch.cuda.memory_reserved())
        captured.append(len(self._graphs._graphs))
        return run(self, *arguments)

    monkeypatch.setattr(step.TrainingStep, "run", recorded)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 640, "batch_size": 8, "no_save": True}
    flags.update(lr=1e-4, max_update=20_000, log_interval=1000)
    assert len(runs.run(data, tmp_path / "run", **flags)) == 20_000
    assert max(captured) == 14
    assert max(reserved) == max(reserved[:5000])
