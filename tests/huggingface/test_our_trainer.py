"""Our Trainer: which runs and batches its step covers, and that the others are trained rightly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from helpers.accelerated import assert_ours, transformers
from safetensors.torch import load_file
from test_trainers import CAPTURED, PLAIN, Trained, collated, trained, trainer_of
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface import batch as batches
from lightseq_fairseq.huggingface.covered import NotCovered, Reads
from scripts.random_models import batch_of, build, mask_of
from scripts.random_models import collated as padded

FEW = {"max_steps": 12, "warmup_steps": 2, "logging_steps": 2}


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()


def both(folder: Path, change: Callable[[Any], object] = lambda trainer: None,
         **settings: Any) -> tuple[Trained, Trained, Any]:  # fmt: skip
    """What the plain Trainer and ours train, each changed before; and our Trainer."""
    made = [trainer_of(folder / kind, kind, **{**FEW, **settings}) for kind in (PLAIN, CAPTURED)]
    for trainer in made:
        change(trainer)
    plain, ours = map(trained, made)
    return plain, ours, made[1]


def assert_same_logs(ours: Trained, plain: Trained, tolerance: float = 1e-4) -> None:
    assert len(ours.log) == len(plain.log) > 0
    for mine, theirs in zip(ours.log, plain.log, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance, abs=tolerance)


def test_dropout_is_resumed_exactly(tmp_path: Path) -> None:
    settings = {**FEW, "save_strategy": "steps", "save_steps": 6, "dropout": 0.3}
    whole = trained(trainer_of(tmp_path, CAPTURED, **settings))
    rest = trained(trainer_of(tmp_path, CAPTURED, **settings), tmp_path / "checkpoint-6")
    assert whole.log[3:] == [{**line, "epoch": line["epoch"]} for line in rest.log[3:]]
    for name, weight in whole.weights.items():
        assert torch.equal(weight, rest.weights[name]), name
    other = trained(trainer_of(tmp_path / "other", CAPTURED, **{**settings, "seed": 4}))
    assert other.log[-1]["loss"] != whole.log[-1]["loss"]


def test_evaluation_and_the_best_model(tmp_path: Path) -> None:
    plain, ours, trainer = both(
        tmp_path, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True,
    )  # fmt: skip
    assert_same_logs(ours, plain)
    metrics = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(metrics) == 3
    for name, weight in plain.weights.items():
        if not name.endswith("key.bias"):
            torch.testing.assert_close(ours.weights[name], weight, atol=1e-4, rtol=1e-4)


def test_bfloat16(tmp_path: Path) -> None:
    plain, ours, trainer = both(tmp_path, bf16=True)
    assert_same_logs(ours, plain, 0.05)
    assert_ours(trainer.model)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_copies_follow_weights_that_others_write(tmp_path: Path) -> None:
    class Zero(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 5:
                with torch.no_grad():
                    given["model"].classifier.weight.zero_()
                    given["model"].classifier.bias.copy_(torch.tensor([9.0, -9.0]))

    plain, ours, _ = both(tmp_path, lambda t: t.add_callback(Zero()), bf16=True, logging_steps=1)
    assert max(line["loss"] for line in plain.log[5:7]) > 2
    assert_same_logs(ours, plain, 0.05)


def test_parameters_without_a_gradient_stay(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        torch.manual_seed(1)
        trainer.model.unused = torch.nn.Linear(3, 3)

    plain, ours, trainer = both(tmp_path, change)
    assert_same_logs(ours, plain)
    assert torch.equal(ours.weights["unused.weight"], plain.weights["unused.weight"])
    assert len(trainer.optimizer.state_dict()["state"]) == len(ours.weights) - 2


@pytest.mark.parametrize("bf16", [False, True])
def test_frozen_parameters(tmp_path: Path, bf16: bool) -> None:
    def change(trainer: Any) -> None:
        trainer.model.bert.embeddings.requires_grad_(False)
        trainer.model.bert.encoder.layer[0].attention.requires_grad_(False)

    plain, ours, trainer = both(tmp_path, change, bf16=bf16)
    assert_same_logs(ours, plain, 0.05 if bf16 else 1e-4)
    assert_ours(trainer.model)


def test_batches_that_the_host_cannot_pack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def left(items: list[dict[str, Any]]) -> dict[str, Any]:
        batch = collated(items)
        return {k: v.flip(1) if v.dim() > 1 else v for k, v in batch.items()}

    plain, ours, trainer = both(tmp_path, lambda t: setattr(t, "data_collator", left))
    assert_same_logs(ours, plain)
    assert caplog.text.count("without a CUDA graph, because a sentence begins with a pad") == 1
    assert lightseq.report(trainer.model).fallbacks


class Own(lightseq.Trainer):
    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        return super().compute_loss(*arguments, **options)


def twice(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return 2 * torch.nn.functional.cross_entropy(outputs["logits"], labels)


class Looks(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, *arguments: Any, **given: Any) -> None:
        assert any(p.grad is not None for p in given["model"].parameters())


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        ({"optim": "adafactor"}, None, "the optimizer is adafactor, not AdamW"),
        ({"neftune_noise_alpha": 5.0}, None, "NEFTune adds noise to the embedding"),
        ({}, lambda t: t.add_callback(Looks()), "the callback Looks looks at gradients"),
        ({}, lambda t: setattr(t, "__class__", Own), "compute_loss is another one"),
        ({}, lambda t: setattr(t, "optimizer", torch.optim.SGD(t.model.parameters(), lr=0.1)),
         "the optimizer was given"),
        ({}, lambda t: setattr(t, "compute_loss_func", twice), "compute_loss_func is given"),
        ({}, lambda t: setattr(t.args, "fp16", True), "fp16 needs a loss scale"),
    ],
)  # fmt: skip
def test_runs_that_the_step_does_not_cover(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any],
    change: Callable[[Any], object] | None, reason: str,
) -> None:  # fmt: skip
    trainer = trainer_of(tmp_path, CAPTURED, **{**FEW, **settings})
    if change is not None:
        change(trainer)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trained(trainer)
    assert caplog.text.count(f"lightseq: the step is not captured, because {reason}") == 1
    assert any(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert_ours(trainer.model)


def test_a_loop_without_a_hook_for_clipping_is_not_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of transformers 5.0, in which updates would have no gradient."""
    trainer = trainer_of(tmp_path, CAPTURED, **FEW)
    assert trainer._reason() is None
    monkeypatch.delattr(transformers.Trainer, "_clip_grad_norm")
    assert "is too old for it" in trainer._reason()


