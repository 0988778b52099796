"""``lightseq-profile``: where the time of a training goes, against what the machine can do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start import ranks
from lightseq_fairseq.cli.start.commands import CommandError, version
from lightseq_fairseq.cli.start.launch import PassThrough
from lightseq_fairseq.cli.words.argv import value

_PROGRAM = "lightseq-profile"
_MARKS = 11  # one before each step: ten steps are profiled
_HEAT = {True: 20, False: 1}  # updates under the profiler before them, on a GPU and on a CPU
_UPDATES = {True: 300, False: 20}
# The run writes nothing, and begins where the user's would.
_OVERRIDES = ("--no-save", "--disable-validation", "--max-epoch", "0", "--log-format", "simple")


class System(NamedTuple):
    """What is profiled: flags of lightseq-train, and environment variables."""

    flags: tuple[str, ...] = ()
    environment: dict[str, str] = {}


_OURS = "ours"
_SYSTEMS = {
    _OURS: System(),
    "native": System(("--native",)),  # fairseq's own parts
    "eager": System((), {"LIGHTSEQ_CAPTURE": "0"}),  # ours without CUDA graphs
}


@click.command(
    _PROGRAM, PassThrough,
    context_settings={"ignore_unknown_options": True, "max_content_width": 100},
)  # fmt: skip
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="DATA ... [FLAGS]")
@version
@click.option(
    "--updates", type=click.IntRange(2),
    help="Updates before the profiled ones.  [default: 300, on a CPU 20]",
)  # fmt: skip
@click.option("--ops", is_flag=True, help="Also list the ops of each module.")
@click.option(
    "--compare", "others", multiple=True, type=click.Choice([*_SYSTEMS][1:]),
    help="Profile the same training by fairseq's own parts (native), or by ours without CUDA "
    "graphs (eager). You can repeat the flag.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False),
    help="Folder for profile.json, a trace for each system, and a picture.",
)  # fmt: skip
def main(
    words: list[str], updates: int | None, ops: bool, others: Sequence[str], output: Path | None
) -> None:
    """Train as lightseq-train would, and print where the time of a step goes.

    \b
        lightseq-profile data-bin --arch ls_transformer_wmt_en_de_big_t2t --max-tokens 8192
        lightseq-profile data-bin --arch ls_transformer --compare native --output profile

    FLAGS are those of lightseq-train. Nothing is saved, and nothing is validated. The table has a
    line for each class of operators: its launches and time in a step, the least that it must
    compute and move, and the time that this would take at the rates that this machine sustains,
    which are measured in the same run.
    """
    is_new = output is not None and not output.exists()
    try:
        _profile(words, updates, ops, others, output)
    except UserError as error:
        if output is not None and is_new:
            with contextlib.suppress(OSError):  # it has a trace already, or was not made
                output.rmdir()
        raise CommandError(_PROGRAM, str(error)) from error


def _profile(
    words: Sequence[str], updates: int | None, ops: bool, others: Sequence[str],
    output: Path | None,
) -> None:  # fmt: skip
    import torch

    from lightseq_fairseq.cli.profiling import picture, rates, report

    result_rows.tabulate()
    if not words:
        raise UserError("There is no training: give the data and --arch, as to lightseq-train.")
    if ranks.from_torchrun():
        raise UserError(
            "lightseq-profile starts the processes of all GPUs itself: run it without torchrun."
        )
    if output is not None:
        picture.matplotlib()
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{output} cannot be made ({error.strerror}).") from error
    gpu = torch.cuda.is_available() and "--cpu" not in words
    before = updates or _UPDATES[gpu]
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="lightseq-profile-") as place:
        for system in dict.fromkeys((_OURS, *others)):
            click.echo(f"{_PROGRAM}: {system}: {before} updates, then the profiled ones", err=True)
            found[system] = _run(words, _SYSTEMS[system], before, gpu, Path(place), output, system)
        recorded = found.get("eager", found[_OURS])
        if "calls" not in recorded:
            recorded = _run(words, _SYSTEMS["eager"], 2, gpu, Path(place), None, "ops")
    dtype = getattr(torch, recorded["dtype"])
    calls, lines = recorded["calls"], {}
    fp8 = any(call["fp8"] for call in calls)
    measured = rates.measure(torch.device("cuda" if gpu else "cpu"), dtype, fp8)
    products = f"{measured.flop / 1e12:.2f} TFLOP/s in {recorded['dtype']}"
    if measured.fp8 is not None:
        products += f", {measured.fp8 / 1e12:.2f} in fp8"
    click.echo(f"sustained here: {products}, {measured.bytes / 1e9:.1f} GB/s")
    for system, each in found.items():
        share = recorded["recorded_tokens"] / each["profiled_tokens"]
        lines[system] = report.classes(each, calls, measured, share)
        click.echo("\n".join(report.table(lines[system], measured, system, each["ms_per_step"])))
        click.echo(
            f"a step: {each['ms_per_step']:.3f} ms, under the profiler "
            f"{each['timeline']['ms_per_step']:.3f} ms; {each['profiled_tokens']:.0f} target tokens"
        )
        if (hidden := each["overlap"]["hidden"]) is not None:
            click.echo(f"communication: {hidden:.0%} of its time, other kernels run beside it")
    if ops:
        of_modules = report.ops(calls, measured)
        total = sum(line.ms for line in of_modules)
        click.echo("\n".join(report.table(of_modules, measured, "op", total)))
    for sentence in report.losses(lines[_OURS], found[_OURS]["ms_per_step"]):
        click.echo(sentence)
    if output is not None:
        written = {"rates": measured._asdict(), "systems": found, "words": [*words]}
        try:
            (output / "profile.json").write_text(json.dumps(written), encoding="utf-8")
            picture.draw(lines, report.ops(calls, measured), measured, output / "profile.svg")
        except OSError as error:
            raise UserError(f"{output} cannot be written ({error.strerror}).") from error
        click.echo(f"wrote {output}")


def _ranks(words: Sequence[str], gpu: bool) -> int:
    """Processes that lightseq-train would start: one for each GPU."""
    import torch

    given = value(words, ("--distributed-world-size",))
    if given is None:
        return torch.cuda.device_count() if gpu else 1
    return int(given) if given.isdecimal() else 1  # then lightseq-train refuses it


def _run(
    words: Sequence[str], system: System, updates: int, gpu: bool, place: Path,
    output: Path | None, name: str,
) -> dict[str, Any]:  # fmt: skip
    """The report of a training, see ``profiling.measured_trainer``.

    Raises:
        UserError: it has failed, or has ended before it could be profiled.
    """
    from lightseq_fairseq.cli.benchmark.train.commands import FOR_TORCH

    path, log, heat = place / f"{name}.json", place / f"{name}.log", _HEAT[gpu]
    last = updates + 1 + heat + _MARKS
    program = [sys.executable]
    if (count := _ranks(words, gpu)) > 1:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    program += ["-m", "lightseq_fairseq.cli.profiling.measured_trainer", "--report", str(path)]
    program += ["--updates", str(updates), "--heat", str(heat), "--marks", str(_MARKS)]
    if not gpu or system.environment.get("LIGHTSEQ_CAPTURE") == "0":
        program.append("--record")  # a captured step runs no op
    if output is not None:
        program += ["--trace", str(output / f"{name}.trace.json")]
    run = [*words, *system.flags, *_OVERRIDES, "--max-update", str(last)]
    run += ["--save-dir", str(place / "none")]
    environment = {**FOR_TORCH, **os.environ, **system.environment}
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(
            [*program, "--", *run], env=environment, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    text = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode:
        said = re.findall(r"^lightseq-train: error: (.*)$", text, re.MULTILINE)
        raise UserError(said[-1] if said else "\n".join(text.splitlines()[-15:]))
    if not path.exists():
        raise UserError(
            f"The training ended before update {last}: set fewer --updates, or give it more data."
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main()
