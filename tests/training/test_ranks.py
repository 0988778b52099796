"""The captured step on several ranks, here over gloo on a CPU, where kernels are launched one by
one."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch
from fairseq.models.transformer import TransformerModelBase

from lightseq_fairseq import ops
from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.step.adam_state import AdamState
from lightseq_fairseq.step.exchange import Exchange
from lightseq_fairseq.step.training_step import TrainingStep
from lightseq_fairseq.training.trainer import Trainer

PLAIN = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "no_save": True}
SHARDED = {"zero_sharding": "os"}


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


def test_gradients_on_the_wire_as_float32(data: Path, tmp_path: Path) -> None:
    """Their sum is closer to that of float32 gradients than a sum in bfloat16 is."""
    flags: dict[str, Any] = {**runs.LS, **PLAIN, "no_save": None, "max_update": 1, "clip_norm": 0}
    wide = {"fp32_reduce_scatter": True}
    found = {}
    for name, more in {
        "exact": wide,  # does nothing in fp32
        "narrow": {"bf16": True},
        "wide": {"bf16": True, **wide},
        "sharded": {"bf16": True, **wide, **SHARDED},
    }.items():
        runs.run_ranks(data, tmp_path / name, 3, **flags, **more)
        found[name] = runs.trained(tmp_path / name)
    assert runs.differing(found["wide"], found["sharded"]) == []

    def error(name: str) -> float:
        means = [key for key in found[name] if key.endswith("/exp_avg")]
        return sum(float((found[name][k] - found["exact"][k]).square().sum()) for k in means)

    assert 0 < error("wide") < error("narrow")


@contextmanager
def in_forward_of_rank_1(number: int, change: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """In rank 1 of two, forward pass ``number`` of a process returns ``change`` of its logits."""
    packed_logits, calls = LSTransformerModel.packed_logits, 0

    def changed(self: LSTransformerModel, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        logits = packed_logits(self, *arguments)
        is_chosen = torch.distributed.get_rank() == 1 and calls == number
        return change(logits) if is_chosen else logits

    with mock.patch.object(LSTransformerModel, "packed_logits", changed):
        yield


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Makes models and their updates float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_same_training(ours: Path, theirs: Path, **tolerance: float) -> None:
    """The last checkpoints hold the same parameters, moments and step counts."""
    found, expected = runs.trained(ours), runs.trained(theirs)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **tolerance, msg=name)
    found, expected = (
        torch.load(folder / "checkpoint_last.pt", weights_only=False)["last_optimizer_state"]
        for folder in (ours, theirs)
    )
    assert [x["step"] for x in found["state"].values()] == [
        x["step"] for x in expected["state"].values()
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.usefixtures("in_float64")
def test_ranks_are_one_process_with_more_batches(data: Path, tmp_path: Path, ranks: int) -> None:
    """In float64; the batches of an update have different shapes, and some ranks have none."""
    flags = {**runs.LS, **PLAIN, "no_save": None, "max_update": 9, "decoder_layers": 2}
    micro = 4 - ranks
    one = runs.run(data, tmp_path / "one", **flags, update_freq=ranks * micro)
    assert len(one) == 9
    for name, more in {"whole": {}, "sharded": SHARDED}.items():
        found = runs.run_ranks(
            data, tmp_path / name, ranks, **flags, **more, update_freq=micro
        )  # fmt: skip
        torch.testing.assert_close(found, [one] * ranks, rtol=1e-11, atol=0)
        assert_same_training(tmp_path / name, tmp_path / "one", rtol=1e-9, atol=1e-14)


@pytest.mark.usefixtures("in_float64")
def test_sharded_checkpoints_go_on_with_any_number_of_ranks(data: Path, tmp_path: Path) -> None:
    flags = {**runs.LS, **PLAIN, "no_save": None, "max_update": 0, "no_epoch_checkpoints": True}
    one = runs.run(data, tmp_path / "one", **flags, max_epoch=3, update_freq="2,1,3")
    losses: list[float] = []
    for epoch, ranks in enumerate((2, 1, 3), start=1):
        folder = tmp_path / f"epoch{epoch}"
        more = {"restore_file": f"{tmp_path}/epoch{epoch - 1}/checkpoint_last.pt"}
        more = {**flags, **SHARDED, "max_epoch": epoch, **(more if epoch > 1 else {})}
        losses += (
            runs.run(data, folder, **more)
            if ranks == 1
            else runs.run_ranks(data, folder, ranks, **more)[0]
        )
    torch.testing.assert_close(losses, one, rtol=1e-11, atol=0)
    assert_same_training(folder, tmp_path / "one", rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_resumed_run_with_sharded_state_is_the_whole_one(
    data: Path, tmp_path: Path, precision: str
) -> None:
    """Bit for bit, also the float32 parameters; sharding itself changes what rounding does."""
    flags = {**runs.LS, **runs.PRECISIONS[precision], "max_update": 8}
    whole = runs.run_ranks(data, tmp_path / "whole", 2, **flags, **SHARDED)
    runs.run_ranks(data, tmp_path / "first", 2, **{**flags, **SHARDED, "max_update": 3})
    last = f"{tmp_path}/first/checkpoint_last.pt"
    rest = runs.run_ranks(data, tmp_path / "rest", 2, **flags, **SHARDED, restore_file=last)
    assert rest == [losses[3:] for losses in whole]
    found = runs.trained(tmp_path / "whole")
    assert runs.differing(found, runs.trained(tmp_path / "rest")) == []
    plain = runs.run_ranks(data, tmp_path / "plain", 2, **flags)
    torch.testing.assert_close(whole, plain, rtol=1e-3, atol=0)


def test_sharded_state_takes_the_memory_of_a_part(data: Path, tmp_path: Path) -> None:
    update, found = TrainingStep.update, {}

    def weighed(self: TrainingStep, *arguments: Any) -> Any:
        report = update(self, *arguments)
        tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        numbers = {"all": sum(storages.values()), "model": len(self.low.data)}
        file = save_dir / f"bytes{torch.distributed.get_rank()}"
        file.write_text(json.dumps(numbers))
        return report

    flags = {**runs.LS, **PLAIN, "bf16": True, "encoder_embed_dim": 128, "max_update": 2}
    for name, more in {"whole": {}, "sharded": SHARDED}.items():
        save_dir = tmp_path / name
        with mock.patch.object(TrainingStep, "update", weighed):
            runs.run_ranks(data, save_dir, 2, **flags, **more)
        found[name] = [json.loads((save_dir / f"bytes{rank}").read_text()) for rank in range(2)]
    for whole, sharded in zip(found["whole"], found["sharded"], strict=True):
        state = 3 * 4 * whole["model"]  # float32 parameters and two moments
        assert whole["all"] - sharded["all"] == pytest.approx(state / 2, rel=0.1)


def test_an_overflow_on_one_rank_skips_the_update_on_all(data: Path, tmp_path: Path) -> None:
    flags = {**runs.LS, **PLAIN, **runs.PRECISIONS["fp16"], "no_save": None, "max_update": 7}
    losses = {}
    for name, more in {"whole": {}, "sharded": SHARDED}.items():
        with in_forward_of_rank_1(4, lambda logits: logits * float("inf")):
            losses[name] = runs.run_ranks(data, tmp_path / name, 2, **flags, **more)
        saved = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)
        assert saved["last_optimizer_state"]["loss_scale"] == 64
        assert saved["last_optimizer_state"]["state"][0]["step"] == 7
        assert losses[name][0] == losses[name][1]
        assert len(losses[name][0]) == 7
    torch.testing.assert_close(losses["sharded"], losses["whole"], rtol=1e-3, atol=0)


def test_a_killed_rank_ends_the_others_and_more_ranks_go_on(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = {**runs.LS, **PLAIN, **SHARDED, "no_save": None, "max_update": 9}
    with in_forward_of_rank_1(6, runs.die), pytest.raises(AssertionError):
        runs.run_ranks(data, tmp_path / "dies", 2, **flags, save_interval_updates=3)
    assert "Error" in capfd.readouterr().err  # of rank 0
    last = tmp_path / "dies/checkpoint_last.pt"
    losses = runs.run_ranks(data, tmp_path / "rest", 3, **flags, restore_file=str(last))
    assert [len(x) for x in losses] == [3] * 3  # the last checkpoint is after update 6
    assert losses[0] == losses[1] == losses[2]


def test_two_ranks_train_as_fairseqs(data: Path, tmp_path: Path) -> None:
    flags = {**PLAIN, "max_update": 16, "clip_norm": 0.5}
    ours = runs.run_ranks(data, tmp_path / "a", 2, **runs.LS, **flags)
    theirs = runs.run_ranks(data, tmp_path / "b", 2, native=True, **runs.NATIVE, **flags)
    assert len(ours[0]) == 16
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def _without_wrapper(*arguments: Any) -> None:
    target = "fairseq.models.distributed_fairseq_model.DistributedDataParallel"
    with mock.patch(target, side_effect=AssertionError("our step needs no wrapper")):
        runs.run_rank(*arguments)


def test_our_step_runs_without_fairseqs_wrapper(data: Path, tmp_path: Path) -> None:
    """Whose autograd nodes belong to the default stream, so that backward cannot be captured."""
    flags = {**runs.LS, **PLAIN, "max_update": 3, "ddp_backend": "pytorch_ddp"}
    assert len(runs.run_ranks(data, tmp_path / "run", 2, start=_without_wrapper, **flags)[0]) == 3


def _moved_once(*arguments: Any) -> None:
    moves = []
    to = torch.nn.Module.to

    def recorded(self: Any, *args: Any, **named: Any) -> Any:
        is_move = any(isinstance(x, torch.device) for x in (*args, *named.values()))
        if isinstance(self, TransformerModelBase) and is_move:
            moves.append(self)
        return to(self, *args, **named)

    with mock.patch.object(torch.nn.Module, "to", recorded):
        runs.run_rank(*arguments)
    assert len(moves) == 1


@pytest.mark.parametrize("parts", [runs.LS, runs.NATIVE], ids=["ls", "fairseq"])
def test_a_rank_moves_its_model_once(data: Path, tmp_path: Path, parts: dict[str, Any]) -> None:
    """Before its wrapper, fairseq leaves the model on the CPU, where --cpu-offload needs it."""
    flags = {**parts, **PLAIN, "max_update": 2, "ddp_backend": "pytorch_ddp"}
    assert len(runs.run_ranks(data, tmp_path / "run", 2, start=_moved_once, **flags)[0]) == 2


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


END_OF_STEP: dict[str, tuple[Any, str]] = {
    "squares": (Exchange, "squares"),  # in the counts, before the last collective
    "norm": (ops, "adam_norm"),  # in the update
    "parameters": (AdamState, "update"),  # in the update, after the state has changed
}


@contextmanager
def out_of_memory_in_rank_1(place: str, calls: tuple[int, ...]) -> Iterator[None]:
    """In rank 1, these calls of a function at the end of the step fail; from 1 in each process."""
    owner, name = END_OF_STEP[place]
    original, count = getattr(owner, name), 0

    def fails(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if torch.distributed.get_rank() == 1 and count in calls:
            raise RuntimeError("CUDA out of memory: a test wanted all of it")
        return original(*arguments, **options)

    with mock.patch.object(owner, name, fails):
        yield


@pytest.mark.parametrize(("place", "flags"), [("norm", {}), ("squares", SHARDED)])
def test_a_rank_that_is_out_of_memory_completes_its_update(
    data: Path, tmp_path: Path, place: str, flags: dict[str, Any]
) -> None:
    """Its collectives have begun, so it must not begin them again without a batch."""
    flags = {**runs.LS, **PLAIN, "no_save": None, **flags, "max_update": 6}
    plain = runs.run_ranks(data, tmp_path / "plain", 2, **flags)
    with out_of_memory_in_rank_1(place, (3,)):
        losses = runs.run_ranks(data, tmp_path / "fails", 2, **flags)
    assert losses == plain
    trained = (runs.trained(tmp_path / name) for name in ("plain", "fails"))
    assert runs.differing(*trained) == []


@pytest.mark.parametrize(
    ("place", "flags", "calls"),
    [("norm", {}, (3, 4)), ("squares", SHARDED, (3, 4)), ("parameters", {}, (3,))],
)
def test_a_rank_that_cannot_complete_its_update_ends_all(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str,
    flags: dict[str, Any], calls: tuple[int, ...],
) -> None:  # fmt: skip
    with out_of_memory_in_rank_1(place, calls), pytest.raises(AssertionError):
        runs.run_ranks(data, tmp_path / "ranks", 2, **runs.LS, **PLAIN, **flags, max_update=6)
    assert "The GPU has no memory left to complete an update" in capfd.readouterr().err


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
    flags = {**runs.LS, **PLAIN, "max_update": 9}
    with (
        in_forward_of_rank_1(3, lambda logits: logits * float("nan")),
        pytest.raises(AssertionError),
    ):
        runs.run_ranks(data, tmp_path / "ranks", 2, **flags)
    told = (
        "FloatingPointError: gradients are Nan/Inf in update 3: training has diverged. Lower --lr"
    )
    said = re.findall(f"{told}.*", capfd.readouterr().err)
    assert len(said) == 2 and f"--restore-file {tmp_path}/ranks/crash.pt " in said[0]
    assert torch.load(tmp_path / "ranks" / "crash.pt", weights_only=False)
