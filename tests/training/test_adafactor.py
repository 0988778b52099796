"""fairseq's Adafactor in the captured step: its updates, files and options."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers.parity as parity
import helpers.training_runs as runs
import pytest
import torch
from fairseq.optim import adafactor as native
from helpers.parity import NATIVE, PRE_NORM, SHARED, Systems, command_line, compare, train

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.step.adafactor import Adafactor
from lightseq_fairseq.training import captured

OPTIMIZER: dict[str, Any] = {"optimizer": "adafactor", "adam_betas": None, "adam_eps": None}
OURS = Systems("ls", "native", "ls")  # the optimizer has fairseq's name
RUN: dict[str, Any] = {**runs.LS, **OPTIMIZER}
# Rates include the RMS of all parameters before, so noise in the keys' biases would reach all
# others. Here it is below the least RMS.
SCALED = {"scale_parameter": True, "lr": 1e-3, "lr_scheduler": "fixed", "warmup_updates": None}


@pytest.mark.parametrize(
    ("flags", "precise"),
    [
        ({}, False),
        ({**PRE_NORM, **SHARED, "beta1": 0.9, "weight_decay": 0.0}, False),
        ({**SCALED, "adafactor_eps": "(1e-12,1e-2)"}, False),
        ({"clip_threshold": 0.5, "decay_rate": -0.6, "clip_norm": 0.0}, False),
        ({"bf16": True, "beta1": 0.8}, True),
        ({"fp16": True, "fp16_no_flatten_grads": True, "fp16_init_scale": 4}, True),
    ],
    ids=["default", "moment", "scaled", "unclipped", "bf16", "fp16"],
)
def test_updates_are_those_of_fairseq(
    data: Path, flags: dict[str, Any], precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64; also with all that --bf16 and --fp16 change but the precision of numbers."""
    if precise:
        with parity.mixed_precision_in_float64():
            theirs = train(command_line(data, NATIVE, **OPTIMIZER, **flags), 10)
            ours = train(command_line(data, OURS, **OPTIMIZER, **flags), 10)
    else:
        theirs = train(command_line(data, NATIVE, **OPTIMIZER, **flags), 10)
        # fairseq's class would be found by its name.
        monkeypatch.setattr(native, "Adafactor", None)
        ours = train(command_line(data, OURS, **OPTIMIZER, **flags), 10)
    # The keys' biases have gradients of noise, of which Adafactor makes updates of full size.
    compare(ours, theirs, parity.TOLERANCE._replace(key_bias=1e-4))
    first, last = ours[0].parameters, ours[-1].parameters
    assert any((last[name] - first[name]).abs().max() > 1e-6 for name in first)


@pytest.mark.parametrize("precision", runs.PRECISIONS)
def test_runs_resume_exactly_and_in_fairseq(
    data: Path, tmp_path: Path, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    flags = {**RUN, **runs.PRECISIONS[precision], "beta1": 0.9}
    flags |= {"fp16_no_flatten_grads": True} if precision == "fp16" else {}
    whole = runs.run(data, tmp_path / "whole", **flags)
    first = runs.run(data, tmp_path / "parts", **flags, max_update=5)
    assert first + runs.run(data, tmp_path / "parts", **flags) == whole
    trained = [runs.trained(tmp_path / name) for name in ("whole", "parts")]
    assert runs.differing(*trained) == []
    assert "step: without CUDA graphs, without padding" in caplog.text
    # fairseq continues from our file, and we from fairseq's, with the same next loss.
    plain = {**flags, "dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
    theirs = {**plain, **runs.NATIVE, **OPTIMIZER}
    folders = [tmp_path / name for name in ("ours", "native")]
    runs.run(data, folders[0], **plain, max_update=4)
    runs.run(data, folders[1], native=True, **theirs, max_update=4)
    states = [
        torch.load(folder / "checkpoint_last.pt", weights_only=False)["last_optimizer_state"]
        for folder in folders
    ]
    kinds = [
        {i: {k: getattr(v, "shape", v) for k, v in x.items()} for i, x in s["state"].items()}
        for s in states
    ]
    assert kinds[0] == kinds[1]
    more = {"max_update": 6, "no_save": True}
    for folder in folders:
        file = {"restore_file": str(folder / "checkpoint_last.pt")}
        ours = runs.run(data, tmp_path / f"a{folder.name}", **plain, **file, **more)
        fairseqs = runs.run(data, tmp_path / f"b{folder.name}", True, **theirs, **file, **more)
        assert len(ours) == 2
        torch.testing.assert_close(
            ours, fairseqs, rtol=1e-5 if precision == "fp32" else 2e-2, atol=0
        )


def test_state_is_small_and_skipped_updates_change_nothing() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 5), (5,), (40, 8), ())]
    optimizer = Adafactor(parameters, lr=0.1, weight_decay=0.1)
    one = torch.ones((), dtype=torch.float64)

    def step(multiplier: float) -> None:
        gradient = torch.randn_like(optimizer.buffer.data)
        norm = torch.linalg.vector_norm(gradient)
        optimizer.update(gradient, None, one * 0.1, one * multiplier, norm, 1.0, 0.0)

    before = [p.detach().clone() for p in parameters]
    step(float("nan"))
    assert all(map(torch.equal, before, parameters))
    assert optimizer.state_dict()["state"] == {}
    step(1.0)
    assert all((p.detach() != b).all() for p, b in zip(parameters, before, strict=True))
    state = optimizer.state_dict()["state"]
    found = runs._tensors(state, "")
    assert sum(x.numel() for x in found.values()) == (6 + 5) + 5 + (40 + 8) + 1 + len(parameters)
    kept = {name: x.clone() for name, x in found.items()}
    step(float("inf"))
    assert runs.differing(runs._tensors(optimizer.state_dict()["state"], ""), kept) == []


