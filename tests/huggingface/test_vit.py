"""Accelerated ViT: features, logits, losses and gradients of a plain one; and our Trainer."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from helpers.accelerated import (
    RANDOM_MODELS,
    assert_ours,
    assert_same,
    needs_captured_step,
    transformers,
)

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from scripts.random_models import VIT_HEADS, build, computed, random_batch, random_config

NAME = "ViTForImageClassification"


@pytest.mark.parametrize("name", [f"ViT{head}" for head in VIT_HEADS])
def test_random_models(name: str) -> None:
    source = random.Random(name)
    torch.manual_seed(1)
    for _ in range(RANDOM_MODELS):
        plain = build(name, **random_config(source, name))
        ours = lightseq.accelerate(copy.deepcopy(plain))
        batch = random_batch(source, plain)
        assert_same(*(computed(m, batch, output_hidden_states=True) for m in (ours, plain)))
        assert_ours(ours, 1)


def test_a_copy_is_accelerated() -> None:
    ours = lightseq.accelerate(build(NAME).eval())
    images = torch.randn(1, 3, 12, 12)
    torch.testing.assert_close(copy.deepcopy(ours)(images).logits, ours(images).logits)


def test_refusal() -> None:
    with pytest.raises(UserError, match=r"a head width of 4, which must be a multiple of 8"):
        lightseq.accelerate(build(NAME, num_attention_heads=4))


def test_dropout_rates_of_now() -> None:
    torch.manual_seed(2)
    plain = build(NAME, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    images = torch.randn(2, 3, 12, 12)
    first, second = (ours(pixel_values=images).logits for _ in range(2))
    assert not torch.equal(first, second)
    for model in (plain, ours):
        model.eval()
    torch.testing.assert_close(
        ours(pixel_values=images).logits, plain(pixel_values=images).logits, atol=1e-5, rtol=1e-5
    )
    assert_ours(ours, 3)


@needs_captured_step
def test_our_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    plain = build(NAME)
    images = [
        {"pixel_values": torch.randn(3, 12, 12) + label, "labels": label}
        for label in (0, 1, 2) for _ in range(8)
    ]  # fmt: skip
    losses = []
    for cls in (transformers.Trainer, lightseq.Trainer):
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = cls(copy.deepcopy(plain), args, train_dataset=images)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert_ours(trainer.model, 12)
    assert not caplog.text
