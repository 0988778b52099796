"""On a CPU, training steps and translations take at most 1.25 times fairseq's time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.cpu_speed import step_ratios, translation_ratios, write_wmt_like


@pytest.fixture
def one_thread() -> Iterator[None]:
    # Measure CPU seconds of this process, so that the load of other processes does not count.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_step_time(tmp_path: Path, one_thread: None) -> None:
    ratios = step_ratios(write_wmt_like(tmp_path), max_tokens=1000, steps=4)
    assert statistics.median(ratios) <= 1.25, ratios


def test_translation_time(tmp_path: Path, one_thread: None) -> None:
    ratios = translation_ratios(write_wmt_like(tmp_path), passes=3)
    assert statistics.median(ratios) <= 1.25, ratios
