"""``lightseq-doctor``: what lightseq_fairseq runs on, what is slow or missing, and what to do.

A section collects facts, which are JSON values, and problems. The summary, ``--verbose`` and
``--json`` show the same facts.
"""

from __future__ import annotations

import importlib
import itertools
import json
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
from typing import Any, Literal, NamedTuple

import click

import lightseq_fairseq
from lightseq_fairseq import startup
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start.commands import own
from lightseq_fairseq.cli.start.old_lightseq import conflict

PACKAGE = "lightseq_fairseq"
TORCH_TESTED = (2, 11), (2, 13)  # the oldest that works, the newest that was tested

# Environment variable and value -> what it slows down.
SLOW_SETTINGS = {
    ("LIGHTSEQ_CAPTURE", "0"): "training and translation run without CUDA graphs",
    ("LIGHTSEQ_CHECK_INDICES", "1"): "each check of token ids waits for the GPU",
    ("LIGHTSEQ_LINEAR_SEARCH", "0"): "products do not use the fastest algorithm",
    ("LIGHTSEQ_CUDNN_ATTENTION", "1"): "native models build a cuDNN plan for each batch shape",
}


class Problem(NamedTuple):
    """A problem, in sentences that say what to do."""

    severity: Literal["fatal", "slow", "note"]  #: fatal: training cannot run
    text: str


Facts = Any  # what json can write
Section = Callable[[list[Problem]], Facts]


def package(problems: list[Problem]) -> Facts:
    folder = Path(lightseq_fairseq.__file__).parent
    return {"version": lightseq_fairseq.__version__, "path": str(folder)}


def python(problems: list[Problem]) -> Facts:
    return {"version": platform.python_version(), "path": sys.executable}


def torch(problems: list[Problem]) -> Facts:
    oldest, newest = TORCH_TESTED
    tested = f"pip install 'torch>={_dotted(oldest)},<{newest[0]}.{newest[1] + 1}'"
    install = f"run scripts/setup.sh, or {tested}"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        problems.append(Problem("fatal", f"torch is not installed: {install}."))
        return None
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < oldest:
        problems.append(Problem("fatal", f"torch {version} is too old: {install}."))
        return {"version": version, "cuda": None}
    if found > newest:
        text = (
            f"torch {version} is newer than the tested versions, {_dotted(oldest)} to "
            f"{_dotted(newest)}: if something fails, {tested}."
        )
        problems.append(Problem("note", text))
    import torch

    return {"version": version, "cuda": torch.version.cuda}


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def fairseq(problems: list[Problem]) -> Facts:
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # fairseq mentions optional packages while it is imported
    try:
        compat = importlib.import_module(f"{PACKAGE}.fairseq_compat")
        compat.prepare()
        version = str(importlib.import_module("fairseq").__version__)
        importlib.import_module(f"{PACKAGE}.plugins")
    except UserError as error:
        problems.append(Problem("fatal", str(error)))
        return None
    except Exception as error:  # an unknown fairseq may raise anything; the report continues
        reason = f"fairseq does not import here ({type(error).__name__}: {error})."
        problems.append(Problem("fatal", reason))
        return None
    finally:
        logging.disable(before)
    tested = version.startswith(compat.TESTED_VERSIONS)
    if not tested:
        versions = " and ".join(compat.TESTED_VERSIONS)
        text = (
            f"fairseq {version} was not tested with this package, but {versions} were: if "
            f"something fails, pip install --no-deps fairseq=={compat.TESTED_VERSIONS[0]}."
        )
        problems.append(Problem("note", text))
    place = startup.location()
    hook = os.path.exists(place) and os.environ.get(startup.SWITCH) != "0"
    return {"version": version, "tested": tested, "import_hook": place if hook else None}


def gpus(problems: list[Problem]) -> Facts:
    import torch

    from lightseq_fairseq.base import library

    listed = library.visible(library.gpus(), os.environ)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        text = (
            "There is no GPU: PyTorch code runs on the CPU, which is enough for small models "
            "and tests. For more, use a GPU of compute capability 8.0 or later."
        )
        if listed and torch.version.cuda is None:
            major, minor = listed[0].capability
            text = (
                f"The GPU (sm_{major}{minor}) is not used, because torch {torch.__version__} is "
                "built without CUDA: install a torch with CUDA, then compile the kernels "
                f"({library.BUILD_COMMAND} in a clone)."
            )
        elif listed:
            text = (
                f"The GPU is not used, because torch's CUDA {torch.version.cuda} does not start on "
                "it: install an NVIDIA driver for this CUDA version, or a torch for an older one."
            )
        problems.append(Problem("slow", text))
    found = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        architecture = f"sm_{properties.major}{properties.minor}"
        memory = round(properties.total_memory / 2**30, 1)
        found.append({"name": properties.name, "architecture": architecture, "memory_gib": memory})
    return found


