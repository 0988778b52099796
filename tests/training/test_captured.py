"""Which runs use the captured step, and what happens in fairseq's loop if a step fails.

Here on a CPU, where the same code launches kernels one by one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import random
import re
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterionConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture
from fairseq.tasks.translation import TranslationTask

from lightseq_fairseq.cli.checks import Request, messages
from lightseq_fairseq.plugins.criterion import LabelSmoothedCrossEntropyCriterion
from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.step.objectives import SentenceClasses
from lightseq_fairseq.step.training_step import TrainingStep
from lightseq_fairseq.training.background import Writer


@register_criterion("ls_tenfold", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class Tenfold(LabelSmoothedCrossEntropyCriterion):
    """Extends our criterion, as a user's --user-dir may."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        loss, sample_size, logged = super().forward(*arguments, **keywords)
        return 10 * loss, sample_size, {**logged, "loss": 10 * logged["loss"]}


@register_criterion("ls_of_heads", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class OfHeads(LabelSmoothedCrossEntropyCriterion):
    """Its objective needs a model with classification heads."""

    def objective(self) -> Any:
        return SentenceClasses("head")


@register_model_architecture("ls_transformer", "ls_drops_layers")
def _drops(args: Any) -> None:
    args.encoder_layerdrop = getattr(args, "encoder_layerdrop", 0.2)
    ARCH_CONFIG_REGISTRY["transformer_tiny"](args)


def run(data: Path, folder: Path, **flags: Any) -> list[float]:
    return runs.run(data, folder, **{**runs.LS, "no_save": True, "max_update": 4, **flags})


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return re.findall(r"step: fairseq's own \((.*)\)", caplog.text)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"arch": "transformer_tiny"}, "our step does not support the arch"),
        (
            {"criterion": "label_smoothed_cross_entropy"},
            "our step does not support the criterion",
        ),
        ({"criterion": "ls_tenfold"}, "our step does not support the criterion"),
        (
            {"criterion": "ls_of_heads"},
            "our step does not support the arch with this criterion",
        ),
        ({"optimizer": "adam"}, "the optimizer is not ls_adam or adafactor"),
        ({"encoder_layerdrop": 0.1}, "--encoder-layerdrop"),
        ({"arch": "ls_drops_layers"}, "the arch sets --encoder-layerdrop"),
        ({"memory_efficient_bf16": True, "bf16": True}, "--memory-efficient-bf16"),
        ({"store_ema": True}, "--store-ema"),
        (
            {"left_pad_target": True, "ignore_prefix_size": 1},
            "--ignore-prefix-size with --left-pad-target",
        ),
        ({"num_batch_buckets": 2}, "sentences are padded to length buckets"),
    ],
)
def test_what_is_not_covered_takes_fairseqs_step_and_says_so_once(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: dict[str, Any],
    reason: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    losses = run(data, tmp_path, max_epoch=2, max_update=None, **flags)
    assert len(losses) > 4
    assert len(reasons(caplog)) == 1
    assert reasons(caplog)[0].startswith(reason)


def test_what_extends_ours_is_called(data: Path, tmp_path: Path) -> None:
    losses, tenfold = (
        run(
            data,
            tmp_path / name,
            criterion=name,
            dropout=0,
            attention_dropout=0,
            activation_dropout=0,
        )
        for name in ("ls_label_smoothed_cross_entropy", "ls_tenfold")
    )
    assert tenfold[0] == pytest.approx(10 * losses[0], rel=1e-3)


def test_all_of_ours_take_our_step(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    step = TrainingStep.update
    with mock.patch.object(TrainingStep, "update", autospec=True, side_effect=step) as spy:
        run(data, tmp_path)
    assert spy.call_count == 4
    assert reasons(caplog) == []


def test_a_run_with_layerdrop_goes_on_without(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"no_save": None, "encoder_layers": 2, "max_update": 9}
    run(data, tmp_path, **flags, encoder_layerdrop=0.5)
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert len(run(data, tmp_path, **{**flags, "max_update": 16})) == 7
    assert reasons(caplog) == []  # though some layers were updated less often than others


@pytest.mark.parametrize("first", [True, None], ids=["added", "removed"])
def test_a_run_goes_on_with_or_without_recomputed_activations(
    data: Path, tmp_path: Path, first: bool | None
) -> None:
    flags = {"no_save": None, "max_update": 8, "checkpoint_activations": None}
    whole = run(data, tmp_path / "whole", **flags)
    for again, updates in ((first, 4), (None if first else True, 8)):
        change = {"max_update": updates, "checkpoint_activations": again}
        losses = run(data, tmp_path / "parts", **{**flags, **change})
    assert losses == whole[4:]
    parts = runs.trained(tmp_path / "parts")
    assert runs.differing(parts, runs.trained(tmp_path / "whole")) == []


@pytest.mark.parametrize("batch", [1, 2])
def test_an_update_of_two_batches_that_ran_out_of_memory_is_made_again(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, batch: int
) -> None:
    packed_logits = LSTransformerModel.packed_logits

    def train(fails: bool) -> tuple[list[float], int]:
        calls = []

        def counted(self: LSTransformerModel, *arguments: Any) -> Any:
            calls.append(arguments)
            logits = packed_logits(self, *arguments)
            if fails and len(calls) == 2 + batch:  # the second update
                raise RuntimeError("CUDA out of memory: a test wanted all of it")
            return logits

        with mock.patch.object(LSTransformerModel, "packed_logits", counted):
            return run(data, tmp_path, update_freq="2", dropout=0.1), len(calls)

    caplog.set_level(logging.INFO)
    losses, count = train(fails=False)
    assert train(fails=True) == (losses, count + batch)
    assert caplog.text.count("and the update starts again") == 1


def test_out_of_memory_skips_the_batch(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, calls = TrainingStep.update, []

    def fails_once(self: TrainingStep, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("CUDA out of memory: a test wanted all of it")
        return step(self, *arguments)

    with mock.patch.object(TrainingStep, "update", fails_once):
        losses = run(data, tmp_path)
    assert len(calls) == 5
    assert len(losses) == 4
    assert "attempting to recover from OOM" in caplog.text


def test_a_validation_that_ran_out_of_memory_gets_that_of_the_graphs(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    validates, forgets = TranslationTask.valid_step, TrainingStep.forget_graphs

    def validate(fails: bool) -> tuple[list[float], list[str]]:
        events = []

        def validated(self: TranslationTask, *arguments: Any) -> Any:
            events.append("batch")
            found = validates(self, *arguments)
            if fails and len(events) == 3:  # the second batch
                raise RuntimeError("CUDA out of memory: a test wanted all of it")
            events.append(str(found))
            return found

        def forgotten(self: TrainingStep) -> None:
            events.append("forget")
            forgets(self)

        flags = {"disable_validation": None, "validate_interval_updates": 2}
        with (
            mock.patch.object(TranslationTask, "valid_step", validated),
            mock.patch.object(TrainingStep, "forget_graphs", forgotten),
        ):
            return run(data, tmp_path, **flags), events

    caplog.set_level(logging.INFO)
    losses, events = validate(fails=False)
    assert len(events) > 4
    events[3:3] = ["forget", "batch"]
    assert validate(fails=True) == (losses, events)
    assert caplog.text.count("and the batch starts again") == 1


@pytest.mark.parametrize("bf16", [True, None])
def test_a_gradient_that_is_not_finite_stops_the_run_which_can_go_on(
    data: Path, tmp_path: Path, bf16: bool | None
) -> None:
    runs.assert_stops_and_goes_on(data, tmp_path, **runs.LS, bf16=bf16)


def test_a_gradient_that_is_not_finite_and_a_file_that_cannot_be_written(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "crash.pt").mkdir()
    with runs.nan_in_update(2), pytest.raises(FloatingPointError) as caught:
        run(data, tmp_path)
    sentence = messages.explain(caught.value, Request())
    assert sentence is not None
    assert sentence.startswith("gradients are Nan/Inf in update 2: training has diverged. Lower ")
    lost = "The state before this update could not be saved: "
    assert f"{lost}Cannot write {tmp_path}/crash.pt (Is a directory)" in sentence


def test_another_number_of_batches_an_update_in_the_next_epoch(data: Path, tmp_path: Path) -> None:
    losses = run(data, tmp_path, update_freq="1,3", max_epoch=2, max_update=None)
    assert len(losses) == 7 + 3
    assert min(losses[7:9]) > max(losses[:7])


def test_validation_on_the_training_set(data: Path, tmp_path: Path) -> None:
    alone = run(data, tmp_path, max_epoch=3, max_update=None)
    flags = {"disable_validation": None, "valid_subset": "train", "validate_interval_updates": 5}
    assert run(data, tmp_path, max_epoch=3, max_update=None, **flags) == alone
    assert len(alone) == 21


def test_a_killed_worker_ends_the_run_which_then_goes_on(data: Path, tmp_path: Path) -> None:
    flags = {"max_update": 10, "num_workers": 1, "no_save": None, "save_interval_updates": 2}
    whole = run(data, tmp_path / "whole", **flags)
    step, calls, others = TrainingStep.update, [], set(multiprocessing.active_children())

    def kills(self: TrainingStep, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            for worker in set(multiprocessing.active_children()) - others:
                os.kill(worker.pid, signal.SIGKILL)
        return step(self, *arguments)

    with mock.patch.object(TrainingStep, "update", kills), pytest.raises(RuntimeError) as caught:
        run(data, tmp_path / "killed", **flags)
    sentence = messages.explain(caught.value, Request())
    assert sentence is not None
    assert "A process that loads data (pid " in sentence
    rest = run(data, tmp_path / "killed", **flags)
    assert 0 < len(rest) <= 8
    assert rest == whole[-len(rest) :]


def test_killed_five_times_at_random(data: Path, tmp_path: Path) -> None:
    flags = {"max_update": 20, "no_save": None, "save_interval_updates": 2, "bf16": True}
    whole = run(data, tmp_path / "whole", **flags)
    generator, step = random.Random(5), TrainingStep.update

    def killed(updates: int) -> None:
        calls: list[Any] = []

        def dies(self: TrainingStep, *arguments: Any) -> Any:
            if len(calls) == updates:
                runs.die()
            calls.append(arguments)
            return step(self, *arguments)

        with mock.patch.object(TrainingStep, "update", dies):
            run(data, tmp_path / "killed", **flags)

    for _ in range(5):
        status = runs.in_a_fork(functools.partial(killed, generator.randint(1, 5)))
        assert status == -signal.SIGKILL
    rest = run(data, tmp_path / "killed", **flags)
    assert 0 < len(rest) < 20
    assert rest == whole[-len(rest) :]
    assert runs.differing(*(runs.trained(tmp_path / name) for name in ("killed", "whole"))) == []


def test_killed_at_random_while_it_saves(data: Path, tmp_path: Path) -> None:
    """After each kill, every checkpoint file is complete, and the last one is no older than
    before."""
    flags = {"max_update": 30, "no_save": None, "save_interval_updates": 1, "bf16": True}
    flags.update(keep_interval_updates=2, no_epoch_checkpoints=True)
    whole = run(data, tmp_path / "whole", **flags)
    generator, folder, save = random.Random(7), tmp_path / "killed", Writer.save

    def killed(saves: int, seconds: float) -> None:
        left = itertools.count(saves, -1)

        def told(self: Writer, *arguments: Any) -> None:
            save(self, *arguments)
            if next(left) == 1:
                # Then SIGPROF ends this process as SIGKILL would. It counts the seconds that the
                # process computes: on a busy machine they are as long.
                signal.setitimer(signal.ITIMER_PROF, seconds)

        with mock.patch.object(Writer, "save", told):
            run(data, folder, **flags)

    updates = 0
    for kills in range(1, 9):
        when = generator.randint(1, 3), generator.uniform(1e-3, 0.03)
        assert runs.in_a_fork(functools.partial(killed, *when)) == -signal.SIGPROF
        for path in folder.glob("*.pt"):
            state = torch.load(path, weights_only=False)
            if path.name == "checkpoint_last.pt":
                last = state["optimizer_history"][-1]["num_updates"]
                assert last >= updates
                updates = last
        # Each kill may come between a save and the deletion of what it replaces. The next save
        # that is not killed there deletes all of them: see the end.
        assert len(list(folder.glob("checkpoint_*_*.pt"))) <= 2 + kills
    assert updates
    rest = run(data, folder, **flags)
    assert rest == whole[updates:]
    assert runs.differing(runs.trained(folder), runs.trained(tmp_path / "whole")) == []
    assert sorted(os.listdir(folder)) == sorted(os.listdir(tmp_path / "whole"))


def test_an_epoch_of_other_data_goes_on_with_fairseqs_steps(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Other shards may have other data. fairseq's step then finds the fp32 parameters, which the
    captured step had split."""
    caplog.set_level(logging.INFO)
    flags = {"bf16": True, "dropout": 0.0, "max_update": 24, "lr": 1e-2}
    everything = run(data, tmp_path, **flags)
    answers = iter([None])
    covers = mock.Mock(side_effect=lambda dataset: next(answers, "other data"))
    with mock.patch("lightseq_fairseq.training.batch.covers", covers):
        losses = run(data, tmp_path, **flags)
    assert covers.call_count >= 2 and reasons(caplog) == ["other data"]
    assert losses[:6] == everything[:6]
    assert max(losses[6:]) < 1.05 * max(losses[:6])  # the batches have another order
