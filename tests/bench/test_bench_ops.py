"""The op benchmark compares like with like: all systems of a case compute the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.forked_commands import python

from lightseq_fairseq.base import result_rows
from scripts import bench_ops as bench
from scripts.bench_ops_cases.batch import bert_lengths, sentence_lengths

ROOT = Path(__file__).resolve().parents[2]
# Without dropout, because ours and torch draw different bits.
SMALL = {
    "width": 16, "ffn": 24, "heads": 2, "vocabulary": 40, "decoder_layers": 2,
    "parameters": 1000, "dropout": 0.0,
}  # fmt: skip
TOKENS = 70
ATTENTION_KERNELS = {"ours", "library", "library_deterministic", "cudnn"}


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "scripts.bench_ops", *arguments], cwd=ROOT,
        capture_output=True, text=True,
        env={"PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **environment},
    )  # fmt: skip


def assert_close(mine: torch.Tensor, other: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        mine, other, rtol=2e-5, atol=2e-5, msg=lambda message: f"{what}: {message}"
    )


def test_help() -> None:
    done = command("--help")
    assert done.returncode == 0, done.stderr
    assert "--only REGEX" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "bench_ops: The commit of this code is unknown"),
        ("--dtypes int8", "int8 is none of bf16, fp16, fp32"),
        ("--only (", "argument --only: missing ), unterminated subpattern"),
        ("--tokens many", "invalid numbers value: 'many'"),
    ],
)
def test_refusals(words: str, message: str) -> None:
    done = command(*words.split())  # PATH is empty, so git is not found
    assert done.returncode != 0 and message in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_gpu() -> None:
    assert "torch finds no GPU" in command(COMMIT="abc", CUDA_VISIBLE_DEVICES="").stderr


def test_systems_agree() -> None:
    """Every case without torch.compile, which computes the same formula as eager torch by
    construction."""
    names = []
    for case in bench.cases(bench.Sizes(**SMALL), [TOKENS], torch.float32, "cpu"):
        case.restore()
        results = {
            system: list(make()()) for system, make in case.systems.items() if system != "compile"
        }
        ours = results.pop("ours")
        assert case.least_bytes > 0 and results
        for system, theirs in results.items():
            if system == "library" and case.name.startswith(("linear_fwd.qkv", "linear_fwd.cross")):
                continue  # the library's GEMM adds no bias
            if system == "eager":
                assert len(ours) == len(theirs), case.name
            for mine, other in zip(ours, theirs):
                assert_close(mine, other, f"{case.name} {system}")
        names.append(case.name)
    assert len(names) == len(set(names))
    stems = {name.partition("/")[0].partition(".")[0] for name in names}
    assert stems == {
        *(f"{op}_{way}" for op in (
            "embedding", "embedding_layer_norm", "linear", "linear_layer", "attention",
            "dropout_residual_layer_norm", "bias_activation_dropout", "cross_entropy",
        ) for way in ("fwd", "bwd")),
        "linear_activation_fwd", "activation_linear_bwd", "cross_entropy_fwd_bwd",
        "adam_norm", "adam_step",
        "decode_self_attention", "decode_cross_attention", "beam_candidates",
    }  # fmt: skip


def test_fp8_products_agree() -> None:
    sizes = bench.Sizes(**{**SMALL, "ffn": 32})
    found = [case for case in bench.cases(sizes, [80], torch.bfloat16, "cpu") if "fp8" in case.name]
    assert len({case.name for case in found}) == len(found) == 35
    for case in found:
        results = {system: list(make()()) for system, make in case.systems.items()}
        assert type(case.least_bytes) is int and case.least_bytes > 0
        has_library = case.name.startswith(("fp8_linear_fwd", "fp8_linear_bwd"))
        assert set(results) == ({"ours", "library"} if has_library else {"ours"})
        if has_library:
            for mine, other in zip(results["ours"], results["library"], strict=True):
                torch.testing.assert_close(mine, other, rtol=2.0**-7, atol=2.0**-6)


def test_updates_keep_agreeing() -> None:
    (case,) = (
        case
        for case in bench.cases(bench.Sizes(**SMALL), [], torch.float32, "cpu")
        if case.name.startswith("adam_step")
    )
    runs = {s: make() for s, make in case.systems.items() if s != "compile"}
    for _ in range(5):
        results = {system: [x.clone() for x in run()] for system, run in runs.items()}
    for system, theirs in results.items():
        for mine, other in zip(results["ours"], theirs):
            assert_close(mine, other, system)


def test_lengths_are_wmt_like() -> None:
    target, source = sentence_lengths(65536)
    assert target.sum() == 65536
    assert target.min() >= 2 and target.max() <= 200
    assert 27 < target.double().mean() < 29
    assert 1.01 < target.sum() / source.sum() < 1.05


def test_lengths_are_bert_like() -> None:
    lengths = bert_lengths(16384)
    assert lengths.sum() == 16384 and 240 < lengths.double().mean() < 265
    assert lengths.min() >= 20 and lengths.max() == 512


@pytest.mark.gpu
def test_kernels_of_attention_agree() -> None:
    """FlashAttention-2 and cuDNN compute what ours computes, within the rounding of bf16."""
    sizes = bench.Sizes(width=128, dropout=0.0)
    names = set()
    for case in bench.cases(sizes, [16384], torch.bfloat16, "cuda"):
        if "attention_" not in case.name or not {"library", "cudnn"} & case.systems.keys():
            continue
        results = {
            name: make()() for name, make in case.systems.items() if name in ATTENTION_KERNELS
        }
        ours = results.pop("ours")
        for name, theirs in results.items():
            for mine, other in zip(ours, theirs):
                other = other.transpose(1, 2).flatten(0, 1) if other.dim() == 4 else other
                error = (mine.double() - other.double()).norm() / mine.double().norm()
                assert error < 0.01, f"{case.name} {name}: {error}"
        names.add(case.name)
    assert {"attention_fwd.4096.w128.causal/T16384", "attention_bwd.512.bertmix/T16384"} <= names


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(900)  # other processes end first
def test_times_are_those_of_the_runs_alone() -> None:
    runs = {"nothing": lambda: None, "short": lambda: torch.cuda._sleep(100_000)}
    runs |= {"long": lambda: torch.cuda._sleep(400_000)}
    _, nothing, _ = bench.measure(runs, turns=5)["nothing"]
    _, short, _ = bench.measure(runs, turns=5)["short"]
    _, long, _ = bench.measure({"long": runs["long"]}, turns=5)["long"]
    assert abs(nothing) < 2e-3 < short  # ms
    assert 3.6 < long / short < 4.4


def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = {"ours": (1.0, 2.0, 4.0), "eager": (3.0, 4.0, 5.0)}
    monkeypatch.setattr(bench, "measure", lambda runs, restore: {s: times[s] for s in runs})
    nothing = lambda: lambda: ()  # noqa: E731
    case = bench.Case("linear_fwd.qkv/T8", 8_000_000, {"ours": nothing, "eager": nothing}, 10**9)
    about = {"commit": "abc", "date": "2026-11-21", "gpu": "none", "torch": "2"}
    rows = bench.rows_of(case, "linear_fwd.qkv/T8/bf16", ["ours", "library"], 10.0, about)
    assert rows == [
        {
            **about, "case": "linear_fwd.qkv/T8/bf16", "system": "ours", "ms": 2.0, "ms_p20": 1.0,
            "ms_p80": 4.0, "gb_per_s": 4.0, "copy_share": 0.4, "tflops": 0.5,
        }
    ]  # fmt: skip
    result_rows.write(rows * 2, tmp_path / "new" / "rows.json")
    text = (tmp_path / "new" / "rows.json").read_text()
    assert json.loads(text) == rows * 2 and len(text.splitlines()) == 4
    assert "linear_fwd.qkv/T8/bf16" in "\n".join(bench.table(rows))
