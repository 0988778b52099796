"""Training runs of language models and of RoBERTa with a line of settings, and what they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.flag_training as flag_training
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
from fairseq.tasks import FairseqTask
from helpers.flag_runs import pieces


def named(settings: dict[str, Any], *lines: str) -> set[str]:
    """The settings of the lines, without those before a bar; ``settings``: the table's rows."""
    claimed = [piece for line in lines for piece in pieces(line.rpartition("|")[2])]
    words = {piece.split()[0] if piece.startswith("-") else "data" for piece in claimed}
    return {name for name, row in settings.items() if words & {name, *row.aliases}}


def train(
    line: str, native: bool, paths: dict[str, Path], folder: Path, defaults: dict[str, Any]
) -> dict[str, Any]:
    """Trains with the settings of ``line`` in addition to ``defaults``.

    A first word without dashes in ``line`` is the data folder. The value None removes a setting. In
    a native run, parts named ls_ are fairseq's.

    Args:
        paths: what names in braces stand for; "data" is the data folder if ``line`` has none.
        folder: of the checkpoints.

    Returns:
        The losses, what `validation` collects, the reasons for fairseq's own step, the type of the
        error or "", and how many layers backward has run again.
    """
    data, *given = ["{data}", *pieces(line)]
    if given and not given[0].startswith("-"):
        data, *given = given
    settings: dict[str, Any] = {}
    for piece in given:
        name, _, value = piece.removeprefix("--").partition(" ")
        value = value.format(**paths) if value in {f"{{{path}}}" for path in paths} else value
        settings[name.replace("-", "_")] = None if value == "None" else value or True
    settings = {**defaults, **settings}
    if native:
        parts = ("arch", "optimizer", "criterion")
        settings.update({name: settings[name].removeprefix("ls_") for name in parts})
    losses, error = [], ""
    with (
        parity.layers_in_backward() as again,
        flag_training.messages() as records,
        validation() as shown,
    ):
        try:
            losses = runs.run(Path(data.format(**paths)), folder, native, **settings)
        except (Exception, SystemExit) as failure:  # a setting may need another one
            error = type(failure).__name__
    log = "\n".join(record.getMessage() for record in records)
    reasons = re.findall(r"^step: fairseq's own \((.*)\)$", log, re.M)
    return {"losses": losses, **shown, "reasons": reasons, "error": error, "layers": len(again)}


@contextmanager
def validation() -> Iterator[dict[str, Any]]:
    """Collects of validation: the losses and shapes of labels of its batches, and the names and
    shapes of the model's state."""
    shown: dict[str, Any] = {"validated": [], "shapes": [], "state": {}}
    valid_step = FairseqTask.valid_step

    def noted(self: Any, sample: Any, model: Any, *arguments: Any) -> Any:
        shown["shapes"].append(tuple(sample["target"].shape))
        shown["state"] = {name: tuple(x.shape) for name, x in model.state_dict().items()}
        results = valid_step(self, sample, model, *arguments)
        shown["validated"].append(float(results[0]))
        return results

    with mock.patch.object(FairseqTask, "valid_step", noted):
        yield shown


def alike(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two runs have shown the same, except for the kind of the step."""
    return bool(
        all(ours[name] == theirs[name] for name in ("shapes", "state", "error", "layers"))
        and all(
            ours[name] == pytest.approx(theirs[name], rel=1e-5) for name in ("losses", "validated")
        )
    )
