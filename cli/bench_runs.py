"""What the benchmarks of ``lightseq-bench`` share: systems that take turns, and result rows."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from lightseq_fairseq.errors import UserError

Row = dict[str, Any]


class Unable(UserError):
    """This machine cannot run a system; the message says why."""


class Bench(NamedTuple):
    """A benchmark, for `take_turns`.

    Attributes:
        why_not: (system, case) -> a sentence if the one cannot do the other here.
        measure: (case, system, stem of the run's files) -> what was measured; raises UserError
            where the run failed, `Unable` where it finds that it cannot be.
        row: (case, system, all runs of it) -> its result row.
        table: rows of one case -> lines to read.
    """

    why_not: Callable[[str, Any], str | None]
    measure: Callable[[Any, str, Path], Any]
    row: Callable[[Any, str, list[Any]], Row]
    table: Callable[[Sequence[Row]], list[str]]


def take_turns(
    bench: Bench, cases: Iterable[Any], systems: Iterable[str], rounds: int, logs: Path,
    output: Path | None, result_rows: Any,
) -> list[str]:  # fmt: skip
    """Runs each system on each case, and writes and prints the rows.

    Args:
        logs: the folder of the runs' files.
        output: the file of rows, of which those of the same case and system are replaced.
        result_rows: the module that writes it.

    Returns: the case and system of each run that failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for case in cases:
        runs: dict[str, list[Any]] = {}
        able = list(_able(bench, systems, case))
        new: list[Row] = []
        # The systems take turns, so that what else the machine does meets all of them.
        for turn in range(1, rounds + 1):
            for system in list(able):
                name = f"{case} {system}"
                stem = logs.resolve() / f"{str(case).replace('/', '-')}-{system}-{turn}"
                click.echo(f"{name}, round {turn} of {rounds}: {stem}.log", err=True)
                try:
                    runs.setdefault(system, []).append(bench.measure(case, system, stem))
                except UserError as error:
                    able.remove(system)
                    click.echo(f"{name}: {error}", err=True)
                    if not isinstance(error, Unable):
                        failed.append(name)
            # After each round: an hour of runs that is cut short is not lost.
            new = [bench.row(case, system, its) for system, its in runs.items() if its]
            if new and output is not None:
                old = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
                result_rows.write(merged(old, new), output)
        if new:
            click.echo("\n".join(bench.table(new)))
    return failed


def _able(bench: Bench, systems: Iterable[str], case: Any) -> Iterator[str]:
    """The systems that can do the case here; why the others cannot is said."""
    for system in systems:
        if (reason := bench.why_not(system, case)) is None:
            yield system
        else:
            click.echo(f"lightseq-bench: note: {case} without {system}: {reason}", err=True)


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """``old`` with the rows of the same case and system replaced, the others kept."""
    fresh = {(row["case"], row["system"]) for row in new}
    kept = [row for row in old if (row["case"], row["system"]) not in fresh]
    return sorted([*kept, *new], key=lambda row: row["case"])


def chosen(names: str | None, systems: Mapping[str, Any]) -> list[str]:
    """The systems that ``--systems`` names, by default all."""
    wanted = list(systems) if names is None else names.split(",")
    if unknown := [name for name in wanted if name not in systems]:
        raise UserError(
            f"There is no system {', '.join(unknown)}: --systems takes {', '.join(systems)}."
        )
    return wanted


def machine(cases: Iterable[Any], small: str) -> tuple[bool, Row]:
    """Whether there is a GPU, and what a result row says of the machine.

    Raises:
        UserError: there is none, and a case is not of the model ``tiny``; ``small`` is one that is.
    """
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and (big := [str(case) for case in cases if case.model != "tiny"]):
        raise UserError(
            f"{big[0]} needs a GPU and torch sees none: without one, --case {small} shows "
            "that everything works."
        )
    name = torch.cuda.get_device_name() if gpu else "none"
    date = datetime.date.today().isoformat()
    return gpu, {"date": date, "gpu": name, "torch": torch.__version__}


def result_rows(root: Path) -> Any:
    """scripts/result_rows.py of the clone in ``root``, which all measuring scripts share."""
    scripts = root / "scripts"
    if not (scripts / "result_rows.py").is_file():
        raise UserError(
            "lightseq-bench runs from a clone of the repository, whose commit its results name: "
            "install it with pip install -e ."
        )
    sys.path.append(str(scripts))
    return importlib.import_module("result_rows")


def process(words: Sequence[str], environment: Mapping[str, str], stem: Path) -> tuple[str, Row]:
    """Runs a command whose log and report are ``stem`` with their endings.

    Returns: both.

    Raises:
        UserError: it failed; the message ends with the log's last lines.
    """
    log, report = stem.with_suffix(".log"), stem.with_suffix(".json")
    report.unlink(missing_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run(
            words, env={**os.environ, **environment},
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    text = log.read_text(encoding="utf-8", errors="replace")
    if status != 0 or not report.exists():
        tail = "\n".join(text.splitlines()[-15:])
        raise UserError(f"the run left with status {status}; its log ends with\n{tail}")
    return text, json.loads(report.read_text(encoding="utf-8"))
