"""``lightseq-doctor``: reports installed and missing parts, and whether training can run."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click

import lightseq_fairseq
from lightseq_fairseq import startup
from lightseq_fairseq.cli.start.commands import own
from lightseq_fairseq.cli.start.old_lightseq import clash
from lightseq_fairseq.errors import UserError

PACKAGE = "lightseq_fairseq"
TORCH_MINIMUM = (2, 11)


class Finding(NamedTuple):
    """A line of the report, and the problem that it shows, if any."""

    text: str
    problem: str = ""  #: a sentence that says what to do; "" if there is no problem
    fatal: bool = False  #: training cannot run with this problem


def python() -> Iterator[Finding]:
    yield Finding(f"{platform.python_version()} ({sys.executable})")


def torch() -> Iterator[Finding]:
    install = "run scripts/setup.sh, or pip install 'torch>=2.11'"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("not installed", f"torch is not installed: {install}.", fatal=True)
        return
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < TORCH_MINIMUM:
        yield Finding(version, f"torch {version} is too old: {install}.", fatal=True)
        return
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding(f"{version} ({cuda})")


def gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("none that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        yield Finding(f"{properties.name} ({capability}, {memory})")


def nvcc() -> Iterator[Finding]:
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        yield Finding("not found")
        return
    answer = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", answer)
    yield Finding(f"{release[1] if release else 'unknown version'} ({path})")


def kernels() -> Iterator[Finding]:
    import torch

    from lightseq_fairseq.ops import library  # which the ops load

    status = library.load()
    if status.path is None:
        slow = f"Training on this GPU is slow: {status.reason}."
        yield Finding(f"none: {status.reason}", slow if torch.cuda.is_available() else "")
    else:
        compiled_for = ", ".join(f"sm_{number}" for number in status.architectures)
        if status.acts_as is not None:
            compiled_for += f", for tests: acts as on sm_{status.acts_as}"
        yield Finding(f"{', '.join(status.kernels)} ({compiled_for}; {status.path})")
    if status.references:
        yield Finding(f"torch references stand in for {', '.join(status.references)}")


def fairseq() -> Iterator[Finding]:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # fairseq mentions optional packages while it is imported
    try:
        compat = importlib.import_module(f"{PACKAGE}.fairseq_compat")
        compat.prepare()
        version = str(importlib.import_module("fairseq").__version__)
        importlib.import_module(f"{PACKAGE}.plugins")
    except UserError as error:
        yield Finding("cannot be used", str(error), fatal=True)
    except Exception as error:  # whatever an unknown fairseq raises, the report goes on
        reason = f"fairseq does not import here ({type(error).__name__}: {error})."
        yield Finding("cannot be used", reason, fatal=True)
    else:
        tested = version.startswith(compat.TESTED_VERSIONS)
        advice = f"This package is tested with fairseq {' and '.join(compat.TESTED_VERSIONS)}."
        yield Finding(version) if tested else Finding(f"{version} (untested)", advice)
    finally:
        logging.disable(before)
    yield _startup()


def _startup() -> Finding:
    command, place = f"python -m {startup.__name__}", startup.location()
    if not os.path.exists(place):
        return Finding(f"imports in lightseq's commands alone ({command}: everywhere)")
    if os.environ.get(startup.SWITCH) == "0":
        return Finding(f"imports in lightseq's commands alone ({startup.SWITCH} is 0)")
    return Finding(f"imports everywhere, by {place} ({command} --remove)")


def scripts() -> Iterator[Finding]:
    explanation = clash() or ""
    path = shutil.which("lightseq-train")
    if path is None:
        own = shutil.which("lightseq-train", path=sysconfig.get_path("scripts"))
        yield Finding(f"{own or 'lightseq-train'} is not on the PATH", explanation)
    elif PACKAGE in Path(path).read_text(errors="replace"):
        yield Finding(path, explanation)
    else:
        again = f"{path} belongs to another package: install lightseq-fairseq again."
        yield Finding(f"{path} is another package's", explanation or again, fatal=True)


SECTIONS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("python", python),
    ("torch", torch),
    ("GPU", gpu),
    ("nvcc", nvcc),
    ("kernels", kernels),
    ("fairseq", fairseq),
    ("scripts", scripts),
)


@own("lightseq-doctor")
@click.option("--verbose", is_flag=True, help="List what is replaced in fairseq, and why.")
def main(verbose: bool) -> None:
    """Print what lightseq_fairseq runs on, and what is wrong with it.

    The exit status is 0 if training can run and 1 if it cannot.
    """
    folder = Path(lightseq_fairseq.__file__).parent
    click.echo(f"{PACKAGE:<17} {lightseq_fairseq.__version__} ({folder})")
    problems: list[Finding] = []
    for label, section in SECTIONS:
        for finding in section():
            click.echo(f"{label:<17} {finding.text}")
            if finding.problem:
                problems.append(finding)
        if label == "torch" and problems:
            break  # the remaining checks need torch
    if verbose:
        from lightseq_fairseq.fairseq_compat import patching

        click.echo("\nNames that are replaced in fairseq, and for it, in this order:")
        click.echo("\n".join(patching.report()))
    for finding in problems:
        click.echo(f"\n{finding.problem}")
    fatal = any(finding.fatal for finding in problems)
    click.echo(f"\nTraining {'cannot' if fatal else 'can'} run.")
    sys.exit(1 if fatal else 0)


if __name__ == "__main__":
    main()
