"""What an installation contains: every package, every console script; and the import is cheap."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lightseq_fairseq
from lightseq_fairseq.cli.lightseq import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_is_listed(setup_cfg):
    folders = {path.parent for path in (ROOT / "lightseq_fairseq").rglob("*.py")}
    packages = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    listed = set(setup_cfg["options"]["packages"].split())
    folders = {path.parent for path in (ROOT / "cli").rglob("*.py")}
    packages |= {".".join(("lightseq_fairseq", *x.relative_to(ROOT).parts)) for x in folders}
    assert listed == packages
    for package in listed:  # setuptools leaves out a folder without __init__.py
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, package


def test_console_scripts_have_their_functions(setup_cfg):
    lines = setup_cfg["options.entry_points"]["console_scripts"].strip().splitlines()
    commands = {p.stem for p in (ROOT / "cli").glob("*.py") if "\ndef main(" in p.read_text()}
    assert len(lines) == len(commands)
    names = {line.partition("=")[0].strip().removeprefix("lightseq-") for line in lines}
    assert names == {*COMMANDS, "lightseq"}
    for line in lines:
        name, target = (part.strip() for part in line.split("="))
        module, function = target.split(":")
        command = module.rpartition(".")[2].rstrip("_").replace("_", "-")  # `import` is a keyword
        assert name == ("lightseq" if command == "lightseq" else f"lightseq-{command}")
        assert callable(getattr(importlib.import_module(module), function))


def test_submodules_exist_and_are_imported_when_touched():
    for name in lightseq_fairseq._SUBMODULES:
        assert importlib.util.find_spec(f"lightseq_fairseq.{name}") is not None, name
        assert name in dir(lightseq_fairseq)
    assert lightseq_fairseq.base.errors.UserError is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lightseq_fairseq.nothing


def test_importing_the_package_is_cheap():
    code = "import sys, lightseq_fairseq; print({'torch', 'fairseq', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "set()\n"


# --- sdist and wheels (scripts/check_wheel.sh builds and runs a real one) -----------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout with a compiled library, and with leftovers of an old build."""
    folder = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("_lib", "__pycache__")
    for name in ("lightseq_fairseq", "cli", "csrc", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for left in ("lightseq_fairseq/_lib/liblightseq_cu12.so", "build/lib/lightseq_fairseq/old.py"):
        (folder / left).parent.mkdir(parents=True, exist_ok=True)
        (folder / left).touch()
    return folder


def backend(folder: Path, call: str, **environment: str) -> str:
    """The result of a function of setuptools' build backend, run in ``folder``."""
    inherited = {key: value for key, value in os.environ.items() if key != "LIGHTSEQ_BUILD"}
    code = f"from setuptools import build_meta\nprint(build_meta.{call})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def unpacked_sdist(folder: Path, **environment: str) -> Path:
    target = folder.parent / "sdist"
    name = backend(folder, f"build_sdist({str(target)!r})", **environment)
    assert name == f"lightseq_fairseq-{lightseq_fairseq.__version__}.tar.gz"
    with tarfile.open(target / name) as archive:
        archive.extractall(target)
    return target / name.removesuffix(".tar.gz")


def wheel(folder: Path, **environment: str) -> tuple[str, list[str]]:
    """The tags of a wheel that is built in ``folder``, and the files in it."""
    target = folder / "dist"
    path = target / backend(folder, f"build_wheel({str(target)!r})", **environment)
    with zipfile.ZipFile(path) as archive:
        return path.name, sorted(archive.namelist())


def test_the_sdist_makes_the_wheel_of_the_checkout(checkout: Path) -> None:
    sources = unpacked_sdist(checkout)
    here, there = (
        {path.relative_to(root) for path in (root / "csrc").rglob("*")} for root in (ROOT, sources)
    )
    assert here == there
    assert (sources / "scripts" / "build_cuda.py").exists()
    assert not list(sources.rglob("*.so"))

    (name, files), (_, again) = wheel(checkout), wheel(sources)
    assert name == f"lightseq_fairseq-{lightseq_fairseq.__version__}-py3-none-any.whl"
    assert files == again
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightseq_fairseq").rglob("*.py")}
    modules |= {
        f"lightseq_fairseq/{path.relative_to(ROOT)}" for path in (ROOT / "cli").rglob("*.py")
    }
    info = f"lightseq_fairseq-{lightseq_fairseq.__version__}.dist-info/"
    packed = {file for file in files if not file.startswith(info)}
    data = {"lightseq_fairseq/py.typed", "lightseq_fairseq/cli/words/completions.json"}
    assert packed == modules | data


NVCC = """#!/bin/sh
case "$*" in
    --version) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
    *-shared*) while [ "$1" != -o ]; do shift; done; gcc -shared -o "$2" "${0%/*}/library.c" ;;
    *) while [ "$1" != -o ]; do shift; done; touch "$2" ;;
esac
"""


@pytest.fixture
def toolkit(tmp_path: Path) -> dict[str, str]:
    """An environment that requests kernels, with a compiler that compiles nothing."""
    folder = tmp_path / "cuda"
    (folder / "bin").mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "cublasLt.h").touch()
    (folder / "bin" / "nvcc").write_text(NVCC)
    (folder / "bin" / "nvcc").chmod(0o755)
    library = "#include <stdlib.h>\nvoid* allocate() { return malloc(1); }\n"
    (folder / "bin" / "library.c").write_text(library)
    return {"CUDA_HOME": str(folder), "LIGHTSEQ_BUILD": "1", "LIGHTSEQ_CUDA_ARCHITECTURES": "90"}


