"""lightseq-doctor: what it reports, what it advises, and its exit status."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lightseq_fairseq import fairseq_compat, ops
from lightseq_fairseq.base import library
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli import doctor

DOCS = Path(__file__).resolve().parents[2] / "docs"


def problems(section, severity):
    found = []
    section(found)
    return [problem.text for problem in found if problem.severity == severity]


@functools.cache  # each run imports torch and fairseq
def run(*words):
    command = [sys.executable, "-m", "lightseq_fairseq.cli.doctor", *words]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""  # no Python warning
    return result.stdout


def test_this_installation_can_train():
    lines = run().splitlines()
    end = lines.index("")
    said = {line[:18].strip(): line[18:] for line in lines[:end]}
    assert list(said) == [
        "lightseq_fairseq", "python", "torch", "fairseq", "GPU", "kernels", "lightseq-train",
    ]  # fmt: skip
    assert said["torch"].startswith(torch.__version__)
    assert said["fairseq"] == metadata.version("fairseq")
    count = len(ops.REFERENCES)
    assert re.match(rf"(0|{count}) of {count}\b", said["kernels"])
    assert max(map(len, lines[:end])) < 200  # no list of names
    assert lines[-1] == "Training can run."


def test_without_a_gpu_it_says_what_runs_in_its_place():
    said = run()
    assert "\nslow: There is no GPU: PyTorch code runs on the CPU" in said
    assert "unused without a GPU\n" in said and "build_cuda" not in said


def test_details():
    long = run("--verbose")
    assert long.startswith(run().partition("\n\n")[0])
    assert f"python            {sys.executable}\n" in long
    assert "dropout_mask, embedding_fwd" in long


def test_json_has_the_keys_that_are_documented():
    done = CliRunner().invoke(doctor.main, ["--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["can_train"] is True
    paths = {"problems[].severity", "problems[].text"}
    gpu = {"name": "", "architecture": "", "memory_gib": 0}  # which may be missing on this machine
    for name, value in {**found, "gpus": [gpu]}.items():
        if isinstance(value, dict) and name != "settings":
            paths |= {f"{name}.{key}" for key in value}
        elif name == "gpus":
            paths |= {f"gpus[].{key}" for key in value[0]}
        elif name != "problems":
            paths.add(name)
    _, section = (DOCS / "troubleshooting.md").read_text().split("\n## lightseq-doctor\n")
    section = section.partition("\n## ")[0]
    documented = re.findall(r"^\| `([\w.\[\]]+)` \|", section, re.MULTILINE)
    assert paths == set(documented)


@pytest.mark.parametrize("severity", ["fatal", "slow", "note"])
def test_exit_status_and_advice(monkeypatch, severity):
    def section(found):
        found.append(doctor.Problem(severity, "It is old. Get a newer one."))

    monkeypatch.setitem(doctor.SECTIONS, "command", section)
    text, as_json = (CliRunner().invoke(doctor.main, words) for words in ([], ["--json"]))
    assert text.exit_code == as_json.exit_code == (1 if severity == "fatal" else 0)
    assert f"\n\n{severity}: It is old. Get a newer one.\n" in text.output
    assert text.output.endswith(f"Training {'cannot' if severity == 'fatal' else 'can'} run.\n")
    told = json.loads(as_json.output)
    assert told["problems"][-1] == {"severity": severity, "text": "It is old. Get a newer one."}
    assert told["can_train"] is (severity != "fatal")


def test_without_torch_nothing_else_is_looked_at(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    result = CliRunner().invoke(doctor.main, ["--verbose"])
    assert result.exit_code == 1
    assert "torch is not installed: run scripts/setup.sh" in result.output
    assert "\nfairseq  " not in result.output
    found = json.loads(CliRunner().invoke(doctor.main, ["--json"]).output)
    assert found["torch"] is None and found["kernels"] is None and not found["can_train"]


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117"])
def test_old_torch(monkeypatch, version):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    (problem,) = problems(doctor.torch, "fatal")
    assert problem.startswith(f"torch {version} is too old")


@pytest.mark.parametrize("version", ["2.14.1+cpu", "3.0"])
def test_torch_that_is_newer_than_the_tests(monkeypatch, version):
    monkeypatch.setattr(doctor.metadata, "version", lambda name: version)
    result = CliRunner().invoke(doctor.main)
    (note,) = (line for line in result.output.splitlines() if version in line and "note" in line)
    assert note == (
        f"note: torch {version} is newer than the tested versions, 2.11 to 2.13: if something "
        "fails, pip install 'torch>=2.11,<2.14'."
    )
    assert result.exit_code == 0 and result.output.endswith("\nTraining can run.\n")
    monkeypatch.undo()
    assert problems(doctor.torch, "note") == []


NONE = library.Status(None, "the CUDA build was skipped: no nvcc", (), (), ("adam_step",))


def test_skipped_build_is_repeated(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: NONE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert problems(doctor.kernels, "slow") == []
    kernels = doctor.kernels([])
    assert kernels["missing"] == ["adam_step"] and kernels["available"] == []
    facts = {"kernels": kernels, "gpus": [{"architecture": "sm_90"}]}
    assert doctor._kernels(facts) == "0 of 1: the CUDA build was skipped: no nvcc"
    facts["gpus"] = []
    assert doctor._kernels(facts) == "0 of 1, unused without a GPU"


@pytest.mark.parametrize("compiler", [None, {"version": "13.0", "path": "nvcc"}])
def test_without_kernels_a_gpu_is_slow(monkeypatch, compiler):
    monkeypatch.setattr(library, "load", lambda: NONE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "nvcc", lambda found: compiler)
    (problem,) = problems(doctor.kernels, "slow")
    expected = "PyTorch code replaces the kernels on this GPU: the CUDA build was skipped: no nvcc."
    assert problem.startswith(expected)
    assert ("That needs nvcc" in problem) is (compiler is None)


def test_kernels_are_counted_for_the_gpu_in_use(monkeypatch):
    status = library.Status(Path("lib.so"), "", ("80", "90"), ("adam_step",), ())
    monkeypatch.setattr(library, "load", lambda: status)
    facts = {"kernels": doctor.kernels([]), "gpus": [{"architecture": "sm_90"}] * 2}
    assert doctor._kernels(facts) == "1 of 1 for sm_90"
    facts["gpus"] = []
    assert doctor._kernels(facts) == "1 of 1 for sm_80, sm_90, unused without a GPU"


@pytest.mark.parametrize(
    ("cuda", "advice"), [(None, "install a torch with CUDA"), ("13.0", "install an NVIDIA driver")]
)
def test_a_gpu_that_torch_cannot_use(monkeypatch, cuda, advice):
    monkeypatch.setattr(library, "gpus", lambda: [library.Gpu("GPU-a", (9, 0))])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (problem,) = problems(doctor.gpus, "slow")
    assert problem.startswith("The GPU") and advice in problem


@pytest.mark.parametrize("direct", [True, False])
def test_links_between_gpus(monkeypatch, direct):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: direct or (a, b) != (1, 2)
    )
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = []
    facts = doctor.links(found)
    assert facts == {"nccl": "2.27.5", "direct": direct}
    told = "direct" if direct else "through host memory"
    assert doctor._links(facts) == f"NCCL 2.27.5, {told} between GPUs"
    assert [p.text.partition(",")[0] for p in found] == [
        "GPUs 1 and 2 cannot read each other's memory"
    ] * (not direct)


def test_several_gpus_without_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    (problem,) = problems(doctor.links, "slow")
    assert problem.startswith(f"torch {torch.__version__} has no NCCL")


def test_a_library_for_tests_is_named(monkeypatch):
    status = library.Status(Path("lib.so"), "", ("90",), ("adam_step",), (), acts_as=120)
    monkeypatch.setattr(library, "load", lambda: status)
    (problem,) = problems(doctor.kernels, "slow")
    assert "for tests: it treats each GPU as sm_120" in problem


@pytest.mark.parametrize(("name", "value"), doctor.SLOW_SETTINGS)
def test_settings_that_cost_speed(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    (problem,) = problems(doctor.settings, "slow")
    assert problem.startswith(f"{name}={value} is set: ") and problem.endswith(" Unset it.")
    assert doctor.settings([])[name] == value
    assert f"`{name}={value}`" in (DOCS / "environment.md").read_text()
    monkeypatch.setenv(name, "")
    assert problems(doctor.settings, "slow") == []


@pytest.mark.parametrize("error", [UserError("fairseq is missing: pip"), KeyError("odd fairseq")])
def test_unusable_fairseq(monkeypatch, error):
    def prepare():
        raise error

    monkeypatch.setattr(fairseq_compat, "prepare", prepare)
    (problem,) = problems(doctor.fairseq, "fatal")
    assert str(error) in problem


def test_untested_fairseq(monkeypatch):
    monkeypatch.setattr(fairseq_compat, "TESTED_VERSIONS", ("0.9.0", "0.9.1"))
    (problem,) = problems(doctor.fairseq, "note")
    assert "0.9.0 and 0.9.1 were" in problem and "fairseq==0.9.0" in problem
    assert doctor.fairseq([])["tested"] is False


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
    (problem,) = problems(doctor.command, "note")
    assert "pip uninstall lightseq" in problem and "lightseq-train" in problem


@pytest.mark.parametrize("known", [True, False])
def test_a_script_of_another_package_is_fatal(monkeypatch, tmp_path, known):
    if known:
        install_old_lightseq(tmp_path, monkeypatch)
    write_script(tmp_path, "from lightseq.training.cli.train import cli_main", monkeypatch)
    (problem,) = problems(doctor.command, "fatal")
    assert ("pip uninstall lightseq" in problem) is known
    assert "install lightseq-fairseq again" in problem


def test_script_that_is_not_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = problems(doctor.command, "note")
    assert "is not on the PATH: activate its environment" in problem
    assert doctor.command([]) is None
