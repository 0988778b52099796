"""lightseq-doctor: what it reports, what it advises, and its exit status."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lightseq_fairseq import fairseq_compat, library
from lightseq_fairseq.cli import doctor
from lightseq_fairseq.errors import UserError


def problems(section, fatal):
    return [finding.problem for finding in section() if finding.problem and finding.fatal is fatal]


def test_this_installation_can_train():
    """The command itself, in a fresh process, without a Python warning."""
    command = [sys.executable, "-m", "lightseq_fairseq.cli.doctor"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    labels = [line.split()[0] for line in result.stdout.splitlines() if line]
    order = ["lightseq_fairseq", *(label for label, _ in doctor.SECTIONS), "Training"]
    assert list(dict.fromkeys(labels)) == order
    assert torch.__version__.partition("+")[0] in result.stdout
    assert f"fairseq           {metadata.version('fairseq')}" in result.stdout
    assert result.stdout.endswith("Training can run.\n")


@pytest.mark.parametrize(("fatal", "status"), [(True, 1), (False, 0)])
def test_exit_status_and_advice(monkeypatch, fatal, status):
    finding = doctor.Finding("old", "Get a newer one.", fatal)
    monkeypatch.setattr(doctor, "SECTIONS", (("thing", lambda: iter([finding])),))
    result = CliRunner().invoke(doctor.main)
    assert result.exit_code == status
    lines = result.output.splitlines()
    assert lines[1:] == [
        "thing             old",
        "",
        "Get a newer one.",
        "",
        f"Training {'cannot' if fatal else 'can'} run.",
    ]


def test_without_torch_nothing_else_is_looked_at(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    result = CliRunner().invoke(doctor.main)
    assert result.exit_code == 1
    assert "torch is not installed: run scripts/setup.sh" in result.output
    assert "\nfairseq" not in result.output


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_old_torch(monkeypatch, version):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    (problem,) = problems(doctor.torch, fatal=True)
    assert problem.startswith(f"torch {version} is too old")


def test_skipped_build_is_repeated(monkeypatch):
    status = library.Status(None, "the CUDA build was skipped: no nvcc", (), (), ("adam_step",))
    monkeypatch.setattr(library, "load", lambda: status)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = [finding.text for finding in doctor.kernels()]
    assert text[0] == "none: the CUDA build was skipped: no nvcc"
    assert "adam_step" in text[1]
    assert problems(doctor.kernels, fatal=False) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (problem,) = problems(doctor.kernels, fatal=False)
    assert problem == "Training on this GPU is slow: the CUDA build was skipped: no nvcc."


def test_a_library_for_tests_is_named(monkeypatch):
    status = library.Status(Path("lib.so"), "", ("90",), ("adam_step",), (), acts_as=120)
    monkeypatch.setattr(library, "load", lambda: status)
    (finding,) = doctor.kernels()
    assert finding.text == "adam_step (sm_90, for tests: acts as on sm_120; lib.so)"


@pytest.mark.parametrize("error", [UserError("fairseq is missing: pip"), KeyError("odd fairseq")])
def test_unusable_fairseq(monkeypatch, error):
    def prepare():
        raise error

    monkeypatch.setattr(fairseq_compat, "prepare", prepare)
    (problem,) = problems(doctor.fairseq, fatal=True)
    assert str(error) in problem


def install_old_lightseq(folder, monkeypatch):
    info = folder / "lightseq-3.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightseq\nVersion: 3.0.1\n")
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nlightseq-train = lightseq.training.cli.train:cli_main\n"
    )
    monkeypatch.syspath_prepend(folder)


def write_script(folder, body, monkeypatch):
    script = folder / "lightseq-train"
    script.write_text(f"#!/usr/bin/python3\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_old_lightseq_beside_our_script_is_only_mentioned(monkeypatch, tmp_path):
    install_old_lightseq(tmp_path, monkeypatch)
    write_script(tmp_path, "from lightseq_fairseq.cli.train import main", monkeypatch)
    (problem,) = problems(doctor.scripts, fatal=False)
    assert "pip uninstall lightseq" in problem and "lightseq-train" in problem


@pytest.mark.parametrize("known", [True, False])
def test_a_script_of_another_package_is_fatal(monkeypatch, tmp_path, known):
    if known:
        install_old_lightseq(tmp_path, monkeypatch)
    write_script(tmp_path, "from lightseq.training.cli.train import cli_main", monkeypatch)
    (problem,) = problems(doctor.scripts, fatal=True)
    assert ("pip uninstall lightseq" in problem) is known
    assert "install lightseq-fairseq again" in problem


def test_script_that_is_not_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = doctor.scripts()
    assert finding.text.endswith("is not on the PATH") and not finding.fatal
