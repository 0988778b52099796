"""Accelerated ModernBERT: logits, losses and gradients of a plain one; and our Trainer."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import (
    IS_OLDEST,
    assert_ours,
    assert_same,
    needs_captured_step,
    one_warning,
    transformers,
)
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from scripts import random_models as models
from scripts.random_models import (
    GLOBAL,
    HEADS,
    LOCAL,
    LONGEST,
    batch_of,
    by_graphs,
    computed,
    mask_of,
    random_mask,
)


def build(name: str = "ForMaskedLM", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model in training mode, whose parameters are all random."""
    torch.manual_seed(1)
    return models.build(f"ModernBert{name}", dtype, **config)


def pair(*args: Any, **config: Any) -> tuple[Any, Any]:
    plain = build(*args, **config)
    return plain, lightseq.accelerate(copy.deepcopy(plain))


def rotated_in_float64(*heads_and_tables: Tensor, unsqueeze_dim: int = 1) -> list[Tensor]:
    """transformers' ``apply_rotary_pos_emb``, which rounds queries and keys to float32."""
    *both, cos, sin = heads_and_tables
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = (torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) for x in both)
    return [x * cos + y * sin for x, y in zip(both, turned)]


@pytest.mark.parametrize("name", HEADS)
def test_random_models_and_batches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = random.Random(name)
    for number in range(6):
        dtype, config = torch.float32, models.random_config(source, f"ModernBert{name}")
        if number % 2:  # only then the largest error is that of rounding to float64
            dtype, config["attn_implementation"] = torch.float64, "sdpa"
            module = sys.modules[transformers.ModernBertModel.__module__]
            monkeypatch.setattr(module, "apply_rotary_pos_emb", rotated_in_float64)
        plain, ours = pair(name, dtype, **config)
        calls = 0
        for _ in range(4):
            mask, given = random_mask(source, f"ModernBert{name}")
            batch = batch_of(plain, mask, given, types=False)
            if has_holes(mask):
                continue
            passes = source.randint(1, 2)
            # States are not captured.
            options = {"output_hidden_states": passes == 1}
            with by_graphs(passes == 2):
                for _ in range(passes):
                    found = computed(ours, batch, **options)
            expected = computed(plain, batch, **options)
            assert_same(found, expected, 1e-5 if dtype == torch.float32 else 1e-12)
            calls += passes
        monkeypatch.undo()
        assert_ours(ours, calls)


def has_holes(mask: Tensor) -> bool:
    return bool((mask.diff(dim=1) == 1).sum(1).add(mask[:, 0]).gt(1).any())


def test_pads_within_a_sentence_are_counted_by_windows() -> None:
    plain, ours = pair()
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    batch = batch_of(plain, mask, types=False)
    with one_warning("a sentence has pads between its tokens, which windows count"):
        assert_same(computed(ours, batch), computed(plain, batch))


def test_a_window_hides_tokens() -> None:
    """With the configuration's windows, but for the bits of all layers' windows being used."""
    wide, narrow = (build(local_attention=n, layer_types=[LOCAL] * 3) for n in (100, 4))
    narrow.load_state_dict(wide.state_dict())
    batch = batch_of(wide, mask_of([LONGEST]), types=False)
    results = [computed(lightseq.accelerate(m), batch).outputs["logits"] for m in (wide, narrow)]
    assert (results[0] - results[1]).abs().max() > 1e-3


def test_positions_of_the_caller() -> None:
    plain, ours = pair()
    mask = mask_of([9, 4])
    batch = batch_of(plain, mask, types=False)
    batch["position_ids"] = torch.arange(9).flip(0)[None].expand(2, -1) * 3
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours, 1)


def test_embeddings_of_the_caller() -> None:
    plain, ours = pair("Model")
    given = torch.randn(2, 5, 16)
    found, expected = (m(inputs_embeds=given).last_hidden_state for m in (ours, plain))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert_ours(ours, 1)


