"""``accelerate(model, fp8=True)``: our Trainer computes the layers' products in fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, one_warning, pair, transformers
from test_trainers import CAPTURED, trained, trainer_of

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from scripts.random_models import PAD, batch_of, build, collated, mask_of

FEW = {"max_steps": 30, "warmup_steps": 2, "logging_steps": 5, "bf16": True}


class Seen(transformers.TrainerCallback):
    """The scales of fp8, and whether products have used them."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.histories: list[torch.Tensor] = []

    def on_step_end(self, *arguments: Any, **given: Any) -> None:
        self.histories.append(self.trainer._step._fp8._history[0].clone())


def seen(trainer: Any) -> tuple[list[float], Seen]:
    """The losses; all products have noted their operands in each update."""
    watch = Seen(trainer)
    trainer.add_callback(watch)
    log = trained(trainer).log
    assert all((history > 0).all() for history in watch.histories)
    return [line["loss"] for line in log], watch


def test_losses_are_near_those_of_bfloat16(tmp_path: Path) -> None:
    losses = []
    for fp8 in (False, True):
        trainer = trainer_of(tmp_path / str(fp8), CAPTURED, **FEW)
        lightseq.accelerate(trainer.model, fp8=fp8)
        if not fp8:
            losses.append([line["loss"] for line in trained(trainer).log])
            continue
        found, watch = seen(trainer)
        losses.append(found)
        assert watch.histories[0].shape == (3, 4)  # operands; products of one layer
        assert_ours(trainer.model)
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)


def test_encoder_and_decoder(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = build("Bart", encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layers=1)
    batches = [batch_of(model, mask_of([n % 11 + 2])) for n in range(24)]
    examples = [{name: x[0] for name, x in batch.items()} for batch in batches]
    args = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=8, per_device_train_batch_size=4, use_cpu=True, bf16=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=2, learning_rate=1e-3,
    )  # fmt: skip

    trainer = lightseq.Seq2SeqTrainer(
        lightseq.accelerate(model, fp8=True),
        args,
        train_dataset=examples,
        data_collator=lambda items: collated(items, PAD),
    )
    losses, watch = seen(trainer)
    # Of the encoder 4, of two layers of the decoder 6 each, and keys and values of both at once.
    assert watch.histories[0].shape == (3, 4 + 2 * 6 + 1)
    assert losses[-1] < losses[0]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^BertModel with a width of 24, which is no multiple of 16"
    ):
        lightseq.accelerate(build("BertModel"), fp8=True)
    with pytest.raises(UserError, match=r"^GPT2Model with matrices that are stored transposed"):
        lightseq.accelerate(build("GPT2LMHeadModel", n_inner=32), fp8=True)
    for settings, reason in (
        ({"bf16": False}, "^fp8 needs bfloat16: set bf16=True"),
        (
            {"torch_compile": True},
            "^fp8 needs the captured step, which does not run, because",
        ),
    ):
        trainer = trainer_of(tmp_path, CAPTURED, **{**FEW, **settings})
        lightseq.accelerate(trainer.model, fp8=True)
        with pytest.raises(UserError, match=reason):
            trainer.train()


def test_other_loops_warn_once() -> None:
    plain, ours = pair("BertForSequenceClassification", intermediate_size=32)
    lightseq.accelerate(ours, fp8=True)
    ids = torch.tensor([[3, 4, 5]])
    with one_warning("fp8 needs lightseq.Trainer"):
        found = ours(ids).logits
    torch.testing.assert_close(found, plain(ids).logits)
