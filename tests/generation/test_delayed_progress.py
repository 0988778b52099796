"""What the host reads of a search's progress, on a CPU; beside a GPU: test_generation_cuda.py."""

from __future__ import annotations

import pytest
import torch

from lightseq_fairseq.generation.delayed_progress import DelayedProgress


def test_reports_take_turns() -> None:
    progress = DelayedProgress(torch.device("cpu"))
    progress.begin(4)
    for step, left in enumerate((4, 3, 3, 0)):
        progress.reports[(step + 1) % 2] = torch.tensor([step + 1, left])
        assert progress.unfinished(step) == left
    assert progress.beside(True) is None
    progress.begin(2**31 - 1)
    assert progress.reports.tolist() == [[0, 2**31 - 1], [0, 0]]
    progress.begin(6)  # the search before had no step
    assert progress.reports.tolist() == [[0, 6], [0, 0]]


def test_a_step_that_has_not_reported() -> None:
    progress = DelayedProgress(torch.device("cpu"))
    progress.begin(4)
    progress.reports[1] = torch.tensor([1, 0])
    assert progress.unfinished(0) == 0
    progress.begin(5)  # steps of the search before must not count for this one
    with pytest.raises(RuntimeError, match="after 1 steps of a search, the last one has not rep"):
        progress.unfinished(0)
    progress.reports[1] = torch.tensor([3, 2])
    with pytest.raises(RuntimeError, match="after 1 steps of a search"):
        progress.unfinished(0)