def links(problems: list[Problem]) -> Facts:
    import torch

    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apart = [
        f"{a} and {b}"
        for a, b in itertools.combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(a, b)
    ]
    if apart:
        text = (
            f"GPUs {apart[0]} cannot read each other's memory, so gradients pass through the "
            "host's: nvidia-smi topo -m shows the links of this machine."
        )
        problems.append(Problem("slow", text))
    if count > 1 and nccl is None:
        text = f"torch {torch.__version__} has no NCCL: training on several GPUs needs it."
        problems.append(Problem("slow", text))
    return {"nccl": nccl, "direct": not apart if count > 1 else None}


def nvcc(problems: list[Problem]) -> Facts:
    home = os.environ.get("CUDA_HOME")
    candidates = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        return None
    answer = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ([\d.]+)", answer)
    return {"version": release[1] if release else None, "path": path}


def kernels(problems: list[Problem]) -> Facts:
    import torch

    from lightseq_fairseq.ops import library  # the one that the ops load

    status = library.load()
    if torch.cuda.is_available() and status.references:
        names = f" for {', '.join(status.references)}" if status.kernels else ""
        why = status.reason or f"`{library.BUILD_COMMAND}` in a clone compiles what is missing"
        compiler = "" if nvcc([]) else f" That needs nvcc {torch.version.cuda}, which is not found."
        text = f"PyTorch code replaces the kernels{names} on this GPU: {why}.{compiler}"
        problems.append(Problem("slow", text))
    if status.acts_as is not None:
        text = f"The library is for tests: it treats each GPU as sm_{status.acts_as}."
        problems.append(Problem("slow", text))
    return {
        "available": list(status.kernels),
        "missing": list(status.references),
        "architectures": [f"sm_{number}" for number in status.architectures],
        "library": None if status.path is None else str(status.path),
        "reason": status.reason,
    }


def settings(problems: list[Problem]) -> Facts:
    variables = {**os.environ}
    for (name, value), effect in SLOW_SETTINGS.items():
        if variables.get(name) == value:
            problems.append(Problem("slow", f"{name}={value} is set: {effect}. Unset it."))
    return {name: variables[name] for name in sorted(variables) if name.startswith("LIGHTSEQ")}


def command(problems: list[Problem]) -> Facts:
    explanation = conflict() or ""
    path = shutil.which("lightseq-train")
    ours = path is None or PACKAGE in Path(path).read_text(errors="replace")
    if not ours:
        again = f"{path} belongs to another package: install lightseq-fairseq again."
        problems.append(Problem("fatal", explanation or again))
    elif explanation:
        problems.append(Problem("note", explanation))
    if path is None:
        script = shutil.which("lightseq-train", path=sysconfig.get_path("scripts"))
        text = f"{script or 'lightseq-train'} is not on the PATH: activate its environment."
        problems.append(Problem("note", text))
    return path


#: Key of ``--json`` -> section. Documented in docs/troubleshooting.md.
SECTIONS: dict[str, Section] = {
    "lightseq_fairseq": package,
    "python": python,
    "torch": torch,
    "fairseq": fairseq,
    "gpus": gpus,
    "links": links,
    "nvcc": nvcc,
    "kernels": kernels,
    "settings": settings,
    "command": command,
}


def diagnose() -> tuple[dict[str, Facts], list[Problem]]:
    """All facts and problems. If torch is missing or too old, the later sections are None."""
    facts: dict[str, Facts] = dict.fromkeys(SECTIONS)
    problems: list[Problem] = []
    for name, section in SECTIONS.items():
        facts[name] = section(problems)
        if name == "torch" and any(problem.severity == "fatal" for problem in problems):
            break
    return facts, problems


