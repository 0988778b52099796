"""Accelerated GPT-2: logits, losses, gradients and words of a plain one; and our Trainer."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from helpers.accelerated import (
    IS_OLDEST,
    RANDOM_MODELS,
    assert_ours,
    assert_same,
    needs_captured_step,
    one_warning,
    transformers,
)

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from scripts.random_models import (
    batch_of,
    build,
    by_graphs,
    collated,
    computed,
    mask_of,
    random_batch,
    random_config,
)

NAME, WORDS = "GPT2LMHeadModel", 40


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2ForTokenClassification"]
)
def test_random_models_and_batches(name: str) -> None:
    source = random.Random(name)
    torch.manual_seed(1)
    for number in range(RANDOM_MODELS):
        plain = build(name, **random_config(source, name))
        ours, passes = lightseq.accelerate(copy.deepcopy(plain)), 1 + number % 2
        for _ in range(5):
            batch = random_batch(source, plain)
            # States are not captured.
            options = {"output_hidden_states": passes == 1, "use_cache": False}
            with by_graphs(passes == 2):
                for _ in range(passes):  # the second pass of a shape is captured
                    found = computed(ours, batch, **options)
            expected = computed(plain, batch, **options)
            if name.endswith("SequenceClassification"):  # of the last token
                found, expected = (x._replace(states=[]) for x in (found, expected))
            assert_same(found, expected)
        assert_ours(ours, 5 * passes)


@pytest.mark.parametrize("is_graph", [False, True])
def test_tokens_after_pads(is_graph: bool) -> None:
    """A loss predicts each token from the row before it, also from that of a pad."""
    torch.manual_seed(4)
    plain = build(NAME)
    for mask in (mask_of((3, 5), left=True), torch.tensor([[1, 1, 1], [1, 0, 1]])):
        ours = lightseq.accelerate(copy.deepcopy(plain))
        ids = torch.randint(1, WORDS, mask.shape)
        batch = {"input_ids": ids, "attention_mask": mask}
        batch["labels"] = ids.masked_fill(mask == 0, -100)
        with by_graphs(is_graph), one_warning("because a token follows a pad"):
            found = computed(ours, batch, use_cache=False)
        assert_same(found, computed(plain, batch, use_cache=False))


def test_generation() -> None:
    torch.manual_seed(2)
    plain = build(NAME).eval()
    ours = lightseq.accelerate(copy.deepcopy(plain))
    ids = torch.randint(1, WORDS, (2, 4))
    words = [m.generate(input_ids=ids, max_length=12, do_sample=False) for m in (plain, ours)]
    assert torch.equal(*words)
    assert not lightseq.report(ours).fallbacks


@pytest.mark.skipif(IS_OLDEST, reason="GPT-2 of transformers 5.0 passes no cu_seq_lens_q on")
def test_packed_sentences() -> None:
    """cu_seq_lens_q is obeyed; position_ids alone are Hugging Face's."""
    torch.manual_seed(3)
    plain = build(NAME)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    lengths = [4, 7, 2]
    ids = torch.randint(1, WORDS, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    cu_seqlens = torch.tensor([0, 4, 11, 13], dtype=torch.int32)
    packed = ours(
        input_ids=ids, position_ids=positions, cu_seq_lens_q=cu_seqlens, max_length_q=7,
        cu_seq_lens_k=cu_seqlens, max_length_k=7,
    ).logits  # fmt: skip
    alone = [plain(input_ids=part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="position_ids may mark several sentences"):
        found = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    expected = plain(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected)


def test_refusals() -> None:
    for config, what in (
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"n_embd": 272}, "head width"),
    ):
        with pytest.raises(UserError, match=what):
            lightseq.accelerate(build(NAME, **config))


@needs_captured_step
@pytest.mark.parametrize("bf16", [False, True])
def test_our_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture, bf16: bool) -> None:
    torch.manual_seed(4)
    plain = build(NAME)
    texts = [
        {name: x[0] for name, x in batch_of(plain, mask_of([n % 9 + 3])).items()}
        for n in range(24)
    ]  # fmt: skip
    losses = []
    for cls in (transformers.Trainer, lightseq.Trainer):
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
            gradient_accumulation_steps=2, bf16=bf16,
        )  # fmt: skip
        trainer = cls(
            copy.deepcopy(plain), args, train_dataset=texts,
            data_collator=lambda items: collated(items, 0),
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[1] == pytest.approx(losses[0], rel=0.05 if bf16 else 1e-4)
    assert_ours(trainer.model, 24)
    assert not caplog.text
