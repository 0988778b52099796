"""The captured step on several ranks, with one GPU each (over NCCL) or with one GPU for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch
from helpers.ops_testing import skip_without_fp8
from helpers.training_runs import ON_GPU

from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.parameters import flatten_parameters
from lightseq_fairseq.memory.passes import Pass
from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.step.exchange import Exchange, Ranks

pytestmark = pytest.mark.gpu

PLAIN = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, each process would time cuBLASLt algorithms itself, and the bits depend on its
    # choice.
    monkeypatch.setenv("LIGHTSEQ_LINEAR_SEARCH", "0")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("data"))


def _captures(*arguments: Any) -> None:
    """A rank whose captures must not fail."""
    with mock.patch.object(Graphs, "_forget_failure", side_effect=AssertionError("not captured")):
        runs.run_rank(*arguments)


@pytest.mark.parametrize(
    "flags",
    [
        {"bf16": True},
        {"fp16": True},
        {"bf16": True, "zero_sharding": "os"},
        {"fp16": True, "zero_sharding": "os", "fp32_reduce_scatter": True, "update_freq": 2},
        {"bf16": True, "fp8": True},
        {"bf16": True, "fp8": True, "zero_sharding": "os"},
    ],
    ids=lambda flags: " ".join(flags),
)
def test_captured_ranks_are_eager_ones_and_one_with_twice_the_batches(
    data: Path, tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "fp8" in flags:
        skip_without_fp8()
    flags = {**ON_GPU, **PLAIN, **flags, "max_update": 24, "ddp_backend": "pytorch_ddp"}
    found = {}
    for captured in "10":
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", captured)
        found[captured] = runs.run_ranks(data, tmp_path / captured, 2, start=_captures, **flags)
    assert found["1"] == found["0"]
    assert found["1"][0] == found["1"][1]
    assert runs.differing(runs.trained(tmp_path / "1"), runs.trained(tmp_path / "0")) == []
    monkeypatch.delenv("LIGHTSEQ_CAPTURE")
    flags["update_freq"] = 2 * flags.get("update_freq", 1)
    alone = runs.run(data, tmp_path / "alone", **flags)
    assert len(alone) == 24
    torch.testing.assert_close(found["1"][0], alone, rtol=2e-2, atol=0)


def test_a_resumed_run_with_sharded_state_is_the_whole_one(data: Path, tmp_path: Path) -> None:
    flags = {**ON_GPU, "bf16": True, "zero_sharding": "os", "max_update": 12}
    whole = runs.run_ranks(data, tmp_path / "whole", 2, **flags)
    runs.run_ranks(data, tmp_path / "first", 2, **{**flags, "max_update": 5})
    last = f"{tmp_path}/first/checkpoint_last.pt"
    rest = runs.run_ranks(data, tmp_path / "rest", 2, **flags, restore_file=last)
    assert rest == [losses[5:] for losses in whole]
    found = runs.trained(tmp_path / "whole")
    assert runs.differing(found, runs.trained(tmp_path / "rest")) == []


def _out_of_memory(*arguments: Any) -> None:
    """A rank whose third batch does not fit at first, if it is rank 1."""
    packed_logits, calls = LSTransformerModel.packed_logits, 0

    def fails(self: LSTransformerModel, *batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if torch.distributed.get_rank() == 1 and calls == 3:
            raise RuntimeError("CUDA out of memory: a test wanted all of it")
        return packed_logits(self, *batch)

    with mock.patch.object(LSTransformerModel, "packed_logits", fails):
        runs.run_rank(*arguments)


@pytest.mark.parametrize("sharding", ["none", "os"])
def test_a_rank_that_is_out_of_memory_starts_again(
    data: Path, tmp_path: Path, sharding: str
) -> None:
    flags = {**ON_GPU, **PLAIN, "bf16": True, "zero_sharding": sharding, "max_update": 12}
    plain = runs.run_ranks(data, tmp_path / "plain", 2, **flags)
    again = runs.run_ranks(data, tmp_path / "again", 2, start=_out_of_memory, **flags)
    assert again == plain
    assert runs.differing(runs.trained(tmp_path / "again"), runs.trained(tmp_path / "plain")) == []


def test_a_piece_is_sent_while_its_graph_runs() -> None:
    """And only after the replay that was launched last has finished it."""
    module = torch.nn.Linear(1024, 1024, device="cuda")
    (low,) = flatten_parameters(module)
    exchange = Exchange(Ranks(2), low)
    flat, stream = exchange.gradients.flat, torch.cuda.Stream()
    graph, cycles = torch.cuda.CUDAGraph(), 50_000_000
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.cuda._sleep(cycles)
        flat.add_(1)
        exchange.finish_all()
        torch.cuda._sleep(cycles)
        graph.capture_end()
    for replay in range(1, 4):
        graph.replay()
        ended, copies, copied = torch.cuda.Event(), [], torch.cuda.Event()
        ended.record()

        def send(
            x: torch.Tensor, copies: Any = copies, copied: Any = copied, **options: Any
        ) -> None:
            copies.append(x.clone())
            copied.record()

        with mock.patch.object(torch.distributed, "all_reduce", send):
            exchange.add_up()
        copied.synchronize()
        assert not ended.query()
        assert torch.cat(copies).unique().tolist() == [replay]
        torch.cuda.synchronize()


def test_a_replay_waits_for_the_gathers_before_its_launch() -> None:
    """And not for later ones, which wait for the replay."""
    module = torch.nn.Linear(1024, 1024, device="cuda")
    (low,) = flatten_parameters(module)
    exchange = Exchange(Ranks(2, sharded=True), low)
    read, graph, cycles = low.zeros(), torch.cuda.CUDAGraph(), 50_000_000
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        exchange.begin_forward()
        around = Pass(exchange.gradients, wait_until=exchange.wait_until)
        with torch.no_grad(), around.entered():
            around.wait_for(module.parameters())
            read.copy_(low.data)
            around.end_forward()
        exchange.finish_all()
        graph.capture_end()

    def send(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        torch.cuda._sleep(cycles)
        x.add_(1)
        return mock.Mock()

    with torch.no_grad():
        low.data.zero_()
    torch.cuda.synchronize()
    copies = []
    with mock.patch("lightseq_fairseq.step.exchange._all_gather", send):
        for _ in range(3):
            exchange.gather()
            graph.replay()
            copies.append(read.clone())
        exchange.wait()
        copies.append(low.data.clone())
    torch.cuda.synchronize()
    assert [x.unique().tolist() for x in copies] == [[1], [2], [3], [3]]