@pytest.mark.skipif(IS_OLDEST, reason="ModernBERT of transformers 5.0 has arguments of its own")
def test_packed_sentences() -> None:
    """Windows and positions are those of each sentence, as if it were alone."""
    plain, ours = pair()
    lengths = [4, 9, 2]
    ids = torch.randint(3, 24, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seqlens = torch.tensor([0, 4, 13, 15], dtype=torch.int32)
    packed = ours(
        input_ids=ids, position_ids=positions, cu_seq_lens_q=cu_seqlens, max_length_q=9,
        cu_seq_lens_k=cu_seqlens, max_length_k=9,
    ).logits  # fmt: skip
    alone = [plain(input_ids=part).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    assert_ours(ours, 1)


def test_recomputed_layers() -> None:
    plain, ours = pair()
    batch = batch_of(plain, mask_of([7, 3]), types=False)
    expected = computed(ours, batch)
    ours.gradient_checkpointing_enable()
    assert_same(computed(ours, batch), expected, 1e-7)
    assert_ours(ours, 2)


def test_scaled_positions() -> None:
    scaled = {"rope_type": "linear", "factor": 4.0}
    parameters = {
        GLOBAL: {"rope_theta": 1e5, **scaled}, LOCAL: {"rope_theta": 1e4, "rope_type": "default"},
    }  # fmt: skip
    plain, ours = pair(rope_parameters=parameters)
    batch = batch_of(plain, mask_of([9, 4]), types=False)
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours, 1)


def test_refusals() -> None:
    dynamic = {"rope_theta": 1e5, "rope_type": "dynamic", "factor": 4.0}
    for config, what in (
        ({"hidden_size": 272}, "head width"),
        ({"local_attention": 1}, "window of 1 tokens"),
        ({"rope_parameters": {GLOBAL: dynamic, LOCAL: dynamic}}, "positions of type dynamic"),
    ):
        with pytest.raises(UserError, match=what):
            lightseq.accelerate(build(**config))


def test_dropout_rates_of_now() -> None:
    """Each of the three rates alone drops in training, and nothing is dropped in evaluation."""
    mask = mask_of([7, 4])
    for rate in ("embedding_dropout", "attention_dropout", "mlp_dropout"):
        plain, ours = pair("Model", **{rate: 0.3})
        batch = batch_of(plain, mask, types=False)
        first, second = (ours(**batch).last_hidden_state for _ in range(2))
        assert not torch.equal(first, second), rate
        ours.eval(), plain.eval()
        assert_same(computed(ours, batch), computed(plain, batch))
        assert_ours(ours, 3)


def test_mean_over_masks() -> None:
    """The mean of the loss over many masks is that of Hugging Face: all rates are theirs."""
    plain, ours = pair(embedding_dropout=0.2, attention_dropout=0.2, mlp_dropout=0.2)
    batch = batch_of(plain, mask_of([8, 5]), types=False)
    with torch.no_grad():
        samples = [torch.stack([m(**batch).loss for _ in range(150)]) for m in (ours, plain)]
    error = sum(x.var() / len(x) for x in samples).sqrt()
    assert (samples[0].mean() - samples[1].mean()).abs() < 4 * error
    assert samples[0].std() / samples[1].std() == pytest.approx(1, abs=0.4)


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A third of the words is to be predicted."""
    ids = torch.nn.utils.rnn.pad_sequence([x["input_ids"] for x in items], batch_first=True)
    labels = ids.masked_fill((ids == 0) | (ids % 3 > 0), -100)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


def trained(folder: Path, cls: Any, model: Any, **settings: Any) -> tuple[list[float], Any]:
    """The losses of a copy of a model, and its trainer."""
    torch.manual_seed(2)
    texts = [{"input_ids": torch.randint(3, 24, (n % 9 + 3,))} for n in range(24)]
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True,
        **{"use_cpu": True, "max_steps": 12, **settings},
    )  # fmt: skip
    trainer = cls(copy.deepcopy(model), args, train_dataset=texts, data_collator=collate)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer


@needs_captured_step
@pytest.mark.parametrize("bf16", [False, True])
def test_our_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture, bf16: bool) -> None:
    settings, plain = {"gradient_accumulation_steps": 2, "bf16": bf16}, build()
    theirs, _ = trained(tmp_path, transformers.Trainer, plain, **settings)
    ours, trainer = trained(tmp_path, lightseq.Trainer, plain, **settings)
    assert ours == pytest.approx(theirs, rel=0.05 if bf16 else 1e-4)
    assert_ours(trainer.model, 24)
    assert not caplog.text


@needs_captured_step
def test_fp8(tmp_path: Path) -> None:
    """Queries and keys are rotated, and gates applied, in bfloat16; all products are in fp8."""
    model = build(intermediate_size=32)
    expected, _ = trained(tmp_path, lightseq.Trainer, model, bf16=True)
    lightseq.accelerate(model, fp8=True)
    found, trainer = trained(tmp_path, lightseq.Trainer, model, bf16=True)
    assert found != expected and found == pytest.approx(expected, rel=0.15)
    assert_ours(trainer.model)


@needs_captured_step
def test_sparse_prediction(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build(sparse_prediction=True)
    theirs, _ = trained(tmp_path, transformers.Trainer, model, max_steps=3)
    ours, trainer = trained(tmp_path, lightseq.Trainer, model, max_steps=3)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert "sparse_prediction chooses rows on the host" in caplog.text
    assert_ours(trainer.model)
