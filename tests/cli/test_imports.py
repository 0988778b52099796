"""Modules import only modules of lower layers, as pyproject.toml lists them and ARCHITECTURE.md
shows; public classes have different names."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def lint(site: Path) -> subprocess.CompletedProcess[str]:
    words = ["lint-imports", "--config", ROOT / "pyproject.toml", "--no-cache", "--no-logo"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(site), "PATH": path, "COLUMNS": "200"}
    return subprocess.run(words, cwd=site, env=environment, capture_output=True, text=True)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The package as installed, with cli/ as a part of it."""
    package = tmp_path / "lightseq_fairseq"
    without = shutil.ignore_patterns("__pycache__", "_lib")
    shutil.copytree(ROOT / "lightseq_fairseq", package, ignore=without)
    shutil.rmtree(package / "cli", ignore_errors=True)
    shutil.copytree(ROOT / "cli", package / "cli", ignore=without)
    return tmp_path


def test_imports_go_downwards(site: Path) -> None:
    done = lint(site)
    assert done.returncode == 0 and "3 kept, 0 broken" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("base/errors.py", "from lightseq_fairseq.memory import packing", "downwards BROKEN"),
        ("memory/packing.py", "from lightseq_fairseq import plugins", "downwards BROKEN"),
        ("memory/packing.py", "def late():\n    import fairseq", "no fairseq BROKEN"),
        ("somewhere.py", "", "downwards BROKEN"),
    ],
)
def test_an_upward_import_is_found(site: Path, module: str, line: str, broken: str) -> None:
    changed = site / "lightseq_fairseq" / module
    text = changed.read_text() if changed.exists() else ""
    changed.unlink(missing_ok=True)
    changed.write_text(f"{text}\n{line}\n")
    done = lint(site)
    assert done.returncode != 0 and broken in done.stdout, done.stdout + done.stderr


def test_the_tree_of_the_document_is_the_order_that_is_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    lines = [line.split(" : ") for line in contracts["contracts"][0]["layers"]]
    tree = (ROOT / "ARCHITECTURE.md").read_text().partition("\nlightseq_fairseq/")[2]
    names = re.findall(r"^  (\w+)(?:/|\.py) ", tree.partition("\ncsrc/")[0], re.M)
    assert names == [name for line in lines for name in line if name != "cli"]


def test_a_class_name_means_one_class() -> None:
    files = defaultdict(list)
    for path in (ROOT / "lightseq_fairseq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.parent.name)
    several = {name: sorted(found) for name, found in files.items() if len(found) > 1}
    # Each has the name of the class that it replaces, in transformers and in fairseq.
    assert several == {"Trainer": ["huggingface", "training"]}