class Saves(transformers.TrainerCallback):
    """Saves the model by accelerate, whose files lack parameters that share a storage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 5:
            Accelerator(cpu=True).save_model(given["model"], self.folder)
            self.saved = {n: p.detach().clone() for n, p in given["model"].named_parameters()}


def test_files_of_accelerate_have_all_parameters(tmp_path: Path) -> None:
    trainer, saves = trainer_of(tmp_path, CAPTURED, **FEW), Saves(tmp_path / "saved")
    trainer.model.bert.embeddings.requires_grad_(False)
    trainer.add_callback(saves)
    trained(trainer)
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert found.keys() == saves.saved.keys()
    for name, weight in saves.saved.items():
        assert torch.equal(found[name], weight), name


def test_files_of_accelerate_after_adamw(tmp_path: Path) -> None:
    model = build("BertForSequenceClassification")
    optimizer = lightseq.LightseqAdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    Accelerator(cpu=True).save_model(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        assert torch.equal(found[name], weight), name


def test_other_heads(tmp_path: Path) -> None:
    """A masked language model, with tied weights and labels of tokens."""
    torch.manual_seed(1)
    found = []
    for cls in (transformers.Trainer, lightseq.Trainer):
        torch.manual_seed(2)
        model = build("RobertaForMaskedLM")
        batches = [batch_of(model, mask_of([n % 7 + 3])) for n in range(40)]
        items = [{name: x[0] for name, x in batch.items()} for batch in batches]
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=10, per_device_train_batch_size=4, learning_rate=1e-2,
            logging_steps=1, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = cls(model, args, train_dataset=items, data_collator=lambda rows: padded(rows, 1))
        trainer.remove_callback(transformers.PrinterCallback)
        found.append(trained(trainer))
    assert_same_logs(found[1], found[0])
    assert_ours(trainer.model, 20)


# --- batches


HOST = batches.Host(0, Reads(pads=False, first=True), 99)
ANY = Reads(pads=False, first=False)


def opened(batch: batches.Batch) -> Any:
    block = torch.zeros(batch.size, dtype=torch.uint8)
    batch.send(block)
    return batch.open(block)


def test_a_large_tensor_is_not_copied_on_the_host() -> None:
    images = torch.randn(3, 3, 200, 200)
    batch = batches.packed({"pixel_values": images, "labels": torch.arange(3)}, HOST, (5, 6))
    assert len(batch.block) < 100 and batch.size > images.nbytes
    tensors, sides, rng = opened(batch)
    assert torch.equal(tensors["pixel_values"], images) and tensors["labels"].tolist() == [0, 1, 2]
    assert rng.tolist() == [5, 6] and sides == {}


def test_batches_of_pairs_have_few_shapes() -> None:
    """Of pairs four sizes vary: those of the padded and of the packed tokens of both sides."""
    random, host = np.random.default_rng(1), batches.Host(0, ANY, 512, has_target=True)
    shapes = set()
    for source in random.lognormal(3.2, 0.5, (400, 64)).clip(2, 200):
        target = source * random.normal(1.0, 0.1, 64)
        ids, labels = (
            torch.from_numpy(np.arange(side.max()) < side[:, None]).long()
            for side in (source, target)
        )
        given = {"input_ids": ids, "attention_mask": ids, "labels": labels.where(labels == 1, -100)}
        parts = batches.packed(given, host, (0, 0)).parts
        shapes.add(tuple(part.shape for part in parts))
    assert len(shapes) < 100


def test_a_batch_is_filled_up_and_packed() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 0, 0]])
    given = {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([1, 0])}
    batch = batches.packed(given, HOST, (3, 4))
    tensors, sides, rng = opened(batch)
    segments = sides["source"]
    assert tensors["input_ids"].shape == (2, 32) and tensors["labels"].tolist() == [1, 0]
    assert tensors["attention_mask"].sum() == 4 and rng.tolist() == [3, 4]
    assert segments.cu_seqlens.tolist() == [0, 3, 4] and len(segments.index) == 64
    packed = segments.pack(tensors["input_ids"])
    assert packed.tolist() == [5, 6, 7, 8] + [0] * 60
    assert torch.equal(segments.pad(packed)[:, :3], ids)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"input_ids": np.zeros((2, 3))}, "input_ids is not a tensor on the CPU"),
        ({"pixels": torch.zeros(2, 3)}, "there are no input_ids"),
        ({"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 1, 3, 3)},
         "the attention mask has another shape"),
        ({"input_ids": torch.ones(1, 2), "attention_mask": torch.tensor([[0, 1]])},
         "a sentence begins with a pad"),
    ],
)  # fmt: skip
def test_batches_without_a_packed_form(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotCovered, match=reason):
        batches.packed(given, HOST, (0, 0))


# --- LightseqAdamW


def optimized(cls: Any, state: Any = None, updates: int = 5) -> tuple[list[Any], Any]:
    torch.manual_seed(4)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,), (2, 2))]
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "lr": 0.3}
    ]  # fmt: skip
    optimizer = cls(groups, lr=0.1, eps=0.01, betas=(0.8, 0.9), weight_decay=0.0)
    if state is not None:
        optimizer.load_state_dict(state)
    for update in range(updates):
        for p in parameters[: 3 if update else 2]:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
    return parameters, optimizer.state_dict()


def test_adamw_is_torchs() -> None:
    ours, theirs = optimized(lightseq.LightseqAdamW), optimized(torch.optim.AdamW)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-6)
    states = ours[1]["state"], theirs[1]["state"]
    assert states[0].keys() == states[1].keys()
    for mine, other in zip(states[0].values(), states[1].values(), strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], atol=1e-6, rtol=1e-6)
    assert ours[1]["param_groups"][0].keys() == theirs[1]["param_groups"][0].keys()


def test_adamw_loads_torchs_state_and_the_other_way() -> None:
    state = optimized(torch.optim.AdamW)[1]
    results = [
        optimized(cls, state)[0] for cls in (lightseq.LightseqAdamW, torch.optim.AdamW)
    ]  # fmt: skip
    results.append(optimized(torch.optim.AdamW, optimized(lightseq.LightseqAdamW)[1])[0])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_adamw_refuses_other_states() -> None:
    state = optimized(torch.optim.AdamW)[1]
    state["param_groups"][0]["amsgrad"] = True
    with pytest.raises(ValueError, match="amsgrad, which LightseqAdamW lacks"):
        optimized(lightseq.LightseqAdamW, state)
    state["param_groups"].pop()
    with pytest.raises(
        ValueError, match=r"groups of \[2\] parameters, but this model has \[2, 1\]"
    ):
        optimized(lightseq.LightseqAdamW, state)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda batch: {**batch, "labels": batch["labels"] + 6},
         r"A label is [67], but the model has 2 classes: labels are from 0 to 1"),
        (lambda batch: {name: x for name, x in batch.items() if name != "attention_mask"},
         r"input_ids have pads \(0\), but the collator returns no attention_mask"),
    ],
    ids=["label", "mask"],
)  # fmt: skip
def test_wrong_batches_are_refused(tmp_path: Path, change: Any, sentence: str) -> None:
    trainer = trainer_of(tmp_path, CAPTURED, **FEW)
    trainer.data_collator = lambda items: change(collated(items))
    with pytest.raises(UserError, match=f"^{sentence}"):
        trainer.train()