def test_a_wheel_with_kernels_is_for_one_cuda_major_and_a_glibc(
    checkout: Path, toolkit: dict[str, str]
) -> None:
    sources = unpacked_sdist(checkout, **toolkit)
    assert not list(sources.rglob("*.so"))
    _, plain = wheel(checkout)
    (name, files), (_, again) = wheel(checkout, **toolkit), wheel(sources, **toolkit)
    version = f"{lightseq_fairseq.__version__}+cu13"
    assert re.fullmatch(
        rf"lightseq_fairseq-{re.escape(version)}-py3-none-manylinux_2_\d+_x86_64.whl", name
    )
    assert files == again
    library = "lightseq_fairseq/_lib/liblightseq_cu13"
    info = f"lightseq_fairseq-{lightseq_fairseq.__version__}"
    plain = [file.replace(info, f"lightseq_fairseq-{version}") for file in plain]
    assert set(files) == {*plain, f"{library}.so", f"{library}.json"}


def test_pip_installs_what_the_kernels_are_compiled_with(
    checkout: Path, toolkit: dict[str, str], tmp_path: Path
) -> None:
    call = "get_requires_for_build_wheel()"
    assert backend(checkout, call) == "[]"
    (torch,) = ast.literal_eval(backend(checkout, call, **toolkit))
    assert torch in (ROOT / "scripts" / "setup.sh").read_text()  # the version that users have
    (tmp_path / "cuda" / "include" / "cublasLt.h").unlink()
    (tmp_path / "site" / "nvidia").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "__init__.py").touch()  # hides the installed package
    environment = {**toolkit, "PYTHONPATH": str(tmp_path / "site")}
    assert ast.literal_eval(backend(checkout, call, **environment)) == [
        torch,
        "nvidia-cublas==13.*",
    ]


def test_arguments_of_setup(setup_cfg, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("setup.cfg", "scripts/setup.sh"):
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", tmp_path / "scripts" / "setup.sh", *words], capture_output=True, text=True,
            check=False, env={**os.environ, "PYTHON": "no-such-python"},
        )  # fmt: skip

    for known in ((), ("docs,test",)):
        assert "no-such-python is not Python 3.10 to 3.13" in run(*known).stderr
    refused, extras = run("docs,cpu"), " ".join(setup_cfg["options.extras_require"])
    assert refused.returncode == 1 and not refused.stdout
    assert refused.stderr.strip() == f"setup: cpu is none of the extras in setup.cfg: {extras}"
    page = run("--help")
    assert page.returncode == 0 and "bash scripts/setup.sh [extras of setup.cfg" in page.stdout
