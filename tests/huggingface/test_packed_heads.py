"""In our Trainer's step, a head of the width of the vocabulary computes only rows that count."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, needs_captured_step, transformers
from test_our_trainer import assert_same_logs
from test_trainers import Trained, trained

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import build

BATCH, WORDS = 4, 24


def masked(count: int) -> list[dict[str, list[int]]]:
    """Sentences of which a third of the tokens have a label."""
    source, made = random.Random(3), []
    for _ in range(count):
        ids = [source.randint(1, WORDS - 1) for _ in range(source.randint(4, 12))]
        labels = [token if source.random() < 0.3 else -100 for token in ids]
        labels[source.randrange(len(ids))] = ids[0]
        made.append({"input_ids": ids, "labels": labels})
    return made


def collated(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(item["input_ids"]) for item in items], batch_first=True)
    labels = pad([torch.tensor(item["labels"]) for item in items], True, -100)
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


def train(folder: Path, ours: bool, name: str, **settings: Any) -> tuple[Trained, list[int], Any]:
    """The log, and how many rows the head has computed in each update."""
    torch.manual_seed(1)
    model, rows = copy.deepcopy(build(name, num_hidden_layers=1)), []
    head = model.cls if hasattr(model, "cls") else model.lm_head
    head.register_forward_hook(lambda *given: rows.append(given[-1][..., 0].numel()))
    args = transformers.TrainingArguments(
        str(folder), max_steps=10, per_device_train_batch_size=BATCH, learning_rate=3e-3,
        use_cpu=True, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        **settings,
    )  # fmt: skip
    kind = lightseq.Trainer if ours else transformers.Trainer
    trainer = kind(model, args, train_dataset=masked(48), data_collator=collated)
    return trained(trainer), rows, trainer


@needs_captured_step
@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.1}], ids=["", "smoothed"])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_masked_words(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    plain, all_rows, _ = train(tmp_path / "plain", False, name, **settings)
    ours, rows, trainer = train(tmp_path / "ours", True, name, **settings)
    assert_same_logs(ours, plain)
    for key, weight in plain.weights.items():
        if not key.endswith("key.bias"):
            torch.testing.assert_close(ours.weights[key], weight, atol=1e-4, rtol=1e-4)
    assert_ours(trainer.model)
    assert len(rows) == len(all_rows) == 10
    assert set(rows) == {64}  # the least number of packed rows, of about 13 labels


@needs_captured_step
def test_a_pad_with_a_label_counts_as_in_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its features are Hugging Face's business, so the batch runs without a graph."""

    def labelled(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = collated(items)
        return {**batch, "labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 1)}

    _, _, trainer = train(tmp_path, True, "BertForMaskedLM")
    monkeypatch.setattr(trainer, "data_collator", labelled)
    trained(trainer)
    assert "without a CUDA graph, because a pad has a label" in caplog.text
