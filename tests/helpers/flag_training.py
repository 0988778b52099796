"""Training runs with given settings, and what can be observed of them."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest
import torch
from fairseq import trainer, utils
from fairseq.data.iterators import BufferedIterator
from fairseq.logging import progress_bar
from fairseq.tasks.translation import TranslationTask
from helpers.parity import layers_in_backward
from torch.utils.data import DataLoader

import fairseq_cli.train  # isort: skip

from lightseq_fairseq.fairseq_compat.overlay import Overlay

PLAIN: dict[str, Any] = {
    "dropout": 0, "attention-dropout": 0, "activation-dropout": 0, "max-update": 4,
    "log-format": "json", "log-interval": 1, "share-decoder-input-output-embed": None,
    "warmup-updates": None, "lr-scheduler": "fixed", "max-tokens": 128,
    "disable-validation": True, "no-save": True,
}  # fmt: skip


@dataclass
class Trace:
    """What a run shows.

    Attributes:
        losses: the loss of each update.
        logged: logged statistics and printed examples.
        files: the files that it writes.
        asked: its requests to torch and fairseq: number of data loading processes, buffer sizes,
            dtypes and devices of the model, validated and translated batches; and how many layers
            backward has run again.
        error: how it failed, or "".
        refusals: why the captured step was not used.
    """

    losses: list[float] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    asked: dict[str, list[Any]] = field(default_factory=dict)
    error: str = ""
    refusals: list[str] = field(default_factory=list)

    def agrees(self, other: Trace, tolerance: float = 1e-5) -> bool:
        for name in ("files", "asked", "error"):
            if getattr(self, name) != getattr(other, name):
                return False
        if self.losses != pytest.approx(other.losses, rel=tolerance):
            return False
        return len(self.logged) == len(other.logged) and all(
            ours.keys() == theirs.keys()
            and all(_close(ours[k], theirs[k], 10 * tolerance + 1e-3) for k in ours)
            for ours, theirs in zip(self.logged, other.logged, strict=True)
        )


def _close(a: Any, b: Any, tolerance: float) -> bool:
    try:
        return float(a) == pytest.approx(float(b), rel=tolerance, abs=tolerance)
    except ValueError:
        return bool(a == b)


def inputs(folder: Path) -> dict[str, Path]:
    """Writes the files that lines of settings name in braces to ``folder``."""
    data, other = runs.corpus(folder / "corpus"), runs.corpus(folder / "other")
    for file in other.iterdir():  # text with subword marks and punctuation
        text = re.sub(r"\bw(\d*5)\b", r"w\1@@", file.read_text())
        file.write_text(re.sub(r"\bw(\d+)\b", lambda m: MARKS.get(m[1], m[0]), text))
    for side in ("src", "tgt"):
        # A second part of the training set and of the validation set; another text, binarised.
        shutil.copy(data / f"valid.src-tgt.{side}", data / f"train1.src-tgt.{side}")
        lines = (data / f"train.src-tgt.{side}").read_text().splitlines(keepends=True)
        (folder / f"binarised.{side}").write_text("".join(lines[::2]))
        shutil.copy(other / f"valid.src-tgt.{side}", other / f"valid1.src-tgt.{side}")
    cli_runs.succeed(
        "preprocess", "-s", "src", "-t", "tgt", "--destdir", data,
        "--trainpref", folder / "binarised", "--validpref", folder / "binarised",
        "--srcdict", data / "dict.src.txt", "--tgtdict", data / "dict.tgt.txt",
    )  # fmt: skip
    vectors = folder / "vectors"
    lines = [f"w{i} " + " ".join(f"{(i * j) % 7 / 7}" for j in range(16)) for i in range(90)]
    vectors.write_text("\n".join([f"{len(lines)} 16", *lines]) + "\n")
    found = {"data": data, "other": other, "vectors": vectors, "user": user_module(folder)}
    train(found, folder / "saved", "--max-update 3 --no-save None", native=True)
    return {**found, "checkpoint": folder / "saved" / "checkpoint_last.pt"}


MARKS = {"3": ",", "10": ".", "17": "?", "24": "!", "31": ";", "38": "'s"}
# A user's task with its own setting; it logs that it is used. Its batches depend on the epoch in
# which they are made: they lack one more sentence in each.
USER = """
import logging
from dataclasses import dataclass

from fairseq.tasks import TASK_REGISTRY, register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

logger = logging.getLogger("user")
logger.info("example of a module")


@dataclass
class UsersConfig(TranslationConfig):
    volume: int = 0


class UsersTask(TranslationTask):
    def begin_epoch(self, epoch, model):
        logger.info("example of a task")

    def get_batch_iterator(self, *arguments, epoch=1, **options):
        self.epoch = epoch
        return super().get_batch_iterator(*arguments, epoch=epoch, **options)

    def filter_indices_by_size(self, indices, *arguments):
        return super().filter_indices_by_size(indices, *arguments)[self.epoch - 1 :]


if "users" not in TASK_REGISTRY:
    register_task("users", dataclass=UsersConfig)(UsersTask)
