"""What an installation holds: every package, every console script, and a cheap import."""

from __future__ import annotations

import configparser
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import lightseq_fairseq

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
    for package in listed:  # a folder without __init__.py would be left out
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None, package


def test_console_scripts_have_their_functions(setup_cfg):
    lines = setup_cfg["options.entry_points"]["console_scripts"].strip().splitlines()
    commands = {p.stem for p in (ROOT / "cli").glob("*.py") if "\ndef main(" in p.read_text()}
    assert len(lines) == len(commands)
    for line in lines:
        name, target = (part.strip() for part in line.split("="))
        module, function = target.split(":")
        command = module.rpartition(".")[2].rstrip("_").replace("_", "-")  # import_: a keyword
        assert name == f"lightseq-{command}"
        assert callable(getattr(importlib.import_module(module), function))


def test_submodules_exist_and_are_imported_when_touched():
    for name in lightseq_fairseq._SUBMODULES:
        assert importlib.util.find_spec(f"lightseq_fairseq.{name}") is not None, name
        assert name in dir(lightseq_fairseq)
    assert lightseq_fairseq.errors.UserError is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lightseq_fairseq.nothing


def test_importing_the_package_is_cheap():
    code = "import sys, lightseq_fairseq; print({'torch', 'fairseq', 'numpy'} & set(sys.modules))"
    command = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "set()\n"
