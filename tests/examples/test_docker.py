"""The Dockerfile, as far as it can be checked without Docker."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "examples/docker/Dockerfile"


def test_hadolint_finds_nothing() -> None:
    """hadolint checks the instructions; shellcheck, which it calls, checks their shell commands."""
    command = [Path(sys.executable).parent / "hadolint", DOCKERFILE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_copied_files_are_all_that_the_installation_needs(tmp_path: Path) -> None:
    context = tmp_path / "context"
    for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), re.M):
        *sources, target = words.split()
        for source in sources:
            copy = context / (source if target == "./" else target)
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "_lib")
                shutil.copytree(ROOT / source, copy, ignore=ignored)
            else:
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, copy)
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir"
    words = [sys.executable, *command.split(), str(tmp_path / "wheels"), "."]
    done = subprocess.run(words, cwd=context, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "wheels").glob("lightseq_fairseq-*.whl"))) == 1
    done = subprocess.run(
        [sys.executable, "scripts/build_cuda.py", "--help"],
        cwd=context, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list((context / "csrc").rglob("*.cu"))
