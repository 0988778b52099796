"""Our Trainer on a GPU: graphs compute what their functions do, and the host does not wait."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import test_seq2seq as pairs
import test_trainers
import torch
from helpers.accelerated import assert_ours, transformers
from test_trainers import ACCELERATED, CAPTURED, PLAIN, Trained, trained, trainer_of

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.huggingface.captured import CapturedStep
from scripts.random_models import PAIRS, build

FEW = {"max_steps": 40, "warmup_steps": 4, "logging_steps": 1, "use_cpu": False}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def losses(found: Trained) -> list[float]:
    return [line["loss"] for line in found.log]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_captured_is_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool, count: int
) -> None:
    """Bitwise, with dropout of the layers; the head's mask is torch's, so it has none."""
    settings = {**FEW, "bf16": bf16, "gradient_accumulation_steps": count, "dropout": 0.0}
    runs, graphs = [], []
    launch = CapturedStep.gradient

    def counted(self: CapturedStep, *arguments: Any, **options: Any) -> Any:
        result = launch(self, *arguments, **options)
        graphs.append(len(self._graphs._graphs))
        return result

    monkeypatch.setattr(CapturedStep, "gradient", counted)
    for captures in ("1", "0"):
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", captures)
        trainer = trainer_of(tmp_path, CAPTURED, **settings)
        for layer in trainer.model.bert.encoder.layer:
            layer.output.dropout.p = layer.attention.output.dropout.p = 0.2
        runs.append(trained(trainer))
        assert (max(graphs) > 0) == (captures == "1")
        graphs.clear()
        assert_ours(trainer.model)
    assert losses(runs[0]) == losses(runs[1])
    for name, weight in runs[0].weights.items():
        assert torch.equal(weight, runs[1].weights[name]), name


@pytest.mark.parametrize("bf16", [False, True])
def test_trains_as_the_others(tmp_path: Path, bf16: bool) -> None:
    plain, accelerated, captured = (
        trained(trainer_of(tmp_path / kind, kind, **FEW, bf16=bf16))
        for kind in (PLAIN, ACCELERATED, CAPTURED)
    )
    near = {"rel": 0.05 if bf16 else 2e-3, "abs": 0.05 if bf16 else 2e-3}
    assert losses(accelerated) == pytest.approx(losses(plain), **near)
    assert losses(captured) == pytest.approx(losses(plain), **near)


@pytest.mark.parametrize("family", PAIRS)
def test_pairs_train_as_with_transformers(tmp_path: Path, family: str) -> None:
    torch.manual_seed(1)
    model = build(family)
    settings = {"use_cpu": False, "bf16": True, "max_steps": 30}
    plain, _ = pairs.train(tmp_path, transformers.Seq2SeqTrainer, model, **settings)
    ours, trainer = pairs.train(tmp_path, lightseq.Seq2SeqTrainer, model, **settings)
    assert ours == pytest.approx(plain, rel=0.05)
    assert_ours(trainer.model)


def test_evaluation_and_saving_between_steps(tmp_path: Path) -> None:
    settings = {**FEW, "bf16": True, "eval_strategy": "steps", "eval_steps": 10, "save_steps": 10,
                "save_strategy": "steps", "load_best_model_at_end": True}  # fmt: skip
    plain, captured = (
        trained(trainer_of(tmp_path / kind, kind, **settings)) for kind in (PLAIN, CAPTURED)
    )
    assert losses(captured) == pytest.approx(losses(plain), rel=0.05, abs=0.05)
    whole = trained(trainer_of(tmp_path / "again", CAPTURED, **settings))
    rest = trained(
        trainer_of(tmp_path / "again", CAPTURED, **settings), tmp_path / "again/checkpoint-20"
    )
    assert losses(rest)[20:] == losses(whole)[20:]


def test_the_host_does_not_wait(tmp_path: Path) -> None:
    """Between two log lines, once all graphs are captured."""
    seen: list[int] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            torch.cuda.set_sync_debug_mode("error" if 60 < state.global_step < 90 else "default")
            seen.append(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    settings = {**FEW, "bf16": True, "max_steps": 100, "logging_steps": 100}
    trainer = trainer_of(tmp_path, CAPTURED, **settings)
    trainer.add_callback(Watch())
    try:
        trained(trainer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 100


@pytest.mark.alone
def test_memory_is_not_above_hugging_faces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many tokens a batch as in training: our weights in 16 bits stay between updates."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
             "num_hidden_layers": 6, "max_position_embeddings": 128}  # fmt: skip
    model = build("BertForSequenceClassification", **sizes)
    monkeypatch.setattr(test_trainers, "first_model", lambda: model)
    long = test_trainers.sentences(20, 120)
    monkeypatch.setattr(test_trainers, "sentences", lambda: long)
    peaks, batch = [], {"per_device_train_batch_size": 32}
    for kind in (PLAIN, CAPTURED):
        trainer = trainer_of(tmp_path, kind, **FEW, **batch, bf16=True, dropout=0.1)
        gc.collect()  # what trainers before this one held
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trained(trainer)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del trainer
    assert peaks[1] <= peaks[0], peaks
    assert peaks[0] > 8 * sum(p.numel() for p in model.parameters())  # the moments alone