def summary(facts: dict[str, Facts]) -> Iterator[tuple[str, str]]:
    """(label, text) of the lines that are always printed."""
    yield "lightseq_fairseq", facts["lightseq_fairseq"]["version"]
    yield "python", facts["python"]["version"]
    torch = facts["torch"]
    cuda = f"CUDA {torch['cuda']}" if torch and torch["cuda"] else "without CUDA"
    yield "torch", f"{torch['version']}, {cuda}" if torch else "not installed"
    if facts["gpus"] is None:
        return
    fairseq = facts["fairseq"]
    untested = " (untested)" * (fairseq is not None and not fairseq["tested"])
    yield "fairseq", fairseq["version"] + untested if fairseq else "cannot be used"
    gpus = (
        f"{gpu['name']} ({gpu['architecture']}, {gpu['memory_gib']:.0f} GiB)"
        for gpu in facts["gpus"]
    )
    yield "GPU", "; ".join(gpus) or "none"
    if len(facts["gpus"]) > 1:
        yield "links", _links(facts["links"])
    yield "kernels", _kernels(facts)
    yield "lightseq-train", facts["command"] or "not on the PATH"


def _links(found: Facts) -> str:
    nccl = f"NCCL {found['nccl']}" if found["nccl"] else "no NCCL"
    return f"{nccl}, {'direct' if found['direct'] else 'through host memory'} between GPUs"


def _kernels(facts: dict[str, Facts]) -> str:
    found = facts["kernels"]
    count = f"{len(found['available'])} of {len(found['available']) + len(found['missing'])}"
    if not facts["gpus"]:
        compiled = f" for {', '.join(found['architectures'])}" if found["available"] else ""
        return f"{count}{compiled}, unused without a GPU"
    if not found["available"]:
        return f"{count}: {found['reason']}"
    architectures = sorted({gpu["architecture"] for gpu in facts["gpus"]})
    return f"{count} for {', '.join(architectures)}"


def details(facts: dict[str, Facts]) -> Iterator[tuple[str, str]]:
    """(label, text) of the lines that --verbose adds."""
    for name in ("lightseq_fairseq", "python"):
        yield name, facts[name]["path"]
    if facts["gpus"] is None:
        return
    if facts["fairseq"]:
        place, command = facts["fairseq"]["import_hook"], f"python -m {startup.__name__}"
        works = f"works in lightseq's commands alone ({command}: everywhere)"
        if place is not None:
            works = f"works everywhere, by {place} ({command} --remove)"
        yield "import fairseq", works
    nvcc, kernels = facts["nvcc"], facts["kernels"]
    yield "nvcc", f"{nvcc['version'] or 'unknown'} ({nvcc['path']})" if nvcc else "not found"
    if kernels["library"]:
        yield "kernels", f"{kernels['library']} for {', '.join(kernels['architectures'])}"
    for state in ("available", "missing"):
        if kernels[state]:
            yield state, ", ".join(kernels[state])
    yield from facts["settings"].items()


@own("lightseq-doctor")
@click.option(
    "--verbose", is_flag=True,
    help="Add paths, the names of the kernels, and every name that is replaced in fairseq.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True,
    help="Print one JSON object; docs/troubleshooting.md lists its keys.",
)  # fmt: skip
def main(verbose: bool, as_json: bool) -> None:
    """Print what lightseq_fairseq runs on, what is slow or missing, and what to do.

    The exit status is 0 if training can run, even slowly, and 1 if it cannot.
    """
    facts, problems = diagnose()
    can_train = all(problem.severity != "fatal" for problem in problems)
    if as_json:
        told = [problem._asdict() for problem in problems]
        click.echo(json.dumps({**facts, "problems": told, "can_train": can_train}, indent=2))
    else:
        _print(facts, problems, verbose)
        click.echo(f"\nTraining {'can' if can_train else 'cannot'} run.")
    sys.exit(0 if can_train else 1)


def _print(facts: dict[str, Facts], problems: list[Problem], verbose: bool) -> None:
    lines = [*summary(facts), *(details(facts) if verbose else ())]
    for label, text in lines:
        click.echo(f"{label:<18}{text}")
    if verbose:
        from lightseq_fairseq.fairseq_compat import patching

        click.echo("\nNames that are replaced in fairseq, and for it, in this order:")
        click.echo("\n".join(patching.report()))
    for problem in problems:
        click.echo(f"\n{problem.severity}: {problem.text}")


if __name__ == "__main__":
    main()
