"""Accelerated ModernBERT on a GPU: the errors of a plain one, and graphs that compute what their
functions do."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from helpers.accelerated import assert_ours
from helpers.ops_testing import skip_without_fp8
from test_modernbert import build, trained

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import batch_of, mask_of

MODES = ("bfloat16", "autocast", "float32")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "local_attention": 64, "vocab_size": 64}


def gradients(model, batch, mode):
    """All gradients as one vector, float64."""
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
        loss = model(**batch).loss
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def batches(model, longest):
    source = random.Random(longest)
    masks = [mask_of([source.randint(1, longest) for _ in range(6)]) for _ in range(3)]
    made = [batch_of(model, mask, types=False) for mask in masks]
    return [{name: x.cuda() for name, x in batch.items()} for batch in made]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("longest", [60, 700])
@pytest.mark.parametrize("name", ["ForMaskedLM", "ForSequenceClassification"])
def test_error_against_float64(name, longest, mode):
    """Windows, rotations and gates of short sentences and of long ones, which other kernels
    compute."""
    exact = build(name, torch.float64, **SIZES).cuda()
    dtype, squares = torch.bfloat16 if mode == "bfloat16" else torch.float32, [0.0, 0.0]
    models = [copy.deepcopy(exact).to(dtype) for _ in squares]
    lightseq.accelerate(models[0])
    for batch in batches(exact, longest):
        right = gradients(exact, batch, "")
        for system, model in enumerate(models):
            error = gradients(model, batch, mode) - right
            squares[system] += float(error.norm() / right.norm())
    assert_ours(models[0])
    # Hugging Face's autocast keeps residuals in float32, see docs/notebook/parity.md.
    most = {"bfloat16": 2.0, "autocast": 3.0, "float32": 20.0}[mode]
    assert 0 < squares[0] < most * squares[1], squares


@pytest.mark.parametrize("mode", MODES)
def test_features_come_from_graphs(mode):
    model = lightseq.accelerate(build("Model", **SIZES).eval().cuda())
    model = model.bfloat16() if mode == "bfloat16" else model
    for batch in 4 * batches(model, 300):
        with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
            expected = model(**batch, output_hidden_states=True).last_hidden_state  # eager
            with torch.no_grad():
                found = model(**batch).last_hidden_state
        error = 1e-4 if mode == "float32" else 0.1
        torch.testing.assert_close(found, expected, atol=error, rtol=error)
    assert model._lightseq.family._features._graphs._graphs  # some are captured
    assert_ours(model, 24)


@pytest.mark.parametrize("mode", ["float32", "bf16", "fp8"])
def test_captured_is_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Bitwise, with dropout of all kinds."""
    if mode == "fp8":
        skip_without_fp8()
    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), 0.2)
    model, runs = build(**SIZES, **rates), []
    if mode == "fp8":
        lightseq.accelerate(model, fp8=True)
    for captures in ("1", "0"):
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", captures)
        losses, trainer = trained(
            tmp_path, lightseq.Trainer, model, use_cpu=False, bf16=mode != "float32", max_steps=40
        )
        runs.append((losses, [p.detach().clone() for p in trainer.model.parameters()]))
        assert_ours(trainer.model)
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
