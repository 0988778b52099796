"""DistributedDataParallel of accelerated models, and our Trainer, in two processes; and replicas of
DataParallel."""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers.accelerated import assert_ours, assert_same
from test_trainers import CAPTURED, PLAIN, trained, trainer_of
from torch import distributed, nn

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import batch_of, build, computed, mask_of


def compare(rank: int, models: list[Any], batches: list[list[Any]], autocast: bool) -> None:
    """Gradients of two batches, and of two that are accumulated."""
    plain, ours = (nn.parallel.DistributedDataParallel(model) for model in models)
    for batch in batches[rank]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = computed(ours, batch), computed(plain, batch)
        assert found.gradients and found.gradients.keys() == expected.gradients.keys()
        for gradient in found.gradients.values():
            of_all = [torch.empty_like(gradient) for _ in range(2)]
            distributed.all_gather(of_all, gradient)
            assert of_all[0].equal(of_all[1])
        if not autocast:
            assert_same(found, expected)
    sums = []
    for model in (ours, plain):
        model.zero_grad()
        with model.no_sync():
            model(**batches[rank][0]).loss.backward()
        model(**batches[rank][1]).loss.backward()
        sums.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*sums, atol=1e-5, rtol=1e-5)
    assert_ours(ours, len(batches[rank]) + 2)


def run(rank: int, file: str, results: Any, *given: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2)
    try:
        compare(rank, *given)
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())
    finally:
        distributed.destroy_process_group()


def train(rank: int, folder: Path, batches: int, bf16: bool) -> None:
    """Updates of both Trainers, with accumulation and clipping."""
    found = []
    for kind in (PLAIN, CAPTURED):
        trainer = trainer_of(
            folder / kind, kind, max_steps=12, warmup_steps=2, logging_steps=2, bf16=bf16,
            gradient_accumulation_steps=batches, max_grad_norm=0.5,
        )  # fmt: skip
        found.append(trained(trainer))
    assert trainer._step is None and trainer._why_plain is None and trainer.args.world_size == 2
    plain, ours = found
    assert len(ours.log) == len(plain.log) == 6
    near = 0.05 if bf16 else 1e-4
    for mine, theirs in zip(ours.log, plain.log, strict=True):
        assert mine == pytest.approx(theirs, rel=near, abs=near)
    for name, weight in ours.weights.items():
        of_all = [torch.empty_like(weight) for _ in range(2)]
        distributed.all_gather(of_all, weight.contiguous())
        assert of_all[0].equal(of_all[1]), name
        if not bf16 and not name.endswith("key.bias"):
            torch.testing.assert_close(weight, plain.weights[name], atol=1e-4, rtol=1e-4)


def run_trainers(rank: int, port: int, results: Any, *given: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="localhost", MASTER_PORT=str(port))  # fmt: skip
    AcceleratorState._reset_state(True)  # other tests of the parent process
    try:
        train(rank, *given)
        results.put("")
    except BaseException:
        results.put(traceback.format_exc())
    finally:
        distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def in_two_processes(function: Any, first: Any, *given: Any) -> None:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=function, args=(rank, first, results, *given)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = [results.get() for _ in processes]
    assert found == ["", ""], "\n".join(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forked processes cannot train after CUDA")
@pytest.mark.parametrize(("batches", "bf16"), [(3, False), (2, True)])
def test_our_trainer_in_two_processes(tmp_path: Path, batches: int, bf16: bool) -> None:
    in_two_processes(run_trainers, free_port(), tmp_path, batches, bf16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forked processes cannot train after CUDA")
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_two_processes(tmp_path: Path, autocast: bool) -> None:
    plain = build("BertForSequenceClassification")
    models = [plain, lightseq.accelerate(copy.deepcopy(plain))]
    lengths = [[(4, 7), (3, 5)], [(2, 9), (6, 1)]]
    batches = [[batch_of(plain, mask_of(each)) for each in of_rank] for of_rank in lengths]
    in_two_processes(run, str(tmp_path / "store"), models, batches, autocast)


def replica_of(model: Any) -> Any:
    """As ``nn.DataParallel`` makes them: parameters are attributes, and no leaves."""
    made = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in made.items():
        for name, child in module.named_children():
            replica._modules[name] = made[child]
        for name, parameter in module._parameters.items():
            setattr(replica, name, None if parameter is None else parameter * 1)
    return made[model]


@pytest.mark.parametrize("autocast", [False, True])
def test_replicas(autocast: bool) -> None:
    plain = build("BertForSequenceClassification")
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = batch_of(plain, mask_of((4, 7, 2)))
    expected = computed(plain, batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = replica_of(ours)(**batch).loss
    loss.backward()
    near = 0.05 if autocast else 1e-5
    torch.testing.assert_close(loss, expected.loss, atol=near, rtol=near)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected.gradients[name], atol=near, rtol=near)
    assert_ours(ours, 1)