"""


def user_module(folder: Path) -> Path:
    """A folder for --user-dir."""
    (folder / "user").mkdir()
    (folder / "user" / "__init__.py").write_text(USER)
    return folder / "user"


def train(inputs: dict[str, Path], save_dir: Path, line: str, native: bool) -> Trace:
    """Trains with the settings of ``line`` in addition to PLAIN.

    A first word without dashes in ``line`` is the data folder. An arch is named as in fairseq; our
    run uses the ls_ arch of that name. The value None removes a setting.
    """
    for name, path in {**inputs, "save": save_dir}.items():
        line = line.replace(f"{{{name}}}", str(path))
    given: dict[str, Any] = {}
    data = inputs["data"]
    for word in line.split():
        if word.startswith("--"):
            given[name := word[2:]] = True
        elif given:
            own = "ls_" if name == "arch" and not native else ""
            given[name] = None if word == "None" else own + word
        else:
            data = Path(word)
    save_dir.mkdir(parents=True, exist_ok=True)
    trace = Trace()
    with messages() as records, watched(trace.asked):
        try:
            parts = runs.NATIVE if native else runs.LS
            trace.losses += runs.run(data, save_dir, native, **{**parts, **PLAIN, **given})
        except (Exception, SystemExit) as error:
            # A run that diverged names its crash.pt.
            trace.error = f"{type(error).__name__}: {error}".replace(str(save_dir), "SAVE_DIR")
    for record in records:
        message = record.getMessage()
        if (told := re.fullmatch(r"step: fairseq's own \((.*)\)", message)) is not None:
            trace.refusals += [told[1]] * (not native)
        elif message.startswith("example "):
            trace.logged.append({"told": message})
        elif message.startswith('{"'):
            trace.logged.append(_statistics(json.loads(message)))
        elif re.search(r"\bloss[ =]\d", message):  # with --log-format simple
            trace.logged.append(_statistics(dict(re.findall(r"(\w+)[ =]([\d.]+)", message))))
    trace.files = sorted(
        f"{path.relative_to(save_dir)}{_contents(path)}"
        for path in save_dir.rglob("*")
        if path.is_file()
    )
    return trace


def _statistics(values: dict[str, Any]) -> dict[str, Any]:
    """Without the times, which differ in every run."""
    return {k: v for k, v in values.items() if not k.endswith(("wall", "wps", "ups"))}


def _contents(path: Path) -> str:
    """The size of the optimizer's state in a checkpoint."""
    state = torch.load(path, weights_only=False) if path.suffix == ".pt" else {}
    optimizer = state.get("last_optimizer_state")
    return "" if optimizer is None else f" with {len(optimizer['state'])} moments"


@contextmanager
def messages() -> Iterator[list[logging.LogRecord]]:
    """Collects all log records of the block, even if handlers are replaced meanwhile."""
    records: list[logging.LogRecord] = []
    handle, level = logging.Logger.handle, logging.getLogger().level
    own = {
        logger: list(logger.handlers) for logger in (fairseq_cli.train.logger, progress_bar.logger)
    }

    def keep(logger: logging.Logger, record: logging.LogRecord) -> None:
        records.append(record)
        handle(logger, record)

    logging.getLogger().setLevel(logging.INFO)
    try:
        with mock.patch.object(logging.Logger, "handle", keep):
            yield records
    finally:
        logging.getLogger().setLevel(level)
        for logger, handlers in own.items():  # --log-file adds handlers
            logger.handlers[:] = handlers


@contextmanager
def watched(asked: dict[str, list[Any]]) -> Iterator[None]:
    """Makes fairseq behave as in a fresh process at a terminal; ``asked`` collects its requests,
    see `Trace`."""
    load, wait = DataLoader.__init__, BufferedIterator.__init__
    begin, validate = trainer.Trainer.begin_epoch, TranslationTask.valid_step
    translate = TranslationTask.inference_step

    def seen(name: str, value: Any) -> None:
        asked.setdefault(name, []).append(value)

    def loader(self: Any, *arguments: Any, **keywords: Any) -> None:
        seen("workers", keywords["num_workers"])
        # Run without data loading processes, which are slow to start and to end.
        load(self, *arguments, **{**keywords, "num_workers": 0, "persistent_workers": False})

    def buffer(self: Any, size: int, iterable: Any) -> None:
        seen("buffers", size)
        wait(self, size, iterable)

    def begin_epoch(self: Any, epoch: int) -> None:
        seen("types", sorted({f"{p.dtype} {p.device}" for p in self.get_model().parameters()}))
        begin(self, epoch)

    def batch(sample: Any) -> Any:
        """The tokens with their pads, and the names of the other entries."""
        tokens = {k: x.tolist() for k, x in sample["net_input"].items() if k.endswith("_tokens")}
        return tokens, sorted(sample)

    def valid_step(self: Any, sample: Any, *arguments: Any) -> Any:
        seen("validated", batch(sample))
        return validate(self, sample, *arguments)

    def inference_step(
        self: Any, generator: Any, models: Any, sample: Any, *arguments: Any, **keywords: Any
    ) -> Any:
        seen("translated", batch(sample))
        return translate(self, generator, models, sample, *arguments, **keywords)

    vars(utils.import_user_module).pop("memo", None)
    sys.modules.pop("user", None)
    vars(fairseq_cli.train.should_stop_early).clear()
    with (
        layers_in_backward() as again,
        mock.patch.object(DataLoader, "__init__", loader),
        mock.patch.object(BufferedIterator, "__init__", buffer),
        mock.patch.object(trainer.Trainer, "begin_epoch", begin_epoch),
        mock.patch.object(TranslationTask, "valid_step", valid_step),
        mock.patch.object(TranslationTask, "inference_step", inference_step),
        # fairseq shows its progress bar only on a terminal.
        mock.patch.object(progress_bar, "sys", Overlay(sys, stderr=mock.Mock())),
        # After an overflow fairseq moves a number to the GPU and asks for the current device.
        mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor),
        mock.patch.object(torch.cuda, "current_device", lambda: None),
    ):
        yield
    seen("layers", len(again))
