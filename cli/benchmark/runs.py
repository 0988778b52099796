"""Common code of the benchmarks of ``lightseq-bench``: runs in turns, and result rows."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import torch

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.base.errors import UserError

Row = dict[str, Any]

# Cache folders of our library (timed GEMM algorithms) and of torch.compile (generated code).
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


# Models of all benchmarks that a machine without a GPU can run.
SMALL = (
    "tiny", "lm_tiny", "roberta_tiny", "bart_tiny", "nllb_tiny", "marian_tiny", "gpt2_tiny",
    "vit_tiny", "modernbert_tiny", "trained",
)  # fmt: skip


class Unable(UserError):
    """This machine cannot run a system; the message says why."""


class Bench(NamedTuple):
    """A benchmark, for `take_turns`.

    Attributes:
        measure: (case, system, stem of the run's files) -> measurements; raises UserError if the
            run fails, and `Unable` if the machine cannot run the system.
        row: (case, system, all its runs) -> result row.
        table: rows of one case -> lines to print.
    """

    measure: Callable[[Any, str, Path], Any]
    row: Callable[[Any, str, list[Any]], Row]
    table: Callable[[Sequence[Row]], list[str]]


def plan(
    cases: Any, case_names: Iterable[str], system_names: str | None, small: str,
    output: Path | None,
) -> tuple[dict[Any, list[str]], bool, Row]:  # fmt: skip
    """What to run: (case -> systems, whether there is a GPU, columns of `machine`).

    Args:
        cases: the benchmark's module of this name.
        case_names, system_names, output: options of the command.
        small: the example of a small case for the message of `machine`.

    Raises:
        UserError: as for the functions below; or tables cannot be printed.
    """
    result_rows.tabulate()
    parsed = [cases.Case.parse(word) for name in case_names for word in name.split(",")]
    systems = chosen(system_names, cases.SYSTEMS)
    gpu, about = machine(parsed, small, kept=output is not None)
    return able_systems(cases.why_not, parsed, systems), gpu, about


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile ``share`` of ``values``, without interpolation."""
    return sorted(values)[round((len(values) - 1) * share)]


def take_turns(
    bench: Bench, able: Mapping[Any, Sequence[str]], rounds: int, logs: Path, output: Path | None
) -> None:
    """Runs the systems of each case, and writes and prints the rows.

    Args:
        able: case -> systems, as `able_systems` finds them.
        logs: the folder of the runs' files.
        output: the file of rows; rows of the same case and system are replaced.

    Raises:
        UserError: no system can run here, runs failed, or ``output`` cannot be written.
    """
    logs.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    measured = False
    for case, its_systems in able.items():
        runs: dict[str, list[Any]] = {}
        left = list(its_systems)
        new: list[Row] = []
        # The systems take turns, so that other load on the machine affects all of them.
        for turn in range(1, rounds + 1):
            for system in list(left):
                name = f"{case} {system}"
                # Without dots: the names of its files are the stem with other suffixes.
                stem = logs.resolve() / f"{re.sub('[./]', '-', str(case))}-{system}-{turn}"
                click.echo(f"{name}, round {turn} of {rounds}: {stem}.log", err=True)
                try:
                    runs.setdefault(system, []).append(bench.measure(case, system, stem))
                except UserError as error:
                    left.remove(system)
                    click.echo(f"{name}: {error}", err=True)
                    if not isinstance(error, Unable):
                        failed.append(name)
                # Write after each run, so that an interrupted benchmark keeps its results.
                new = [bench.row(case, system, its) for system, its in runs.items() if its]
                if new and output is not None:
                    old = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
                    result_rows.write(merged(old, new), output)
        if new:
            measured = True
            click.echo("\n".join(bench.table(new)))
    if failed:
        raise UserError(f"These runs failed: {', '.join(failed)}. Their logs say why.")
    if not measured:
        raise UserError("Nothing was measured: none of the systems can run here.")


def able_systems(
    why_not: Callable[[str, Any], str | None], cases: Iterable[Any], systems: Sequence[str]
) -> dict[Any, list[str]]:
    """case -> systems that can run it here; prints why the others cannot.

    Args:
        why_not: (system, case) -> the reason if the system cannot run the case here, else None.

    Raises:
        UserError: no system can do any case.
    """
    able: dict[Any, list[str]] = {case: [] for case in cases}
    without = []
    for case, its_systems in able.items():
        for system in systems:
            if (reason := why_not(system, case)) is None:
                its_systems.append(system)
            else:
                without.append(f"{case} without {system}: {reason}")
    if not any(able.values()):
        raise UserError(f"No case can be measured here: {' '.join(without)}")
    for note in without:
        click.echo(f"lightseq-bench: note: {note}", err=True)
    return able


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """``old`` with rows of the same case and system replaced, then the other rows of ``new``."""
    fresh = {(row["case"], row["system"]): row for row in new}
    kept = [fresh.pop((row["case"], row["system"]), row) for row in old]
    return [*kept, *fresh.values()]


def chosen(names: str | None, systems: Mapping[str, Any]) -> list[str]:
    """The systems named by ``--systems``; default: all."""
    wanted = list(systems) if names is None else names.split(",")
    if unknown := [name for name in wanted if name not in systems]:
        raise UserError(
            f"There is no system {', '.join(unknown)}: choose from {', '.join(systems)}."
        )
    return wanted


def machine(cases: Iterable[Any], small: str, kept: bool) -> tuple[bool, Row]:
    """(whether there is a GPU, columns of a result row about the machine and, if kept, the code).

    kept: rows are written to a file.

    Raises:
        UserError: there is no GPU and a case needs one (those of `SMALL` models do not; ``small``
            is the example for the message), or rows are kept but the commit is unknown.
    """
    gpu = torch.cuda.is_available()
    if not gpu and (big := [str(case) for case in cases if case.model not in SMALL]):
        raise UserError(
            f"The case {big[0]} needs a GPU, but torch finds none: without a GPU, use --case "
            f"{small} to test that everything works."
        )
    code = {"commit": result_rows.current_commit()} if kept else {}
    name = torch.cuda.get_device_name() if gpu else "none"
    date = datetime.date.today().isoformat()
    return gpu, {**code, "date": date, "gpu": name, "torch": torch.__version__}


def process(words: Sequence[str], environment: Mapping[str, str], stem: Path) -> tuple[str, Row]:
    """Runs a command; the files of its log and report are named ``stem`` plus an ending.

    The run starts with empty caches, so its time includes initial tuning and compilation.

    Returns: (log, report).

    Raises:
        UserError: the command failed; the message ends with the log's last lines.
    """
    log, report = stem.with_suffix(".log"), stem.with_suffix(".json")
    report.unlink(missing_ok=True)
    with (
        open(log, "w", encoding="utf-8") as file,
        TemporaryDirectory(ignore_cleanup_errors=True) as cache,
    ):
        status = subprocess.run(
            words, env={**os.environ, **dict.fromkeys(CACHES, cache), **environment},
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    text = log.read_text(encoding="utf-8", errors="replace")
    if status != 0 or not report.exists():
        tail = "\n".join(text.splitlines()[-15:])
        raise UserError(f"the run ended with status {status}; the last lines of {log}:\n{tail}")
    return text, json.loads(report.read_text(encoding="utf-8"))
