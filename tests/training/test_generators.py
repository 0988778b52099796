"""Training leaves the global random generators of torch, numpy and Python as fairseq does, so that
other code draws the same numbers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import helpers.parity as parity
import helpers.training_runs as runs
import numpy as np
import pytest
import torch
from fairseq.optim.lr_scheduler import register_lr_scheduler
from fairseq.optim.lr_scheduler.fixed_schedule import FixedLRSchedule, FixedLRScheduleConfig
from torch.utils.data import dataloader

from lightseq_fairseq.layers import draw_rng
from lightseq_fairseq.plugins import dropout


class States(NamedTuple):
    """Digests of the generators' states."""

    numpy: str
    python: str
    torch: str


SEEN: list[tuple[int, States]] = []


def states() -> States:
    _, words, *others = np.random.get_state()
    each = ((words.tolist(), others), random.getstate(), torch.get_rng_state().tolist())
    return States(*(hashlib.sha256(repr(state).encode()).hexdigest() for state in each))


@dataclass
class WatchedConfig(FixedLRScheduleConfig):
    pass


@register_lr_scheduler("watched", dataclass=WatchedConfig)
class Watched(FixedLRSchedule):
    """A user's schedule, which fairseq calls after each update."""

    def step_update(self, num_updates: int) -> Any:
        SEEN.append((num_updates, states()))
        return super().step_update(num_updates)


class Run(NamedTuple):
    """What a run shows.

    Attributes:
        seen: the numbers of updates and the generators' states, in the order of calls.
        seeds: from which the processes of data loaders are seeded, in the order of their start.
        files: names of checkpoints.
    """

    seen: list[tuple[int, States]]
    seeds: list[int]
    files: list[str]


RATES = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}
FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "translation": (runs.corpus, runs.LS),
    "language model": (parity.write_text, runs.TEXT),
    "masked language model": (parity.write_text, runs.MASKED),
    "classification": (parity.write_classes, {**runs.CLASSES, "pooler_dropout": 0}),
}
PRECISE = {
    "lr_scheduler": "watched", "warmup_updates": None, "max_epoch": 3, "max_update": 0,
    "disable_validation": None, "num_workers": 2, "keep_best_checkpoints": 4,
}  # fmt: skip


def train(data: Path, folder: Path, flags: dict[str, Any], native: bool) -> Run:
    SEEN.clear()
    seeds, begin = [], dataloader._BaseDataLoaderIter.__init__

    def begun(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        seeds.append(self._base_seed)

    if native:
        flags = {**flags, **{part: flags[part].removeprefix("ls_") for part in runs.LS}}
    random.seed(5)
    with mock.patch.object(dataloader._BaseDataLoaderIter, "__init__", begun):
        runs.run(data, folder, native, **flags)
    return Run(list(SEEN), seeds, sorted(file.name for file in folder.glob("*.pt")))


@pytest.mark.parametrize("family", FAMILIES)
def test_other_code_draws_what_it_draws_in_fairseq(tmp_path: Path, family: str) -> None:
    write, flags = FAMILIES[family]
    data = write(tmp_path / "data")
    flags = {**flags, **dict.fromkeys(RATES, 0), **PRECISE}
    native = train(data, tmp_path / "native", flags, native=True)
    ours = train(data, tmp_path / "ours", flags, native=False)
    assert ours == native
    assert len({seen.torch for _, seen in ours.seen}) > 10  # fairseq seeds it before each update
    assert sum("checkpoint.best" in name for name in ours.files) >= 2
    # fairseq's dropout draws from torch's generator on a CPU, ours from none.
    dropping = train(data, tmp_path / "dropping", {**flags, **RATES}, native=False)
    assert (dropping.seen, dropping.seeds) == (ours.seen, ours.seeds)
    native = train(data, tmp_path / "native too", {**flags, **RATES}, native=True)
    assert [seen[:2] for _, seen in native.seen] == [seen[:2] for _, seen in ours.seen]


def test_fairseqs_own_step_draws_nothing_for_our_masks(tmp_path: Path) -> None:
    data = runs.corpus(tmp_path / "data")
    flags = {**runs.LS, **PRECISE, "store_ema": True}
    found = [
        train(data, tmp_path / name, {**flags, **rates}, native=False)
        for name, rates in (("plain", dict.fromkeys(RATES, 0)), ("dropping", RATES))
    ]
    assert found[0].seen == found[1].seen
    assert found[0].seeds == found[1].seeds


@pytest.mark.parametrize("flags", [{"store_ema": True}, {"encoder_layerdrop": 0.5}])
def test_a_resumed_run_draws_the_masks_of_an_uninterrupted_one(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    """In fairseq's own step."""
    data = runs.corpus(tmp_path / "data")
    flags = {**runs.LS, **RATES, **flags, "update_freq": 2}
    whole = runs.run(data, tmp_path / "whole", **flags, max_update=8)
    first = runs.run(data, tmp_path / "parts", **flags, max_update=3)
    assert first + runs.run(data, tmp_path / "parts", **flags, max_update=8) == whole
    folders = [tmp_path / name for name in ("whole", "parts")]
    assert runs.differing(*map(runs.trained, folders)) == []


@pytest.mark.parametrize("parts", [runs.LS, {**runs.LS, "optimizer": "adam"}], ids=["ls", "adam"])
def test_passes_of_an_update_draw_different_masks(
    tmp_path: Path, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fairseq's own step as in the captured one: by the number of updates and the pass."""
    drawn: list[list[int]] = []

    def noted(device: torch.device) -> torch.Tensor:
        rng = draw_rng(device)
        drawn.append(rng.tolist())
        return rng

    monkeypatch.setattr(dropout, "draw_rng", noted)
    flags = {**parts, **RATES, "update_freq": 2, "max_update": 3, "no_save": True}
    runs.run(runs.corpus(tmp_path / "data"), tmp_path, **flags, store_ema=True)
    assert drawn == [[3 + update, micro_batch] for update in range(3) for micro_batch in range(2)]
