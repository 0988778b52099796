"""Accelerated sequence-to-sequence models: logits, losses, gradients and words of plain ones."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import (
    RANDOM_MODELS,
    assert_ours,
    assert_same,
    needs_captured_step,
    transformers,
)
from test_our_trainer import opened

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface import batch as batches
from lightseq_fairseq.huggingface.covered import Reads
from scripts.random_models import (
    EOS,
    PAD,
    PAIRS,
    batch_of,
    build,
    by_graphs,
    collated,
    computed,
    mask_of,
    random_batch,
    random_config,
)

WORDS = 40


@pytest.mark.parametrize("family", PAIRS)
def test_random_models_and_batches(family: str) -> None:
    """Logits of all rows of the target, since a decoder without a mask has no pads."""
    source = random.Random(f"{family}")
    torch.manual_seed(3)
    for number in range(RANDOM_MODELS):
        plain = build(family, **random_config(source, family))
        ours, passes = lightseq.accelerate(copy.deepcopy(plain)), 1 + number % 2
        for _ in range(5):
            batch = random_batch(source, plain)
            with by_graphs(passes == 2):
                for _ in range(passes):  # the second pass of a shape is captured
                    found = computed(ours, batch)
            assert_same(found, computed(plain, batch))
        assert_ours(ours, 10 * passes)


@pytest.mark.parametrize("family", PAIRS)
def test_evaluation(family: str) -> None:
    """It makes a cache, which is Hugging Face's."""
    torch.manual_seed(4)
    plain = build(family).eval()
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = random_batch(random.Random(5), plain)
    with torch.no_grad():
        losses = [model(**batch).loss for model in (plain, ours)]
        fast = ours(**batch, use_cache=False).loss
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(fast, losses[0], atol=1e-5, rtol=1e-5)
    coverage = lightseq.report(ours)
    # With labels only M2M-100 makes a cache.
    assert coverage.calls == (1 if family == "M2M100" else 2) + 2
    assert all("cache" in reason for reason in coverage.fallbacks)


