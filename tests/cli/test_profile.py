"""lightseq-profile: where the time of a training goes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import helpers.cli_runs as cli_runs
import helpers.forked_commands as forked_commands
import pytest
import torch
from helpers.cli_runs import run, succeed
from torch import nn

from lightseq_fairseq import ops
from lightseq_fairseq.cli.profiling import rates, report, work
from lightseq_fairseq.cli.profiling.rates import Rates

TINY = ["--arch", "ls_transformer_tiny", "--max-tokens", "200", "--cpu", "--num-workers", "0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise(tmp_path_factory.mktemp("profile"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings are forked, and the rates of the machine are measured for a moment."""
    monkeypatch.setattr(sys, "executable", str(forked_commands.python()))
    monkeypatch.setitem(rates._SECONDS, "cpu", 0.05)


def test_the_table_and_the_files(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "profile"
    words = [data, *TINY, "--updates", "3", "--compare", "native", "--ops", "--output", output]
    printed = succeed("profile", *words)
    assert re.search(r"sustained here: \d+\.\d\d TFLOP/s in float32, \d+\.\d GB/s", printed)
    tables = {}
    for system in ("ours", "native"):
        (_, text) = printed.split(f"\n{system} ", 1)
        lines = (line.split() for line in text.partition("\na step:")[0].splitlines()[2:])
        tables[system] = {" ".join(line[:-10]): [*map(str, line[-10:])] for line in lines}
    written = json.loads((output / "profile.json").read_text())
    for system, table in tables.items():
        its = written["systems"][system]
        assert table.keys() >= {"contraction", "attention", "normalisation", "gaps", "embedding"}
        total = sum(float(cells[1]) for cells in table.values())
        assert total == pytest.approx(its["ms_per_step"], rel=0.02)
        assert sum(its["timeline"]["class_ms"].values()) == pytest.approx(
            its["timeline"]["ms_per_step"]
        )
    assert float(tables["ours"]["contraction"][0]) < float(tables["native"]["contraction"][0])
    assert "encoder.layers.1.fc1 linear_activation_fwd" in printed
    assert len(re.findall(r"ms, of which .* are the floor", printed)) == 3
    names = {path.name for path in output.iterdir()}
    assert names == {"profile.json", "profile.svg", "ours.trace.json", "native.trace.json"}
    assert not (tmp_path / "checkpoints").exists()


def test_losses_are_those_of_a_run_without_it(data: Path, tmp_path: Path) -> None:
    """With the record of ops, and with the profiler."""
    flags = [*TINY, "--max-update", "9", "--log-interval", "1", "--disable-validation"]
    module = "lightseq_fairseq.cli.profiling.measured_trainer"
    meter = ["-m", module, "--report", str(tmp_path / "report.json"), "--updates", "2"]
    meter += ["--heat", "1", "--marks", "3", "--record", "--"]
    models = []
    for name, words in (("plain", ["-m", "lightseq_fairseq", "train"]), ("measured", meter)):
        run_of = [sys.executable, *words, str(data), *flags, "--save-dir", str(tmp_path / name)]
        subprocess.run(run_of, capture_output=True, check=True)
        state = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)
        models.append((state["model"], state["last_optimizer_state"]["state"]))
    torch.testing.assert_close(*models, rtol=0, atol=0)
    assert json.loads((tmp_path / "report.json").read_text())["calls"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--updates 5", "There is no training: give the data and --arch, as to lightseq-train."),
        ("nowhere --arch ls_transformer_tiny --cpu", "The data folder nowhere does not exist: use"),
        ("nowhere --arch ls_transformer --compare theirs", "Invalid value for '--compare': 'the"),
        ("nowhere --arch ls_transformer --cpu --output setup.cfg/x", "setup.cfg/x cannot be made"),
        (
            "nowhere --arch ls_transformer --cpu --distributed-world-size two",
            "--distributed-world-size cannot be two: it must be a whole number.",
        ),
    ],
)
def test_bad_input(words: str, sentence: str) -> None:
    result = run("profile", *words.split())
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"lightseq-profile: error: {sentence}")


