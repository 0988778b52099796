"""Whole runs on a GPU: a captured step equals a step whose kernels are launched one by one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers.languages as languages
import helpers.training_runs as runs
import pytest
import torch
from helpers.ops_testing import skip_without_fp8
from helpers.parity import write_classes, write_text
from helpers.training_runs import ON_GPU, PRECISIONS, captured_graphs

from lightseq_fairseq.ops.update_scalars import Given
from lightseq_fairseq.step import training_step
from lightseq_fairseq.training import captured as captured_training

pytestmark = pytest.mark.gpu


@dataclass
class Found:
    """The results of a run, and what the host knew during it.

    counts: the host's count of updates when it started each update. states: the reports of the
    updates.
    """

    folder: Path
    losses: list[float]
    counts: list[float]
    states: list[str]  # as text, because NaN is not equal to NaN
    graphs: int


@pytest.fixture
def found(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Found]:
    """Runs with the given flags, captured or eager."""
    start, wait = training_step.TrainingStep.update, training_step.StepReport.wait

    def get(name: str, captured: bool = True, corpus: Path = data, **flags: Any) -> Found:
        counts: list[float] = []
        states: list[str] = []

        def counted(self: Any, batches: Any, given: Any) -> training_step.StepReport:
            counts.append(given[Given.NUM_UPDATES])
            return start(self, batches, given)

        def recorded(self: training_step.StepReport) -> list[float]:
            values = wait(self)
            states.append(repr(values))
            return values

        monkeypatch.setattr(training_step.TrainingStep, "update", counted)
        monkeypatch.setattr(training_step.StepReport, "wait", recorded)
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", str(int(captured)))
        caplog.set_level(logging.INFO)
        caplog.clear()
        losses = runs.run(corpus, tmp_path / name, **flags)
        return Found(tmp_path / name, losses, counts, states, captured_graphs(caplog.text))

    return get


def assert_same(captured: Found, eager: Found) -> None:
    assert captured.graphs >= 2
    assert eager.graphs == 0
    assert captured.losses == eager.losses
    assert captured.states == eager.states
    assert runs.differing(runs.trained(captured.folder), runs.trained(eager.folder)) == []


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("update_freq", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_and_eager_are_equal(
    precision: str, update_freq: int, clip: float, found: Callable[..., Found]
) -> None:
    flags = {**ON_GPU, **PRECISIONS[precision], "clip_norm": clip, "update_freq": update_freq}
    flags["max_update"] = 24
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_and_eager_are_equal_on_running_text(
    precision: str, tmp_path: Path, found: Callable[..., Found]
) -> None:
    flags = {**runs.TEXT, **PRECISIONS[precision], "cpu": None, "max_update": 24}
    flags |= {f"decoder_{side}_dim": 64 for side in ("embed", "input", "output")}
    flags["corpus"] = write_text(tmp_path / "text")
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


@pytest.mark.parametrize(
    "kind",
    ["masked", "classes", "numbers", "bart", "bart-classes", "marian", "noised", "languages"],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_captured_and_eager_are_equal_in_other_families(
    precision: str, kind: str, tmp_path: Path, found: Callable[..., Found]
) -> None:
    others = {"masked": runs.MASKED, "bart": runs.BART, "bart-classes": runs.BART_CLASSES}
    others |= {"marian": runs.MARIAN, "noised": runs.NOISED}
    others["languages"] = {**runs.LS, **languages.TASK, "virtual_epoch_size": 50}
    flags = {**others.get(kind, runs.CLASSES), **PRECISIONS[precision]}
    flags |= {"cpu": None, "max_update": 24, "encoder_embed_dim": 64}
    if kind in ("masked", "noised"):
        flags["corpus"] = write_text(tmp_path / "text")
    elif kind.endswith("classes"):
        flags["corpus"] = write_classes(tmp_path / "classes")
    elif kind == "languages":
        flags["corpus"] = languages.write(tmp_path / "languages")
    elif kind == "numbers":
        flags |= {"corpus": write_classes(tmp_path / "numbers", numbers=2), "num_classes": 2,
                  "regression_target": True}  # fmt: skip
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


@pytest.mark.parametrize(
    "flags",
    [
        {"freeze": "encoder,embed_tokens", "encoder_normalize_before": True},
        {"freeze": "decoder.layers.0,encoder.layers.0.self_attn.q_proj", "decoder_layers": 2},
        {"freeze": "encoder,decoder.layers", "fp8": True, "encoder_ffn_embed_dim": 64},
    ],
)
def test_captured_and_eager_are_equal_with_frozen_parameters(
    flags: dict[str, Any], found: Callable[..., Found]
) -> None:
    if "fp8" in flags:
        skip_without_fp8()
    flags = {**ON_GPU, **PRECISIONS["bf16"], **flags, "max_update": 24}
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recomputed", [{}, {"checkpoint_activations": True}])
def test_captured_and_eager_are_equal_with_adapters(
    precision: str, recomputed: dict[str, Any], found: Callable[..., Found]
) -> None:
    flags = {**ON_GPU, **PRECISIONS[precision], **recomputed, "max_update": 24}
    flags |= {"lora_rank": 8, "lora_on": "q,k,v,out,fc1,fc2", "lora_dropout": 0.1}
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("flags", [{}, {"beta1": 0.9, "scale_parameter": True, "lr": 0.1}])
def test_captured_and_eager_are_equal_with_adafactor(
    precision: str, flags: dict[str, Any], found: Callable[..., Found]
) -> None:
    adafactor = {"optimizer": "adafactor", "adam_betas": None, "max_update": 24}
    flags = {**ON_GPU, **PRECISIONS[precision], **adafactor, **flags}
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


def test_captured_and_eager_are_equal_with_many_flags(found: Callable[..., Found]) -> None:
    flags = {**ON_GPU, **PRECISIONS["fp16"], "fp16_scale_window": 1000, "update_freq": "2,1"}
    flags.update(sentence_avg=True, report_accuracy=True, ignore_prefix_size=1, max_update=24)
    captured = found("captured", **flags)
    assert_same(captured, found("eager", captured=False, **flags))
    assert len(captured.losses) == 24


@pytest.mark.parametrize("text", [False, True], ids=["pairs", "running-text"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputed_activations_change_no_bit(
    precision: str, text: bool, tmp_path: Path, found: Callable[..., Found]
) -> None:
    flags = {**PRECISIONS[precision], "max_update": 24, "update_freq": 2}
    if text:
        sides = {f"decoder_{side}_dim": 64 for side in ("embed", "input", "output")}
        flags |= {**runs.TEXT, **sides, "cpu": None, "corpus": write_text(tmp_path / "text")}
    else:
        flags |= {**ON_GPU, "encoder_normalize_before": True, "decoder_normalize_before": True}
    again = {**flags, "checkpoint_activations": True}
    captured = found("captured", **again)
    assert_same(captured, found("eager", captured=False, **again))
    assert_same(captured, found("kept", captured=False, **flags))
    assert len(captured.losses) == 24


def test_a_longer_sentence_between_updates_leaves_graphs_right(
    found: Callable[..., Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longer sentence needs larger position tables; the graphs have captured the smaller
    ones."""
    start, updates = training_step.TrainingStep._collect_gradients, 0

    def after_a_long_one(self: training_step.TrainingStep, *arguments: Any) -> None:
        nonlocal updates
        updates += 1
        if updates == 18:  # all buckets of an epoch of 7 updates have graphs
            sides = self.model.encoder, self.model.decoder
            small = [side._table for side in sides]
            shape = 8, *small[0].shape
            tokens = torch.full((1, len(small[0]) + 1), 7, device="cuda")
            self.model.eval()
            with torch.no_grad():
                self.model(tokens, None, tokens)
            self.model.train()
            assert all(len(s._table) > len(t) for s, t in zip(sides, small, strict=True))
            del small
            # fills memory that has been freed
            nans: list[Any] = [torch.full(shape, torch.nan, device="cuda")]
            nans += self._graphs.launch(
                "nans", lambda: [torch.full(shape, torch.nan, device="cuda") for _ in range(2)]
            )
        start(self, *arguments)

    monkeypatch.setattr(training_step.TrainingStep, "_collect_gradients", after_a_long_one)
    flags = {**ON_GPU, "max_update": 32}
    captured = found("captured", **flags)
    updates = 0
    assert_same(captured, found("eager", captured=False, **flags))


