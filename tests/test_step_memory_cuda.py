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
