"""``transformers.Trainer`` with a plain model, with an accelerated one, and our Trainer: they train
alike, and each resumes what another one has saved."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.accelerated import assert_ours, transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import build

UPDATES = 200
KEYS = ("loss", "grad_norm", "learning_rate")
PLAIN, ACCELERATED, CAPTURED = KINDS = ("plain", "accelerated", "captured")


def sentences(shortest: int = 3, longest: int = 10) -> list[dict[str, Any]]:
    """Whether the first word comes again."""
    source = random.Random(1)
    made = []
    for _ in range(256):
        ids = [source.randint(1, 23) for _ in range(source.randint(shortest, longest))]
        made.append({"input_ids": torch.tensor(ids), "labels": int(ids[0] in ids[1:])})
    return made


def collated(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = pad_sequence([sentence["input_ids"] for sentence in batch], batch_first=True)
    labels = torch.tensor([sentence["labels"] for sentence in batch])
    return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": labels}


class Trained(NamedTuple):
    """The log of each tenth update, and the final weights."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]

    def assert_same(self, other: Trained) -> None:
        assert len(self.log) == len(other.log) > 0
        for mine, theirs in zip(self.log, other.log):
            assert mine["step"] == theirs["step"]
            for key in KEYS:
                assert mine[key] == pytest.approx(theirs[key], abs=1e-4, rel=1e-4), (mine, theirs)
        for name, weight in other.weights.items():
            if not name.endswith("key.bias"):  # whose gradient is zero but for rounding
                torch.testing.assert_close(self.weights[name], weight, atol=1e-3, rtol=1e-3)


@cache
def first_model() -> Any:
    torch.manual_seed(1)
    return build("BertForSequenceClassification", num_hidden_layers=1, intermediate_size=16)


def trainer_of(folder: Path, kind: str, dropout: float = 0.0, **settings: Any) -> Any:
    model = copy.deepcopy(first_model())
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    if kind == ACCELERATED:
        lightseq.accelerate(model)
    of_all = {
        "max_steps": UPDATES, "per_device_train_batch_size": 4, "learning_rate": 3e-3,
        "warmup_steps": 20, "max_grad_norm": 0.5, "logging_steps": 10, "save_strategy": "no",
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 3, "weight_decay": 0.1,
    }  # fmt: skip
    args = transformers.TrainingArguments(str(folder), **{**of_all, **settings})
    cls = lightseq.Trainer if kind == CAPTURED else transformers.Trainer
    trainer = cls(
        model, args, train_dataset=sentences(), eval_dataset=sentences()[:20],
        data_collator=collated,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained(trainer: Any, resume: Path | None = None) -> Trained:
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    log = [line for line in trainer.state.log_history if "loss" in line]
    return Trained(log, {name: p.detach().clone() for name, p in trainer.model.named_parameters()})


def train(folder: Path, kind: str, count: int, resume: Path | None = None) -> Trained:
    """200 updates of ``count`` batches, or those after a checkpoint."""
    saves = count == 1 and resume is None
    trainer = trainer_of(
        folder, kind, gradient_accumulation_steps=count, save_steps=UPDATES // 2,
        save_strategy="steps" if saves else "no",
    )  # fmt: skip
    found = trained(trainer, resume)
    if kind != PLAIN:
        updates = UPDATES if resume is None else UPDATES // 2
        assert_ours(trainer.model, updates * count)
    return found


@pytest.fixture(scope="module", autouse=True)
def few_log_lines() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Trained]]:
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = folder / f"checkpoint-{UPDATES // 2}", train(folder, kind, 1)
    return made


def test_200_updates(runs: dict[str, tuple[Path, Trained]]) -> None:
    plain = runs[PLAIN][1]
    runs[ACCELERATED][1].assert_same(plain)
    runs[CAPTURED][1].assert_same(plain)
    assert len(plain.log) == UPDATES // 10
    assert max(line["grad_norm"] for line in plain.log) > 0.5  # which is clipped
    assert plain.log[-1]["loss"] < 0.9 * plain.log[0]["loss"]


def test_accumulated_gradients(tmp_path: Path) -> None:
    plain, *ours = (train(tmp_path, kind, 4) for kind in KINDS)
    for each in ours:
        each.assert_same(plain)


@pytest.mark.parametrize(
    ("before", "after"),
    [(PLAIN, ACCELERATED), (ACCELERATED, PLAIN), (PLAIN, CAPTURED), (CAPTURED, PLAIN)],
)
def test_resumed(
    runs: dict[str, tuple[Path, Trained]], before: str, after: str, tmp_path: Path
) -> None:
    checkpoint, whole = runs[before]
    names = sorted(path.name for path in checkpoint.iterdir())
    assert names == sorted(path.name for path in runs[after][0].iterdir())
    resumed = train(tmp_path, after, 1, checkpoint)
    assert len(resumed.log) == len(whole.log)  # with those from before
    resumed.assert_same(whole)
