"""Memory of a long run on a GPU. It looks at all that the GPU has in use, so it runs alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs as runs
from parity import write_corpus
from test_step_cuda import ON_GPU

from lightseq_fairseq.graphs import Graphs
from lightseq_fairseq.training import step

pytestmark = pytest.mark.gpu

SLACK = 32 << 20  # bytes in 15000 updates


def resident() -> int:
    """Bytes of the host's memory that this process has in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.large
def test_memory_stays_flat_over_twenty_thousand_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of fifteen shapes, of which thirteen may have graphs beside the update's."""
    monkeypatch.setattr("lightseq_fairseq.graphs.MOST_GRAPHS", 14)
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=2000, longest=60)
    run, reserved, captured = step.TrainingStep.run, [], []
    on_device, on_host = [], []  # of every hundredth update

    def recorded(self: step.TrainingStep, *arguments: Any) -> Any:
        if len(reserved) % 100 == 0:
            free, total = torch.cuda.mem_get_info()
            on_device.append(total - free)
            on_host.append(resident())
        reserved.append(torch.cuda.memory_reserved())
        captured.append(len(self._graphs._graphs))
        return run(self, *arguments)

    monkeypatch.setattr(step.TrainingStep, "run", recorded)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 640, "batch_size": 8, "no_save": True}
    flags.update(lr=1e-4, max_update=20_000, log_interval=1000)
    assert len(runs.run(data, tmp_path / "run", **flags)) == 20_000
    assert max(captured) == 14
    assert max(reserved) == max(reserved[:5000])
    for used in (on_device, on_host):
        assert max(used[50:]) <= max(used[:50]) + SLACK


def test_graphs_use_the_memory_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=4000, longest=60)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 16_384, "max_update": 40, "no_save": True}
    reserved = {}
    for captured in (True, False):
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", str(int(captured)))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        assert len(runs.run(data, tmp_path / str(captured), **flags)) == 40
        reserved[captured] = torch.cuda.max_memory_reserved() - before
    assert reserved[True] <= 1.5 * reserved[False]


def test_steps_leave_nothing_in_the_memory_of_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier graph would write over it."""
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=2000, longest=60)
    run, left = Graphs.run, []

    def recorded(self: Graphs, *arguments: Any) -> Any:
        before = torch.cuda.memory_allocated()
        assert run(self, *arguments) is None
        left.append(torch.cuda.memory_allocated() - before)

    monkeypatch.setattr(Graphs, "run", recorded)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 1024, "update_freq": "3", "no_save": True}
    runs.run(data, tmp_path / "run", **flags, max_update=40, validate_interval_updates=10)
    assert len(left) > 100
    # The first step makes the table of positions, the first graph torch's generator two numbers.
    assert sum(max(more, 0) for more in left[1:]) <= 4096
