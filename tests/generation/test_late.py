"""What the host reads of a search's progress, on a CPU; beside a GPU: test_generation_cuda.py."""

from __future__ import annotations

import pytest
import torch

from lightseq_fairseq.generation.late import LateProgress


def test_reports_take_turns() -> None:
    late = LateProgress(torch.device("cpu"))
    late.begin(4)
    for step, left in enumerate((4, 3, 3, 0)):
        late.reports[(step + 1) % 2] = torch.tensor([step + 1, left])
        assert late.unfinished(step) == left
    assert late.beside(True) is None
    late.begin(2**31 - 1)
    assert late.reports.tolist() == [[0, 2**31 - 1], [0, 0]]
    late.begin(6)  # of the search before there was no step
    assert late.reports.tolist() == [[0, 6], [0, 0]]


def test_a_step_that_has_not_reported() -> None:
    late = LateProgress(torch.device("cpu"))
    late.begin(4)
    late.reports[1] = torch.tensor([1, 0])
    assert late.unfinished(0) == 0
    late.begin(5)  # whose steps are not taken for those of the search before
    with pytest.raises(RuntimeError, match="after 1 steps of a search, the last one has not rep"):
        late.unfinished(0)
    late.reports[1] = torch.tensor([3, 2])
    with pytest.raises(RuntimeError, match="after 1 steps of a search"):
        late.unfinished(0)