def test_it_starts_without_torch_compile() -> None:
    """Whose import takes seconds."""
    script = """
import sys, torch
from lightseq_fairseq.step.adafactor import Adafactor
optimizer = Adafactor([torch.nn.Parameter(torch.ones(3, 2))], lr=0.1)
optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


def test_frozen_parameters_and_several_dtypes(data: Path, tmp_path: Path) -> None:
    flags = {**RUN, "bf16": True, "freeze": "encoder", "max_update": 4}
    losses = runs.run(data, tmp_path, **flags)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert len(losses) == 4
    vectors = len(state["last_optimizer_state"]["state"])
    assert 0 < vectors < len([name for name in state["model"] if "version" not in name])


@pytest.mark.parametrize("flag", ["relative_step", "warmup_init"])
def test_refused_options(data: Path, tmp_path: Path, flag: str) -> None:
    sentence = f"^--optimizer adafactor refuses --{flag.replace('_', '-')}, in fairseq too, "
    with pytest.raises(UserError, match=sentence):
        runs.run(data, tmp_path, **RUN, **{flag: True})


@pytest.mark.parametrize("first", [{"beta1": 0.9}, {}], ids=["moment", "none"])
def test_the_file_decides_whether_there_is_a_moment(
    data: Path, tmp_path: Path, first: dict[str, Any]
) -> None:
    """As in fairseq, whose options of the optimizer are the file's, too."""
    flags = {**RUN, "dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
    theirs, second = {**runs.NATIVE, **OPTIMIZER}, {} if first else {"beta1": 0.9}
    losses = []
    for is_native in (False, True):
        each, folder = {**flags, **(theirs if is_native else {})}, tmp_path / str(is_native)
        runs.run(data, folder, is_native, **each, **first, max_update=3)
        losses.append(runs.run(data, folder, is_native, **each, **second, max_update=8))
    assert len(losses[0]) == 5
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_state_of_another_optimizer(data: Path, tmp_path: Path) -> None:
    runs.run(data, tmp_path, **RUN, max_update=2)
    with pytest.raises(UserError, match=r"not that of Adafactor .* --reset-optimizer\.$"):
        runs.run(data, tmp_path, **RUN, freeze="encoder", max_update=4)


def test_adapters_alone(data: Path, tmp_path: Path) -> None:
    """A run whose trained parameters have no vector."""
    flags = {**RUN, "bf16": True, "lora_rank": 4}
    assert len(runs.run(data, tmp_path, **flags, max_update=2)) == 2
    assert len(runs.run(data, tmp_path, **flags, max_update=4)) == 2


def test_rates_that_compound_use_fairseqs_step(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """fairseq's Adafactor writes the scaled rate into the optimizer, and this schedule leaves it
    there until the epoch ends."""
    caplog.set_level(logging.INFO)
    flags = {**RUN, "scale_parameter": True, "lr_scheduler": "reduce_lr_on_plateau"}
    flags |= {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0, "max_update": 10}
    ours = runs.run(data, tmp_path / "ours", **flags)
    assert "(--scale-parameter with reduce_lr_on_plateau)" in caplog.text
    theirs = runs.run(data, tmp_path / "theirs", True, **{**flags, **runs.NATIVE, **OPTIMIZER})
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_sharded_runs_use_fairseqs_step(data: Path, tmp_path: Path) -> None:
    cfg = runs.configure(data, tmp_path, {**RUN, "zero_sharding": "os"})
    cfg.distributed_training.distributed_world_size = 2
    _, model, criterion = parity.build(cfg)
    trainer = type("T", (), {})()
    trainer.cfg, trainer.get_model = cfg, lambda: model
    trainer.get_criterion, trainer.data_parallel_world_size = lambda: criterion, 1
    trainer.task = _
    assert captured.fallback_reason(trainer) == "--zero-sharding os with adafactor"
