"""Trains a model of Hugging Face with the Trainer of a system, and times blocks of updates.

    python -m lightseq_fairseq.cli.benchmark.huggingface.training (options of `cases.command`)

The loop, its data loader and its optimizer are the Trainer's. A callback waits for the GPU after
each block of updates.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.cli.benchmark.attention import WITHOUT_CAUSAL_MASK, WITHOUT_MASK
from lightseq_fairseq.cli.benchmark.huggingface import reports
from lightseq_fairseq.cli.benchmark.huggingface.cases import BLOCK, SYSTEMS, Case, System
from lightseq_fairseq.cli.benchmark.huggingface.models import built
from lightseq_fairseq.cli.benchmark.huggingface.samples import (
    MOST,
    collator,
    count_of,
    dataset,
    resized,
    shapes,
)
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter

LOSSES = 10  # first updates whose losses are reported
_PASSES = 3  # of a shape: torch runs it eagerly, then captures it, then replays


class _Measured:
    """Mixin of the Trainers: counts tokens, keeps the first losses, prepares shapes.

    Attributes:
        to_prepare: lengths of the sides of batches that are compiled before the first update.
    """

    case: Case
    to_prepare: list[tuple[int, ...]]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts: list[Tensor | int] = []
        self.losses: list[Tensor] = []

    def training_step(
        self: Any, model: nn.Module, inputs: dict[str, Tensor], *more: Any, **options: Any
    ) -> Tensor:
        step = super().training_step  # type: ignore[misc]
        pad = getattr(self.model.config, "pad_token_id", None) or 0
        for shape in self.to_prepare:
            for _ in range(_PASSES):
                step(model, resized(inputs, shape, pad), *more, **options)
                self.model.zero_grad()
        self.to_prepare = []
        self.counts.append(count_of(inputs, self.case))
        loss: Tensor = step(model, inputs, *more, **options)
        if len(self.losses) < LOSSES:
            self.losses.append(loss.detach().float().clone())
        return loss


class _Clock(transformers.TrainerCallback):
    """Times the end of the first update, and of each block after the warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.first = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.warm_up == 0:
            self.ends.append(time.time())

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        after = state.global_step - self.warm_up
        ends_block = after >= 0 and after % BLOCK == 0
        if state.global_step == 1 or ends_block:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.time()
            self.first = self.first or now
            if ends_block:
                self.ends.append(now)


def main() -> None:
    given = reports.arguments(__doc__)
    memory = MemoryMeter(gpu=not given.cpu)
    with TemporaryDirectory() as folder:
        trainer, clock = trainer_of(given, folder)
        started = time.time()
        trainer.train()
        ended = time.time()
    counts = torch.tensor([int(count) for count in trainer.counts])
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:])]
    report = {
        "block_batches": BLOCK,
        "block_s": seconds,
        "block_tokens": counts[given.warm_up :].view(-1, BLOCK).sum(1).tolist(),
        "train_to_first_s": clock.first - started,
        "start_to_first_s": clock.first - given.began,
        "job_s": ended - given.began,
        "losses": [float(loss) for loss in trainer.losses],
    }
    reports.write(given, trainer.model, memory, report)


def trainer_of(given: argparse.Namespace, folder: str | Path) -> tuple[Any, _Clock]:
    case: Case = given.case
    how, updates = SYSTEMS[given.system], given.warm_up + given.updates
    torch.manual_seed(1)
    model = built(case, _attention(case, how))
    if how.accelerated:
        lightseq.accelerate(model)
    prefix = "Seq2Seq" if case.work.has_target else ""
    args = getattr(transformers, f"{prefix}TrainingArguments")(
        str(folder), max_steps=updates, per_device_train_batch_size=case.batch, bf16=True,
        learning_rate=2e-5, optim="adamw_torch_fused", logging_nan_inf_filter=False,
        logging_steps=max(updates, 2), save_strategy="no", report_to=[], disable_tqdm=True, seed=1,
        dataloader_num_workers=given.workers, dataloader_persistent_workers=given.workers > 0,
        use_cpu=given.cpu, torch_compile=how.mode is not None, torch_compile_mode=how.mode,
        train_sampling_strategy="group_by_length" if how.grouped else "random",
        remove_unused_columns=False, dataloader_drop_last=True,
        # By default the host waits for the GPU at each batch that it sends.
        accelerator_config={"non_blocking": True},
    )  # fmt: skip
    kind = getattr(lightseq if how.trainer else transformers, f"{prefix}Trainer")
    clock = _Clock(given.warm_up)
    trainer: Any = type("MeasuredTrainer", (_Measured, kind), {"case": case})(
        model, args, data_collator=collator(case, how.multiple),
        train_dataset=dataset(case, min(updates * case.batch, MOST)), callbacks=[clock],
    )  # fmt: skip
    trainer.to_prepare = shapes(case, given.system)
    return trainer, clock


def _attention(case: Case, how: System) -> str:
    """The attention of a system: sdpa, compiled without masks that are not needed."""
    if how.mode is None or (case.has_pads and not case.work.has_target):
        return "sdpa"
    return WITHOUT_CAUSAL_MASK if case.work.has_target else WITHOUT_MASK


if __name__ == "__main__":
    main()
