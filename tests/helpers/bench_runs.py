"""Runs of ``lightseq-bench`` in this process; each run that it measures is a forked process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from click.testing import CliRunner, Result
from helpers import forked_commands, parity  # prepares fairseq
from torch import Tensor

from lightseq_fairseq.cli import bench
from lightseq_fairseq.cli.benchmark.train import cases, commands
from lightseq_fairseq.cli.benchmark.train.cases import SYSTEMS, Case
from lightseq_fairseq.cli.benchmark.train.commands import command
from lightseq_fairseq.cli.words import defaults
from lightseq_fairseq.cli.words.argv import without_prefixes

from fairseq import tasks  # isort: skip


def bench_train(*words: object) -> Result:
    return CliRunner().invoke(bench.main, ["train", *map(str, words)])


def bench_forked(*words: object, status: int = 0) -> Result:
    """The result of the command, which must end with this status."""
    if words[0] != "train":
        forked_commands.load("transformers.models.bart.modeling_bart", "transformers.trainer")
    with mock.patch.object(sys, "executable", str(forked_commands.python())):
        done = CliRunner().invoke(bench.main, list(map(str, words)))
    assert done.exit_code == status, done.stderr
    return done


def bench_once(
    folder: Path,
    case: str,
    systems: Sequence[str],
    *corpus: object,
    interval: int = 10,
    warm_up: int = 0,
) -> tuple[Any, dict[str, Any]]:
    """The result of ``lightseq-bench train``, and its rows by system; ``corpus`` holds further
    words. Few updates are profiled, since profiles of a CPU are long to read.

    interval: updates of the measurement, and of the log's interval.
    warm_up: updates before them; a row has the time of 100 updates only if both are as many."""
    output = folder / "rows.json"
    with (
        mock.patch.dict(SYSTEMS, {name: how._replace(marks=3) for name, how in SYSTEMS.items()}),
        mock.patch.object(cases, "LOG_INTERVAL", interval),
        mock.patch.object(commands, "LOG_INTERVAL", interval),
    ):
        done = bench_forked(
            "train", "--case", case, "--systems", ",".join(systems),
            "--updates", interval, "--warm-up", warm_up, "--rounds", 1, "--workers", 0, *corpus,
            "--output", output, "--logs", folder / "logs",
        )  # fmt: skip
    return done, {row["system"]: row for row in json.loads(output.read_text())}


def fairseqs(case: Case, data: Path, *flags: object) -> tuple[Any, Any]:
    """fairseq's configuration and task of the command that trains its own model on ``case``."""
    words = command(case, "fairseq", data, data / "report.json", 1, False, 0)
    words = [word for word in words[words.index("--") + 1 :] if word != "--native"]
    words = defaults.complete([*words, *map(str, flags)], defaults.Machine())
    cfg = parity.parse(without_prefixes(words))
    return cfg, tasks.setup_task(cfg.task)


def layer_state(native: Mapping[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """The state of the baseline's layer ``ours`` with the weights of fairseq's layer ``theirs``."""
    names = {
        f"{ours}.attention.out": f"{theirs}.self_attn.out_proj",
        f"{ours}.feed_forward.fc1": f"{theirs}.fc1",
        f"{ours}.feed_forward.fc2": f"{theirs}.fc2",
        f"{ours}.norms.0": f"{theirs}.self_attn_layer_norm",
        f"{ours}.norms.1": f"{theirs}.final_layer_norm",
    }
    state = {}
    for kind in ("weight", "bias"):
        state |= {f"{mine}.{kind}": native[f"{other}.{kind}"] for mine, other in names.items()}
        parts = [native[f"{theirs}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
        state[f"{ours}.attention.projections.0.{kind}"] = torch.cat(parts)
    return state