@pytest.mark.parametrize("cls", ["BartForSequenceClassification", "BartForQuestionAnswering"])
def test_other_heads_of_bart(cls: str) -> None:
    torch.manual_seed(6)
    plain = build(cls)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    mask = mask_of((7, 4, 9))
    ids = torch.randint(3, WORDS, mask.shape)
    ids[torch.arange(3), torch.tensor([6, 3, 8])] = EOS
    batch = {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}
    if cls.endswith("Answering"):
        batch |= {
            "start_positions": torch.tensor([0, 1, 2]),
            "end_positions": torch.tensor([1, 2, 3]),
        }
    else:
        batch["labels"] = torch.tensor([0, 2, 1])
    results = []
    for model in (ours, plain):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append((loss, {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=1e-5)
    for name, gradient in results[1][1].items():
        if gradient is not None:
            torch.testing.assert_close(results[0][1][name], gradient, atol=1e-5, rtol=1e-5)


def test_masks_of_the_target() -> None:
    torch.manual_seed(7)
    plain = build("Bart")
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = random_batch(random.Random(8), plain)
    batch["decoder_attention_mask"] = batch["labels"].ne(-100).long()
    mine, theirs = computed(ours, batch), computed(plain, batch)
    torch.testing.assert_close(mine.loss, theirs.loss, atol=1e-5, rtol=1e-5)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, atol=1e-5, rtol=1e-5)
    assert_ours(ours)


def test_layer_drop_draws_what_hugging_face_draws() -> None:
    plain = build("M2M100", encoder_layerdrop=0.5, decoder_layerdrop=0.5, encoder_layers=4)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = random_batch(random.Random(9), plain)
    losses = []
    for seed in range(6):
        found = []
        for model in (ours, plain):
            torch.manual_seed(seed)
            found.append(computed(model, batch))
        assert_same(*found)
        losses.append(round(float(found[0].loss), 5))
    assert len(set(losses)) > 2
    assert_ours(ours)


def test_dropout_rates_of_now() -> None:
    torch.manual_seed(10)
    plain = build("Marian", dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = random_batch(random.Random(11), plain)
    seeds = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seeds.append(float(ours(**batch).loss))
    assert seeds[0] == seeds[1] != seeds[2]
    for model in (plain, ours):
        for module in model.modules():
            for name in ("dropout", "activation_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours)


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize("family", ["Bart", "M2M100"])
def test_bfloat16_error(family: str, kind: str) -> None:
    """At most twice Hugging Face's own, against float64."""
    torch.manual_seed(12)
    source, errors = random.Random(13), {"ours": 0.0, "plain": 0.0}
    for _ in range(4):
        exact = build(family, d_model=32, scale_embedding=True).double()
        batches = [random_batch(source, exact) for _ in range(3)]
        expected = [computed(exact, batch) for batch in batches]
        for name in errors:
            model = copy.deepcopy(exact).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
            model = lightseq.accelerate(model) if name == "ours" else model
            for batch, right in zip(batches, expected, strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                    logits = model(**batch).logits
                errors[name] += float((logits.double() - right.outputs["logits"]).square().sum())
    assert 0 < errors["ours"] < 4 * errors["plain"]  # of squares


def test_what_falls_back() -> None:
    torch.manual_seed(14)
    plain = build("Bart")
    batch = random_batch(random.Random(15), plain)
    for options, reason in (
        ({"output_attentions": True}, "it returns attentions"),
        ({"output_hidden_states": True}, "it returns hidden states of the decoder"),
    ):
        ours = lightseq.accelerate(copy.deepcopy(plain))
        with pytest.warns(UserWarning, match=reason):
            found = computed(ours, batch, **options)
        assert_same(found, computed(plain, batch))
        assert list(lightseq.report(ours).fallbacks) == [reason]
    ours = lightseq.accelerate(copy.deepcopy(plain))
    words = ours.get_input_embeddings()(batch["input_ids"])
    with pytest.warns(UserWarning, match="other arguments than input_ids"):
        given = ours(inputs_embeds=words, attention_mask=batch["attention_mask"],
                     labels=batch["labels"])  # fmt: skip
    torch.testing.assert_close(given.loss, computed(plain, batch).loss)


def test_refusals_and_restore() -> None:
    for config, what in (
        (
            {"d_model": 272, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
            "head width",
        ),
        ({"decoder_ffn_dim": 20}, "a feed-forward width of 20"),
        ({"activation_function": "quick_gelu"}, "the activation quick_gelu"),
    ):
        with pytest.raises(UserError, match=what):
            lightseq.accelerate(build("Bart", **config))
    alone = transformers.BartForCausalLM(build("Bart").config)
    with pytest.raises(UserError, match=r"^BartForCausalLM, a decoder without an encoder, is not"):
        lightseq.accelerate(alone)
    plain = build("MBart")
    ours = lightseq.restore(lightseq.accelerate(copy.deepcopy(plain)))
    assert type(ours.model.decoder) is type(plain.model.decoder)


def train(folder: Path, cls: Any, model: Any, **settings: Any) -> tuple[list[float], Any]:
    """The losses of twelve updates, and the trainer."""
    torch.manual_seed(1)
    pairs = [
        {k: v[0] for k, v in batch_of(model, mask_of([n % 11 + 2])).items()} for n in range(24)
    ]
    of_all = {
        "max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    args = transformers.Seq2SeqTrainingArguments(str(folder), **{**of_all, **settings})
    trainer = cls(
        copy.deepcopy(model), args, train_dataset=pairs,
        data_collator=lambda items: collated(items, PAD),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer


@needs_captured_step
@pytest.mark.parametrize("family", PAIRS)
def test_our_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str) -> None:
    torch.manual_seed(16)
    model, rows = build(family), []
    model.lm_head.register_forward_hook(lambda *given: rows.append(tuple(given[-1].shape[:-1])))
    plain, _ = train(tmp_path, transformers.Seq2SeqTrainer, model)
    ours, trainer = train(tmp_path, lightseq.Seq2SeqTrainer, model)
    assert ours == pytest.approx(plain, rel=1e-4)
    # The head, which has the width of the vocabulary, gets packed rows: the least number.
    assert len(rows) == 48 and set(rows[24:]) == {(1, 64)}
    assert_ours(trainer.model, 48)
    assert isinstance(trainer.optimizer.optimizer, lightseq.LightseqAdamW)
    assert not caplog.text


def test_our_trainer_in_bfloat16_with_dropout(tmp_path: Path) -> None:
    torch.manual_seed(17)
    model = build("Bart", dropout=0.2, attention_dropout=0.1)
    settings = {"bf16": True, "max_steps": 24, "learning_rate": 2e-2}
    losses, trainer = train(tmp_path, lightseq.Seq2SeqTrainer, model, **settings)
    assert losses[-1] < 0.8 * losses[0]
    assert_ours(trainer.model, 96)
    again, _ = train(tmp_path, lightseq.Seq2SeqTrainer, model, **settings)
    assert again == losses


@needs_captured_step
def test_layer_drop_is_not_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(18)
    model = build("M2M100", encoder_layerdrop=0.1)
    _, trainer = train(tmp_path, lightseq.Seq2SeqTrainer, model)
    assert "not captured, because layer drop chooses layers on the host" in caplog.text
    assert_ours(trainer.model)


def test_rows_of_a_target() -> None:
    """Up to the last label that counts."""
    labels = torch.tensor([[5, -100, 7, -100], [-100, -100, -100, -100]])
    given = {"input_ids": torch.tensor([[4, 5], [6, 7]]), "labels": labels}
    host = batches.Host(PAD, Reads(pads=False, first=False), 99, has_target=True)
    batch = batches.packed(given, host, (1, 2))
    tensors, sides, _ = opened(batch)
    assert sides["target"].cu_seqlens.tolist() == [0, 3, 3]
    assert sides["source"].cu_seqlens.tolist() == [0, 2, 4]
    assert torch.equal(tensors["labels"], labels)
