"""The captured step on several ranks, here over gloo on a CPU, where kernels are launched one by
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch

from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.training.step import TrainingStep
from lightseq_fairseq.training.trainer import Trainer

PLAIN = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "no_save": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs of seven batches: in the last update, one of two ranks has no batch."""
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    "flags",
    [{}, {"update_freq": 2}, {"bf16": True}, {"fp16": True}, {"sentence_avg": True}],
    ids=lambda flags: " ".join(flags) or "fp32",
)
def test_two_ranks_make_the_updates_of_one_with_twice_the_batches(
    data: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    flags = {**runs.LS, **PLAIN, **flags, "max_update": 12}
    both = runs.run_ranks(data, tmp_path / "ranks", 2, **flags)
    assert both[0] == both[1]
    flags["update_freq"] = 2 * flags.get("update_freq", 1)
    expected = runs.run(data, tmp_path / "one", **flags)
    assert len(expected) == 12
    torch.testing.assert_close(both[0], expected, rtol=2e-2 if "16" in str(flags) else 1e-5, atol=0)


def test_two_ranks_train_as_fairseqs(data: Path, tmp_path: Path) -> None:
    flags = {**PLAIN, "max_update": 16, "clip_norm": 0.5}
    ours = runs.run_ranks(data, tmp_path / "a", 2, **runs.LS, **flags)
    theirs = runs.run_ranks(data, tmp_path / "b", 2, native=True, **runs.NATIVE, **flags)
    assert len(ours[0]) == 16
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_each_rank_draws_masks_of_its_own(data: Path, tmp_path: Path) -> None:
    run = TrainingStep.update

    def recorded(self: TrainingStep, *arguments: Any) -> Any:
        with (tmp_path / f"seeds{torch.distributed.get_rank()}").open("a") as file:
            print(self.rng.tolist(), file=file)
        return run(self, *arguments)

    with mock.patch.object(TrainingStep, "update", recorded):
        runs.run_ranks(data, tmp_path / "ranks", 2, **runs.LS, no_save=True, max_update=5)
    seeds = [(tmp_path / f"seeds{rank}").read_text().split("\n") for rank in range(2)]
    assert [len(lines) for lines in seeds] == [6, 6]
    assert len({*seeds[0], *seeds[1]} - {""}) == 10


@pytest.mark.parametrize("for_good", [True, False])
def test_a_rank_that_is_out_of_memory_keeps_the_others_company(
    data: Path, tmp_path: Path, for_good: bool
) -> None:
    """Its batch does not count, as if the rank had none."""
    packed_logits, calls = LSTransformerModel.packed_logits, 0

    def fails(self: LSTransformerModel, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if torch.distributed.get_rank() == 1 and calls in (3, 4 if for_good else 3):
            raise RuntimeError("CUDA out of memory: a test wanted all of it")
        return packed_logits(self, *arguments)

    flags = {**runs.LS, **PLAIN, "max_update": 9}
    plain = runs.run_ranks(data, tmp_path / "plain", 2, **flags)
    with mock.patch.object(LSTransformerModel, "packed_logits", fails):
        losses = runs.run_ranks(data, tmp_path / "fails", 2, **flags)
    assert losses[0] == losses[1]
    assert len(losses[0]) == 9
    assert losses[0][:2] == plain[0][:2]
    if for_good:
        assert losses[0][2] < 0.8 * plain[0][2]  # the sum over one batch instead of two
    else:
        assert losses == plain


def test_ranks_stop_by_the_clock_together(data: Path, tmp_path: Path) -> None:
    def clock(self: Trainer) -> float:
        """Rank 1 has started later, or its clock is slow."""
        return 3600.0 * (self.get_num_updates() + 1) * (2 - torch.distributed.get_rank())

    with mock.patch.object(Trainer, "_local_cumulative_training_time", clock):
        losses = runs.run_ranks(
            data, tmp_path / "ranks", 2, **runs.LS, no_save=True, max_update=50, stop_time_hours=9
        )
    assert losses[0] == losses[1]
    assert 6 <= len(losses[0]) <= 9


def test_a_gradient_that_is_not_finite_on_one_rank_stops_both(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    packed_logits, calls = LSTransformerModel.packed_logits, 0

    def planted(self: LSTransformerModel, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        logits = packed_logits(self, *arguments)
        return logits * float("nan") if torch.distributed.get_rank() == calls - 2 == 1 else logits

    flags = {**runs.LS, **PLAIN, "max_update": 9}
    with (
        mock.patch.object(LSTransformerModel, "packed_logits", planted),
        pytest.raises(AssertionError),
    ):
        runs.run_ranks(data, tmp_path / "ranks", 2, **flags)
    saved = f"The state before this update is saved in {tmp_path}/ranks/crash.pt"
    told = f"gradients are Nan/Inf in update 3. {saved}"
    assert capfd.readouterr().err.count(f"FloatingPointError: {told}") == 2
    assert torch.load(tmp_path / "ranks" / "crash.pt", weights_only=False)
