"""What the host reads of a search's progress, on a CPU; beside a GPU: test_generation_cuda.py."""

from __future__ import annotations

import pytest
import torch

from lightseq_fairseq.generation.delayed_progress import DelayedProgress


def test_the_slots_of_sentences_that_have_ended() -> None:
    progress = DelayedProgress(torch.device("cpu"))
    assert progress.beside(True) is None and not progress.is_delayed
    for _ in range(2):
        progress.begin()
        assert not progress.reports.any()
        for step, slots in enumerate(([], [3, 1], [], [0]), 1):
            progress.reports[[1 + slot for slot in slots]] = step
            progress.reports[0] = step
            progress.step()
            number, ended_at = progress.ended()
            assert number == step and (ended_at == step).nonzero()[0].tolist() == sorted(slots)


def test_room_for_many_slots() -> None:
    progress = DelayedProgress(torch.device("cpu"))
    few = progress.reports
    assert not progress.make_room(len(few) - 1) and progress.reports is few
    assert progress.make_room(len(few)) and len(progress.reports) > len(few)


def test_a_step_that_has_not_reported() -> None:
    progress = DelayedProgress(torch.device("cpu"))
    progress.begin()
    progress.reports[0] = 1
    progress.step()
    assert progress.ended()[0] == 1
    progress.begin()  # steps of the search before must not count for this one
    progress.step()
    with pytest.raises(RuntimeError, match="after 1 steps of a search, the last one has not rep"):
        progress.ended()
