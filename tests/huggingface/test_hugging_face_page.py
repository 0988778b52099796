"""The first programs of docs/hugging-face.md train, with a small model in the place of
roberta-base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, transformers
from helpers.pages import blocks

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import build


def test_two_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    monkeypatch.chdir(tmp_path)
    plain = build("RobertaForSequenceClassification")
    plain.save_pretrained("roberta-base")
    train = [{"input_ids": [2, 4 + n % 9, 3], "labels": n % 2} for n in range(16)]
    programs = [
        block.text.replace("bf16=True", "bf16=True, use_cpu=True")
        for block in blocks("docs/hugging-face.md") if block.language == "python"
    ]  # fmt: skip
    names: dict[str, Any] = {"train": train}

    exec(programs[0], names)
    names["trainer"].train()
    model, updates = names["model"], 3 * 2
    assert type(names["trainer"]) is transformers.Trainer
    assert_ours(model, updates)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    exec(programs[1], names)
    assert f"accelerated: {2 * updates} calls" in capsys.readouterr().out
    assert type(model) is type(plain)  # restored, with its weights of now
    assert not torch.equal(model.classifier.dense.weight, before["classifier.dense.weight"])
    assert isinstance(names["trainer"], lightseq.Trainer)