def test_overflows_are_skipped_as_fairseq_skips_them(
    found: Callable[..., Found], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale doubles every third update until it is too large, again and again.

    The host has started more updates when it learns that one was skipped; in the eager run it waits
    for every update. Without dropout, whose bits differ from fairseq's.
    """
    flags = {**ON_GPU, "fp16": True, "fp16_init_scale": 2**13, "fp16_scale_window": 3}
    flags |= {"max_update": 40, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}

    def scales() -> list[str]:
        return re.findall(r"setting loss scale to: ([\d.]+)", caplog.text)

    captured = found("captured", **flags, log_interval=1)
    skips = {"captured": scales()}
    with monkeypatch.context() as waiting:
        waiting.setattr(captured_training, "steps_ahead", lambda *_: 0)
        eager = found("eager", captured=False, **flags, log_interval=1)
    skips["eager"] = scales()
    found("native", native=True, **{**flags, **runs.NATIVE}, log_interval=1)
    skips["native"] = scales()
    assert len(skips["captured"]) >= 2
    assert skips["captured"] == skips["eager"] == skips["native"]
    assert_same(captured, eager)
    assert captured.counts != eager.counts
    ends = set()
    for name in skips:
        state = torch.load(eager.folder.parent / name / "checkpoint_last.pt", weights_only=False)
        scale = state["last_optimizer_state"]["loss_scale"]
        ends.add((scale, state["optimizer_history"][-1]["num_updates"]))
    assert len(ends) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_repeats_the_losses(data: Path, tmp_path: Path, precision: str) -> None:
    flags = {**ON_GPU, **PRECISIONS[precision], "max_update": 24, "save_interval_updates": 9}
    whole = runs.run(data, tmp_path / "whole", **flags)
    restore = {"restore_file": str(tmp_path / "whole/checkpoint_2_9.pt")}
    rest = runs.run(data, tmp_path / "rest", **flags, **restore)
    assert rest == whole[9:]


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_either_goes_on_from_the_others_checkpoint(
    data: Path, tmp_path: Path, precision: str, ours_first: bool
) -> None:
    flags = {**ON_GPU, **PRECISIONS[precision]}
    first, second = (
        {**flags, **(runs.LS if ours else runs.NATIVE), "native": not ours}
        for ours in (ours_first, not ours_first)
    )
    runs.run(data, tmp_path / "both", **first)
    rest = runs.run(data, tmp_path / "both", **{**second, "max_update": 24})
    alone = runs.run(data, tmp_path / "alone", **{**first, "max_update": 24})
    assert len(rest) == 12
    assert rest == pytest.approx(alone[12:], rel=0.05)


def test_validation_and_saving_do_not_disturb(data: Path, tmp_path: Path) -> None:
    flags = {**ON_GPU, "bf16": True, "max_update": 24}
    alone = runs.run(data, tmp_path / "alone", **flags)
    flags.update(disable_validation=None, valid_subset="train", validate_interval_updates=5)
    flags.update(save_interval_updates=4)
    assert runs.run(data, tmp_path / "both", **flags) == alone
