"""``lightseq-bench``: measures whole training runs, ours beside what else a user could set up."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from lightseq_fairseq.cli.bench_train import corpus as corpora
from lightseq_fairseq.cli.bench_train import rows
from lightseq_fairseq.cli.bench_train.cases import SYSTEMS, Case, command, environment, why_not
from lightseq_fairseq.cli.launch import Stop
from lightseq_fairseq.errors import UserError

# The clone that this package is run from: commits of result rows are known nowhere else.
ROOT = Path(__file__).resolve().parent.parent


@click.group(context_settings={"max_content_width": 100})
def main() -> None:
    """Measure training speed on this machine."""


@main.command()
@click.option(
    "--case", "cases", multiple=True, default=["t2t_big/4096/bf16"], show_default=True,
    metavar="CASE,...",
    help="What to train: <model>/<max-tokens>/<precision>. Models are t2t_big, 12e12d and 24e24d "
    "(t2t_big with 12 and 24 layers a side), base, iwslt, and tiny, which a CPU can run; "
    "precisions are bf16 and fp16. May be given several times.",
)  # fmt: skip
@click.option(
    "--systems",
    metavar="SYSTEM,...",
    help="Of ours, fairseq_no_cudnn, fairseq_no_cudnn_apex, fairseq, torch_compile.  [default: "
    "all that this machine can run]",
)
@click.option(
    "--updates", type=click.IntRange(50), default=300, show_default=True,
    help="Updates that are measured in a run, after the warm-up.",
)  # fmt: skip
@click.option(
    "--warm-up", type=click.IntRange(0),
    help="Updates before them.  [default: 1500 for ours, 500 for torch_compile, 150 for others]",
)  # fmt: skip
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True,
    help="Runs of each system; the systems take turns.",
)  # fmt: skip
@click.option(
    "--corpus", type=click.Path(path_type=Path), default=ROOT / "build" / "bench-corpus",
    help="Folder of the sentence pairs, made if it does not exist.  [default: build/bench-corpus]",
)  # fmt: skip
@click.option(
    "--pairs", type=click.IntRange(1), default=corpora.PAIRS, show_default=True,
    help="Sentence pairs in it.",
)  # fmt: skip
@click.option(
    "--vocabulary", type=click.IntRange(100, 65_000), default=corpora.VOCABULARY,
    show_default=True, help="Words of its joint dictionary, fairseq's special ones included.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(0), default=4, show_default=True,
    help="Processes that make the batches, for every system.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path),
    help="Result rows: those of the same case and system are replaced, others stay.  [default: "
    "scripts/results/train-h200.json, or none without a GPU]",
)  # fmt: skip
@click.option(
    "--logs", type=click.Path(path_type=Path), default=ROOT / "build" / "bench-train",
    help="Folder for the log and the report of each run.  [default: build/bench-train]",
)  # fmt: skip
def train(cases: Sequence[str], systems: str | None, output: Path | None, **options: Any) -> None:
    """Train on a WMT-like corpus with several systems, and compare them.

    \b
        lightseq-bench train --case t2t_big/4096/bf16 --systems ours,fairseq_no_cudnn

    Every run is a real training in a process of its own. Printed and saved are target tokens a
    second, milliseconds a step with their spread, the GPU's busy share, the share of the counted
    floor, peak memory, the time of the first 100 updates and the step's time by part.
    """
    try:
        failed = _train(cases, systems, output, **options)
    except UserError as error:
        raise Stop("lightseq-bench", str(error)) from error
    if failed:
        raise Stop("lightseq-bench", f"these runs failed: {', '.join(failed)}.")


def _train(
    case_names: Sequence[str], system_names: str | None, output: Path | None, corpus: Path,
    pairs: int, vocabulary: int, logs: Path, rounds: int, **options: Any,
) -> list[str]:  # fmt: skip
    """Everything that `train` does; the case and system of each run that failed."""
    cases = [Case.parse(word) for name in case_names for word in name.split(",")]
    systems = _systems(system_names)
    result_rows = _result_rows()
    gpu, about = _machine(cases)
    if output is None and gpu:
        output = ROOT / "scripts" / "results" / "train-h200.json"
    about = {"commit": result_rows.current_commit(), **about}
    data = corpora.ensure(corpus, pairs, vocabulary)
    logs.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for case in cases:
        runs: dict[str, list[rows.Run]] = {}
        # The systems take turns, so that what else the machine does meets all of them.
        for turn in range(1, rounds + 1):
            for system in _able(systems, case, quiet=turn > 1):
                name = f"{case} {system}"
                if name in failed:
                    continue
                stem = logs.resolve() / f"{str(case).replace('/', '-')}-{system}-{turn}"
                click.echo(f"{name}, round {turn} of {rounds}: {stem}.log", err=True)
                try:
                    run = _run(case, system, data, stem, gpu=gpu, **options)
                except UserError as error:
                    click.echo(f"{name}: {error}", err=True)
                    failed.append(name)
                else:
                    runs.setdefault(system, []).append(run)
            # After each round: an hour of runs that is cut short is not lost.
            new = [rows.row(case, system, data, its, about) for system, its in runs.items()]
            if new and output is not None:
                old = json.loads(output.read_text(encoding="utf-8")) if output.exists() else []
                result_rows.write(rows.merged(old, new), output)
        if new:
            click.echo("\n".join(rows.table(new)))
    return failed


def _systems(names: str | None) -> list[str]:
    systems = list(SYSTEMS) if names is None else names.split(",")
    if unknown := [name for name in systems if name not in SYSTEMS]:
        raise UserError(
            f"There is no system {', '.join(unknown)}: --systems takes {', '.join(SYSTEMS)}."
        )
    return systems


def _machine(cases: Iterable[Case]) -> tuple[bool, dict[str, Any]]:
    """Whether there is a GPU, and what a result row says of the machine."""
    import torch

    gpu = torch.cuda.is_available()
    if not gpu and (big := [str(case) for case in cases if case.model != "tiny"]):
        raise UserError(
            f"{big[0]} needs a GPU and torch sees none: without one, --case tiny/256/bf16 shows "
            "that everything works."
        )
    name = torch.cuda.get_device_name() if gpu else "none"
    date = datetime.date.today().isoformat()
    return gpu, {"date": date, "gpu": name, "torch": torch.__version__}


def _result_rows() -> Any:
    """scripts/result_rows.py, which all measuring scripts share."""
    scripts = ROOT / "scripts"
    if not (scripts / "result_rows.py").is_file():
        raise UserError(
            "lightseq-bench runs from a clone of the repository, whose commit its results name: "
            "install it with pip install -e ."
        )
    sys.path.append(str(scripts))
    return importlib.import_module("result_rows")


def _able(systems: Iterable[str], case: Case, quiet: bool) -> Iterator[str]:
    """The systems that can train the case here; why the others cannot is said unless ``quiet``."""
    for system in systems:
        if (reason := why_not(system, case)) is None:
            yield system
        elif not quiet:
            click.echo(f"lightseq-bench: note: {case} without {system}: {reason}", err=True)


def _run(
    case: Case, system: str, data: corpora.Corpus, stem: Path, updates: int, warm_up: int | None,
    gpu: bool, workers: int,
) -> rows.Run:  # fmt: skip
    """One training; its log and its report are ``stem`` with their endings.

    Raises:
        UserError: it failed; the message ends with the log's last lines.
    """
    log, report = stem.with_suffix(".log"), stem.with_suffix(".json")
    report.unlink(missing_ok=True)
    before = SYSTEMS[system].warm_up if warm_up is None else warm_up
    folder = data.folder.resolve()
    words = command(case, system, folder, report, before + updates, gpu, workers)
    with open(log, "w", encoding="utf-8") as file:
        status = subprocess.run(
            words, env={**os.environ, **environment(system)},
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
    text = log.read_text(encoding="utf-8", errors="replace")
    if status != 0 or not report.exists():
        tail = "\n".join(text.splitlines()[-15:])
        raise UserError(f"the run left with status {status}; its log ends with\n{tail}")
    return rows.Run(
        rows.intervals(text, before, before + updates),
        json.loads(report.read_text(encoding="utf-8")),
    )


if __name__ == "__main__":
    main()
