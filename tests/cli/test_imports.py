"""Modules import only modules of lower layers, as pyproject.toml lists them and ARCHITECTURE.md
shows; public classes have different names."""

from __future__ import annotations

import ast
import os
import re
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
    package.mkdir()
    for path in (*(ROOT / "lightseq_fairseq").iterdir(), ROOT / "cli"):
        (package / path.name).symlink_to(path)
    return tmp_path


def test_imports_go_downwards(site: Path) -> None:
    done = lint(site)
    assert done.returncode == 0 and "3 kept, 0 broken" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("errors.py", "from lightseq_fairseq import packing", "downwards BROKEN"),
        ("packing.py", "from lightseq_fairseq.plugins import transformer", "downwards BROKEN"),
        ("packing.py", "def late():\n    import fairseq", "no fairseq BROKEN"),
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


def test_the_table_of_the_document_is_the_one_that_is_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [line.split(" : ") for line in contracts["contracts"][0]["layers"]]
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text.partition("| modules of `lightseq_fairseq` |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert [re.findall(r"`([\w.]+)`", row) for row in rows] == layers


def test_a_class_name_means_one_class() -> None:
    files = defaultdict(list)
    for path in (ROOT / "lightseq_fairseq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.name)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