def test_several_ranks(data: Path) -> None:
    """One table, of the first rank's step; the tokens are those of both."""
    words = ["--distributed-world-size", "2", "--distributed-backend", "gloo"]
    printed = succeed(
        "profile", data, *TINY, *words, "--ddp-backend", "legacy_ddp", "--updates", "2"
    )
    assert re.search(r"^communication +[1-9]", printed, re.MULTILINE)
    assert len(re.findall("^a step: ", printed, re.MULTILINE)) == 1
    assert re.search(r"^communication: \d+% of its time, other kernels", printed, re.MULTILINE)


def test_torchrun_starts_no_profile(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "1")
    result = run("profile", data, *TINY)
    assert "run it without torchrun" in result.stderr.splitlines()[-1]


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    output = tmp_path / "profile"
    result = run("profile", tmp_path / "nowhere", *TINY, "--output", output)
    assert result.exit_code == 2 and not output.exists()


def test_work_of_ops() -> None:
    """Products by hand: two layers, and causal attention of sentences of 3 and 2 tokens."""
    rows, width, heads = 5, 16, 2
    weight, x = torch.randn(24, width), torch.randn(rows, width)
    q, k, v = (torch.randn(rows, heads, 8) for _ in range(3))
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    dropout = ops.Dropout(0.0, torch.zeros(2, dtype=torch.int64), 0)
    layer = nn.Linear(width, 24)
    with work.recorded(
        [("layer.weight", weight), ("other.fc.weight", layer.weight)], False
    ) as calls:
        y = ops.linear_fwd(x, weight, None)
        ops.linear_bwd(y, x, weight, torch.empty_like(weight), None, None, False, False)
        ops.attention_fwd(q, k, v, cu, cu, 3, 3, True, 0, 1.0, dropout)
        layer(x)
    found = {call.name: call for call in calls}
    product = 2 * rows * width * 24
    assert found["lightseq::linear_fwd"].flop == found["lightseq::linear_bwd"].flop == product
    assert found["lightseq::linear_fwd"].bytes == 4 * (rows * width + 24 * width + rows * 24)
    assert found["lightseq::attention_fwd"].flop == 2 * 2 * (6 + 3) * heads * 8
    assert found["lightseq::attention_fwd"].place == found["lightseq::linear_fwd"].place == "layer"
    assert (found["aten::addmm"].flop, found["aten::addmm"].place) == (product, "other.fc")
    assert [call.kind for call in calls][:3] == ["contraction", "contraction", "attention"]


def test_floors() -> None:
    fast = Rates(flop=1e12, bytes=1e9, fp8=2e12)
    calls = [
        {"kind": "contraction", "flop": 4e8, "bytes": 6e5, "fp8": False},  # 0.6 ms of copies
        {"kind": "contraction", "flop": 8e8, "bytes": 0.0, "fp8": True},  # 0.4 ms
        {"kind": "optimizer", "flop": 0.0, "bytes": 3e6, "fp8": False},
    ]
    profile = {
        "ms_per_step": 10.0, "launches": {"contraction": 4, "optimizer": 1},
        "class_ms": {"contraction": 6.0, "optimizer": 3.5, "copies": 0.0, "gaps": 0.5},
    }  # fmt: skip
    # The recorded step had half of the tokens; the measured steps take 20 ms.
    lines = report.classes({"timeline": profile, "ms_per_step": 20.0}, calls, fast, 0.5)
    assert [(line.name, line.ms, line.floor_ms) for line in lines] == [
        ("contraction", 12.0, 2.0), ("optimizer", 7.0, 3.0), ("gaps", 1.0, 0.0),
    ]  # fmt: skip
    assert report.losses(lines, 20.0)[0].startswith("contraction: 12.000 ms, of which 2.000 ms")
