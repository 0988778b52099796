"""Accelerated ViT: features, logits, losses and gradients of a plain one; and our Trainer."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, needs_captured_step, transformers
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError

HEADS = ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling")


def build(name: str = "ViTForImageClassification", **config: Any) -> Any:
    cls = getattr(transformers, name)
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "image_size": 12, "patch_size": 4, "encoder_stride": 4,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
    }  # fmt: skip
    model = cls(cls.config_class(**{**sizes, **config})).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def computed(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    found = model(**batch, **options)
    loss = found.get("loss")
    if loss is None:
        loss = found.last_hidden_state.square().sum() + found.pooler_output.sum()
    loss.backward()
    return found, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", HEADS)
def test_random_models(name: str) -> None:
    source = random.Random(name)
    torch.manual_seed(1)
    for _ in range(10):
        heads, head = source.randint(1, 3), source.choice((8, 16))
        plain = build(
            name, hidden_size=heads * head, num_attention_heads=heads,
            num_hidden_layers=source.randint(1, 3), intermediate_size=8 * source.randint(1, 5),
            hidden_act=source.choice(("gelu", "relu", "gelu_new")),
            attn_implementation=source.choice(("sdpa", "eager")),
            qkv_bias=source.random() < 0.7,
        )  # fmt: skip
        ours = lightseq.accelerate(copy.deepcopy(plain))
        batch = {"pixel_values": torch.randn(source.randint(1, 4), 3, 12, 12)}
        if name.endswith("Classification"):
            batch["labels"] = torch.randint(3, (len(batch["pixel_values"]),))
        elif name.endswith("Modeling"):
            batch["bool_masked_pos"] = torch.rand(len(batch["pixel_values"]), 9) < 0.4
        mine, theirs = (computed(m, batch, output_hidden_states=True) for m in (ours, plain))
        near = {"atol": 1e-5, "rtol": 1e-5}
        assert mine[0].keys() == theirs[0].keys()
        for key, value in theirs[0].items():
            torch.testing.assert_close(mine[0][key], value, **near)
        assert mine[1].keys() == theirs[1].keys()
        for key, value in theirs[1].items():
            torch.testing.assert_close(mine[1][key], value, **near)
        assert_ours(ours, 1)


def test_a_copy_is_accelerated() -> None:
    ours = lightseq.accelerate(build().eval())
    images = torch.randn(1, 3, 12, 12)
    torch.testing.assert_close(copy.deepcopy(ours)(images).logits, ours(images).logits)


def test_refusal() -> None:
    with pytest.raises(UserError, match=r"a head width of 4, which must be a multiple of 8"):
        lightseq.accelerate(build(num_attention_heads=4))


def test_dropout_rates_of_now() -> None:
    torch.manual_seed(2)
    plain = build(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
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
    plain = build()
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
