"""Whole runs on a GPU in which something fails, and which continue."""

from __future__ import annotations

import importlib
import json
import logging
import multiprocessing
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import helpers.training_runs as runs
import pytest
import torch
from helpers.training_runs import ON_GPU, PRECISIONS, captured_graphs

from lightseq_fairseq.memory import graphs
from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.step.training_step import TrainingStep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_stops_the_run_which_can_go_on(
    data: Path, tmp_path: Path, precision: str
) -> None:
    runs.assert_stops_and_goes_on(data, tmp_path, **ON_GPU, **PRECISIONS[precision])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_cannot_be_captured_goes_on_without_graphs(
    data: Path, tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    packed_logits, run = LSTransformerModel.packed_logits, TrainingStep.update
    steps: list[TrainingStep] = []
    memory: list[tuple[int, int]] = []

    def look(gradient: torch.Tensor) -> None:
        gradient.flatten()[0].item()

    def looks(self: Any, batch: Any, rng: Any) -> Any:
        logits = packed_logits(self, batch, rng)
        if where == "forward":
            look(logits.detach())
        else:
            logits.register_hook(look)
        return logits

    def recorded(self: TrainingStep, *arguments: Any) -> Any:
        steps.append(self)
        active = torch.cuda.memory_stats()["active_bytes.all.current"]
        memory.append((active, torch.cuda.memory_reserved()))
        return run(self, *arguments)

    monkeypatch.setattr(LSTransformerModel, "packed_logits", looks)
    monkeypatch.setattr(TrainingStep, "update", recorded)
    flags = {**ON_GPU, "bf16": True, "max_update": 40}
    caplog.set_level(logging.INFO)
    refused = runs.run(data, tmp_path / "refused", **flags)
    reasons = re.findall(r"training steps continue without CUDA graphs: (.*)", caplog.text)
    assert len(reasons) == 1
    assert "captur" in reasons[0]
    assert "previous error" not in reasons[0]
    assert set(steps[-1]._graphs._graphs) <= {"update"}
    for kind in zip(*memory, strict=True):
        assert max(kind[20:]) <= max(kind[:20])
    # Both calls fail if torch still believes that a capture is in progress.
    torch.cuda.empty_cache()
    torch.rand(1, device="cuda")

    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    assert runs.run(data, tmp_path / "eager", **flags) == refused
    assert runs.differing(*(runs.trained(tmp_path / name) for name in ("refused", "eager"))) == []


@pytest.mark.parametrize("in_capture", [True, False])
@pytest.mark.parametrize("for_good", [True, False])
def test_training_goes_on_when_a_bucket_is_out_of_memory(
    data: Path, tmp_path: Path, in_capture: bool, for_good: bool,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The update is repeated without graphs; if that fails too, its batch is dropped."""
    packed_logits, run = LSTransformerModel.packed_logits, TrainingStep.update
    starts = 0
    failed: int | None = None  # the number of the update that ran out of memory

    def out_of_memory() -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory: a test wanted all of it")

    def counted(self: TrainingStep, *arguments: Any) -> Any:
        nonlocal starts
        starts += 1
        if starts == failed and for_good:
            out_of_memory()
        return run(self, *arguments)

    def runs_out(self: Any, batch: Any, rng: Any) -> Any:
        nonlocal failed
        logits = packed_logits(self, batch, rng)
        if failed is None and torch.cuda.is_current_stream_capturing() == in_capture:
            failed = starts
            out_of_memory()
        if failed == starts and for_good:
            out_of_memory()
        return logits

    flags = {**ON_GPU, "bf16": True, "max_update": 24}
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(TrainingStep, "update", counted)
    with monkeypatch.context() as patch:
        patch.setattr(LSTransformerModel, "packed_logits", runs_out)
        losses = runs.run(data, tmp_path / "captured", **flags)
    assert failed is not None
    assert starts == 24 + for_good
    assert ("attempting to recover from OOM" in caplog.text) == for_good
    assert captured_graphs(caplog.text.rpartition("the update starts again")[2]) >= 2

    starts = 0
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    assert runs.run(data, tmp_path / "eager", **flags) == losses
    assert starts == 24 + for_good
    assert runs.differing(*(runs.trained(tmp_path / name) for name in ("captured", "eager"))) == []


def train(turn: Any, data: Path, folder: Path, dies_after: int | None) -> None:
    """Trains in a separate process when its turn comes; writes its losses to a file, unless it is
    killed."""
    torch.zeros(1, device="cuda")
    turn.acquire()
    step, calls = TrainingStep.update, 0

    def dies(self: TrainingStep, *arguments: Any) -> Any:
        nonlocal calls
        if calls == dies_after:
            runs.die()
        calls += 1
        return step(self, *arguments)

    TrainingStep.update = dies  # type: ignore[method-assign]
    flags = {**ON_GPU, "bf16": True, "max_update": 20, "save_interval_updates": 2}
    losses = runs.run(data, folder, **flags)
    (folder / "losses").write_text(json.dumps(losses))


def test_killed_five_times_at_random(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this, each process would time cuBLASLt algorithms itself, and the bits depend on its
    # choice.
    monkeypatch.setenv("LIGHTSEQ_LINEAR_SEARCH", "0")
    context, generator = multiprocessing.get_context("spawn"), random.Random(5)
    work: list[tuple[str, int | None]] = [
        ("whole", None), *(("killed", generator.randint(1, 5)) for _ in range(5)), ("killed", None),
    ]  # fmt: skip
    turns = [context.Semaphore(0) for _ in work]
    # Start all at once, because starting takes longer than training.
    processes = [
        context.Process(target=train, args=(turn, data, tmp_path / name, dies_after), daemon=True)
        for turn, (name, dies_after) in zip(turns, work, strict=True)
    ]
    for process in processes:
        process.start()
    for turn, process, (_, dies_after) in zip(turns, processes, work, strict=True):
        turn.release()
        process.join()
        assert process.exitcode == (0 if dies_after is None else -signal.SIGKILL)
    whole, rest = (json.loads((tmp_path / n / "losses").read_text()) for n in ("whole", "killed"))
    assert len(whole) == 20
    assert 0 < len(rest) < 20
    assert rest == whole[-len(rest) :]
    assert runs.differing(*(runs.trained(tmp_path / name) for name in ("killed", "whole"))) == []


def test_a_run_ends_when_training_does(data: Path, tmp_path: Path) -> None:
    """Also in the middle of an epoch, where data loading workers would go on making batches."""
    flags = {**ON_GPU, "bf16": True, "max_update": 3, "num_workers": 3, "no_save": True}
    flags.update(batch_size=1, distributed_world_size=1)
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    words = runs.command_line(data, tmp_path / "run", named)
    command = [sys.executable, "-m", "lightseq_fairseq.cli.train", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "done training" in line:
                trained = time.perf_counter()
    assert process.returncode == 0, "".join(lines)
    assert time.perf_counter() - trained < 4  # seconds; it was five for each worker


def hang(words: list[str]) -> None:
    """lightseq-train in a separate process, with a step that takes the GPU two minutes.

    The step comes when all batch shapes have been captured, because loading and capturing kernels
    may
    itself wait for the GPU.
    """
    step, calls = TrainingStep.update, 0

    def hangs(self: TrainingStep, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 40:
            torch.cuda._sleep(240_000_000_000)  # cycles
        return step(self, *arguments)

    TrainingStep.update = hangs  # type: ignore[method-assign]
    graphs.PATIENCE = 1.0
    importlib.import_module("lightseq_fairseq.cli.train").main(words)


def test_the_launcher_gets_away_from_a_gpu_that_hangs(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = {**ON_GPU, "bf16": True, "max_update": 80, "distributed_world_size": 1}
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    words = runs.command_line(data, tmp_path / "run", named)
    process = multiprocessing.get_context("spawn").Process(target=hang, args=(words,), daemon=True)
    process.start()
    process.join(timeout=90)
    assert process.exitcode == 2
    assert "lightseq-train: error: The GPU has not finished a step in 1 s" in capfd.readouterr().err
