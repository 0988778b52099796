"""``lightseq-bench train``: its corpus, its arithmetic, and a complete run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bench_runs import bench_forked, bench_once, bench_train
from helpers.golden import matches, refusals

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base import result_rows
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.runs import merged
from lightseq_fairseq.cli.benchmark.train import corpus, rows
from lightseq_fairseq.cli.benchmark.train.cases import (
    SYSTEMS,
    Case,
    why_not,
)
from lightseq_fairseq.cli.benchmark.train.commands import command, environment
from lightseq_fairseq.cli.benchmark.train.floor import BURST, SUSTAINED, floor, parameters
from lightseq_fairseq.cli.benchmark.train.packed_transformer import build
from lightseq_fairseq.cli.benchmark.train.shapes import BART, SHAPES

fairseq_compat.prepare()
from fairseq.data.indexed_dataset import MMapIndexedDataset  # noqa: E402

SMALL = {"pairs": 2000, "vocabulary": 500}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.ensure(tmp_path_factory.mktemp("bench") / "corpus", **SMALL)


def words_of(small: corpus.Corpus) -> list[object]:
    return [
        "--corpus", small.folder, "--pairs", small.pairs, "--vocabulary", small.vocabulary
    ]  # fmt: skip


# --- corpus


def test_fairseq_reads_the_corpus(small: corpus.Corpus) -> None:
    tokens, sizes = {}, {}
    for language in ("en", "de"):
        dataset = MMapIndexedDataset(str(small.folder / f"train.en-de.{language}"))
        sentences = [dataset[i] for i in range(len(dataset))]
        assert len(sentences) == small.pairs
        assert all(s[-1] == corpus.EOS and (s[:-1] >= corpus.SPECIALS).all() for s in sentences)
        sizes[language] = np.array(dataset.sizes)
        tokens[language] = torch.cat(sentences)
        assert tokens[language].max() < small.vocabulary
        assert len(sentences[0]) == sizes[language][0]
    assert len(tokens["en"]) == small.source_tokens == sizes["en"].sum()
    assert len(tokens["de"]) == small.target_tokens == sizes["de"].sum()
    assert 27 < sizes["en"].mean() < 29 and sizes["en"].min() >= 2 and sizes["en"].max() <= 200
    assert 1.01 < small.target_tokens / small.source_tokens < 1.05
    assert 0.14 < (sizes["de"] / sizes["en"])[sizes["en"] > 40].std() < 0.16
    words = tokens["de"][tokens["de"] != corpus.EOS]
    harmonic = sum(1 / rank for rank in range(1, small.vocabulary - 3))
    for rank in (1, 2, 10):
        share = (words == rank + 3).double().mean().item()
        assert share == pytest.approx(1 / rank / harmonic, rel=0.1)


def test_corpus_is_pinned_and_kept(small: corpus.Corpus, tmp_path: Path) -> None:
    again = corpus.ensure(tmp_path / "again", **SMALL)
    names = sorted(path.name for path in small.folder.iterdir())
    assert names == sorted(path.name for path in again.folder.iterdir())
    assert os.listdir(tmp_path) == ["again"]
    assert all((small.folder / n).read_bytes() == (again.folder / n).read_bytes() for n in names)
    before = (again.folder / "train.en-de.de.bin").stat().st_mtime_ns
    assert corpus.ensure(again.folder, **SMALL) == again
    assert (again.folder / "train.en-de.de.bin").stat().st_mtime_ns == before


def test_a_folder_of_something_else_is_refused(small: corpus.Corpus, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("text")
    with pytest.raises(UserError, match="does not contain a corpus"):
        corpus.ensure(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    needed = "but this run needs 7 pairs and 500"
    with pytest.raises(UserError, match=f"2000 pairs and 500 words, {needed}"):
        corpus.ensure(small.folder, 7, 500)


# --- floor


@pytest.mark.parametrize(
    ("tokens", "parts", "total"),
    [
        (4096, (5.48, 1.27, 0.42, 0.56, 0.15, 1.42), 9.3),
        (8192, (10.96, 2.55, 0.84, 1.12, 0.30, 1.42), 17.2),
        (16384, (21.92, 5.10, 1.69, 2.25, 0.61, 1.42), 33.0),
        (65536, (87.68, 20.39, 6.74, 8.99, 2.44, 1.42), 127.7),
    ],
)
def test_floor(tokens: int, parts: tuple[float, ...], total: float) -> None:
    """The published floor table for t2t_big with 40,000 words."""
    least = floor(SHAPES["t2t_big"], 40_000, tokens, tokens)
    assert tuple(round(part, 2) for part in least) == parts
    assert round(sum(least), 1) == total


def test_floor_of_fp8() -> None:
    """The products of the layers at another rate, and nothing else."""
    for rates in (BURST, SUSTAINED):
        plain, fast = (
            floor(SHAPES["base"], 1000, 90, 70, in_fp8=fp8, rates=rates) for fp8 in (False, True)
        )
        assert fast.layer_gemm * rates.fp8_gemm == pytest.approx(plain.layer_gemm * rates.gemm)
        assert fast == plain._replace(layer_gemm=fast.layer_gemm)


def test_floor_at_the_sustained_rate() -> None:
    """All products take longer; what memory bandwidth limits does not."""
    burst, sustained = (
        floor(SHAPES["gpt2_124m"], 1000, 0, 1024, 1024, rates=rates) for rates in (BURST, SUSTAINED)
    )
    for name in ("layer_gemm", "logits_gemm", "attention"):
        ratio = getattr(sustained, name) / getattr(burst, name)
        assert ratio == pytest.approx(BURST.gemm / SUSTAINED.gemm)
    assert sustained[3:] == burst[3:]


def test_floor_counts_both_sides() -> None:
    shape = SHAPES["base"]
    neither, source, target, both = (
        floor(shape, 1000, s, t) for s, t in ((0, 0), (90, 0), (0, 70), (90, 70))
    )
    for none, one, other, sum_of in zip(neither, source, target, both):
        assert one + other - none == pytest.approx(sum_of)
    assert source.logits_gemm == 0 and source.layer_gemm > 0


@pytest.mark.parametrize("model", [model for model in SHAPES if model not in BART])
def test_parameters(model: str) -> None:
    with torch.device("meta"):
        baseline = build(SHAPES[model], 400, 16)
    assert parameters(SHAPES[model], 400) == sum(p.numel() for p in baseline.parameters())


# --- logs and rows

# Recorded lines of fairseq 0.12.2, with the end of an epoch between them.
LOG = """\
2026-11-21 12:55:29 | INFO | fairseq_cli.train | Start iterating over samples
2026-11-21 12:55:43 | INFO | train_inner | {"epoch": 1, "update": 0.114, "loss": "15.965", \
"nll_loss": "15.96", "ppl": "63743.2", "wps": "1505", "ups": "7.73", "wpb": "194.8", \
"bsz": "6.6", "num_updates": "50", "lr": "6.25e-06", "gnorm": "2.066", "train_wall": "6", \
"wall": "7"}
2026-11-21 12:55:50 | INFO | train_inner | {"epoch": 1, "update": 0.227, "loss": "15.858", \
"nll_loss": "15.842", "ppl": "58733", "wps": "2000", "ups": "10", "wpb": "200", "bsz": "7", \
"num_updates": "100", "lr": "1.25e-05", "gnorm": "2.059", "train_wall": "7", "wall": "14"}
2026-11-21 12:55:53 | INFO | train | {"epoch": 1, "train_loss": "15.886", "train_wps": "9"}
2026-11-21 12:55:57 | INFO | train_inner | {"epoch": 2, "wps": "1000", "wpb": "200", \
"num_updates": "150"}
2026-11-21 12:55:59 | INFO | train_inner | {"epoch": 2, "wps": "1", "wpb": "200", \
"num_updates": "200"}
"""


def test_intervals() -> None:
    assert rows.intervals(LOG, 50, 150) == [(2000, 200), (1000, 200)]
    assert [interval.ms_per_step for interval in rows.intervals(LOG, 60, 160)] == [200]
    with pytest.raises(UserError, match="no line between updates 200 and 300"):
        rows.intervals(LOG, 200, 300)


def report(first: float | None, tokens: int = 5000) -> dict[str, Any]:
    classes = {"contraction": 3000.0, "optimizer": 1200.0, "gaps": 800.0}
    profile = {"ms_per_step": 5000.0, "busy": 0.84, "class_ms": classes}
    return {
        "first_100_s": first, "peak_gib": 9.876, "timeline": profile, "profiled_tokens": tokens,
        "overlap": {"hidden": 0.5, "lanes_ms": {}},
    }  # fmt: skip


def test_row() -> None:
    case, corpus_ = Case.parse("t2t_big/4096/bf16"), corpus.Corpus(Path(), 1, 40_000, 100, 200)
    interval = rows.Interval
    runs = [
        rows.Run(50, [interval(1000, 4000), interval(2000, 4000)], report(4.0)),
        rows.Run(50, [interval(500, 4000)], report(3.0)),
    ]
    row = rows.row(case, "ours", corpus_, runs, {"commit": "abc"})
    least, sustained = (
        sum(floor(case.shape, 40_000, 2000, 4000, rates=rates)) for rates in (BURST, SUSTAINED)
    )
    assert row == {
        "commit": "abc", "case": "t2t_big/4096/bf16", "system": "ours", "tokens_per_s": 1000,
        "ms_per_step": 4000, "ms_p20": 2000, "ms_p50": 4000, "ms_p80": 8000,
        "source_tokens": 2000, "target_tokens": 4000, "floor_share": round(least / 4000, 4),
        "sustained_floor_share": round(sustained / 4000, 4),
        "peak_gib": 9.88, "first_100_s": 3.5, "gpu_busy": 0.9, "profiled_ms_per_step": 5000.0,
        "profiled_tokens": 5000,
        # GEMMs of batches that are a quarter larger; the optimizer's time does not depend on the
        # batch.
        "part_ms": {"gemm": 2400.0, "optimizer": 1200.0, "gaps": 400.0}, "warm_up": 50,
        "rounds": 2,
    }  # fmt: skip
    both = rows.row(case._replace(gpus=2), "ours", corpus_, runs, {})
    assert both["case"] == "t2t_big/4096/bf16/x2" and both["target_tokens"] == 4000
    assert both["overlap"] == {"hidden": 0.5, "lanes_ms": {}} and "overlap" not in row
    least = sum(floor(case.shape, 40_000, 1000, 2000))  # of each GPU
    assert both["floor_share"] == round(least / 4000, 4)
    fp8 = rows.row(case._replace(precision="fp8"), "ours", corpus_, runs, {})
    least = sum(floor(case.shape, 40_000, 2000, 4000, in_fp8=True))
    assert fp8["case"] == "t2t_big/4096/fp8" and fp8["floor_share"] == round(least / 4000, 4)
    # The GPU limits these steps, and the profiler makes them longer, so the shares of the profile
    # count.
    full = report(4.0)
    full["timeline"] = {
        "ms_per_step": 5000.0,
        "busy": 0.96,
        "class_ms": {"contraction": 4800.0, "gaps": 200.0},
    }
    held_up = rows.row(case, "ours", corpus_, [runs[0]._replace(report=full)], {})
    assert held_up["gpu_busy"] == 0.96
    assert held_up["part_ms"] == {"gemm": 1920.0, "gaps": 80.0}
    short = [runs[0]._replace(report=report(4.0, tokens=1000))]
    full = rows.row(case, "ours", corpus_, short, {})
    assert full["gpu_busy"] == 1 and full["part_ms"]["gaps"] == 0
    slow = {**row, "system": "fairseq_no_cudnn", "tokens_per_s": 250, "first_100_s": None}
    lines = rows.table([slow, row])
    assert lines[2].split()[:3] == ["ours", "1000", "4.00"]
    assert lines[3].split()[:3] == ["fairseq_no_cudnn", "250", "1.00"]
    assert [line.split() for line in lines[5:8:2]] == [
        ["ms", "by", "part", "gemm", "optimizer", "gaps"],
        ["ours", "2400.00", "1200.00", "400.00"],
    ]
    packed = rows.table([{**row, "system": "ours_packed"}, slow])[2]
    # no ratio, since its batches differ
    assert packed.split()[:3] == ["ours_packed", "1000", "4000.00"]
    other = {**slow, "case": "base/4096/bf16"}
    again, unseen = {**slow, "rounds": 9}, {**row, "case": "iwslt/4096/bf16"}
    assert merged([slow, other, row], [unseen, again]) == [again, other, row, unseen]


# --- the command


def test_commands_differ_in_nothing_but_the_system(tmp_path: Path) -> None:
    case = Case.parse("24e24d/512/fp16")
    words = {
        system: command(case, system, tmp_path, tmp_path / "r.json", 200, True, 4)
        for system in ("ours", "fairseq", "fairseq_no_cudnn", "fairseq_no_cudnn_apex")
    }
    plain = words["fairseq_no_cudnn"]
    assert words["fairseq"] == plain and environment("fairseq")["LIGHTSEQ_CUDNN_ATTENTION"] == "1"
    assert environment("fairseq_no_cudnn")["LIGHTSEQ_CUDNN_ATTENTION"] == "0"
    assert words["fairseq_no_cudnn_apex"] == [w for w in plain if w != "--without-apex"]
    for system, native in (("ours", 0), ("fairseq_no_cudnn", 1)):  # plus the profiled updates
        how = SYSTEMS[system]
        numbers = {"--heat": how.heat, "--marks": how.marks}
        numbers["--max-update"] = 200 + sum(numbers.values())
        for flag, number in numbers.items():
            at = words[system].index(flag)
            assert words[system][at + 1] == str(number)
            del words[system][at : at + 2]
        assert words[system].count("--native") == native
    assert words["ours"] == [word for word in plain if word != "--native"]
    packed = command(case, "ours_packed", tmp_path, tmp_path / "r.json", 200, True, 4)
    fuller = [word for word in packed if word != "--pack-tokens"]
    assert len(fuller) == len(packed) - 1
    assert fuller == command(case, "ours", tmp_path, tmp_path / "r.json", 200, True, 4)
    assert {"ls_transformer_wmt_en_de_big_t2t", "24", "512", "--fp16"} <= set(plain)


@pytest.mark.parametrize(
    "name", ["t2t_big/4096", "lm_tiny/64x4", "roberta_tiny/64x4", "roberta_tiny/sentences8"]
)
def test_fp8_is_a_flag_beside_bf16(name: str, tmp_path: Path) -> None:
    bf16, fp8 = (
        command(Case.parse(f"{name}/{precision}"), "ours", tmp_path, tmp_path, 200, True, 4)
        for precision in ("bf16", "fp8")
    )
    assert [word for word in fp8 if word != "--fp8"] == bf16
    assert fp8.count("--fp8") == 1


def test_only_ours_computes_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("t2t_big/4096/fp8")
    able = [system for system in SYSTEMS if why_not(system, case) is None]
    assert able == ["ours", "ours_packed"]
    assert why_not("fairseq_no_cudnn", case) == "only lightseq-train has --fp8."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in (
        ((8, 0), "--fp8 needs compute capability 8.9, but this GPU has 8.0."),
        ((8, 9), None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert why_not("ours", case) == reason
        assert why_not("ours", Case.parse("t2t_big/4096/bf16")) is None


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_bench_train"))
def test_refusals(words: str, sentence: str) -> None:
    done = bench_train(*words.format(here=Path(__file__).parent).split())
    assert done.exit_code == 2
    assert matches(done.stderr.splitlines()[-1], f"lightseq-bench: error: {sentence}")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = bench_train("--case", "base/4096/bf16")
    assert done.exit_code == 2 and "base/4096/bf16 needs a GPU" in done.stderr


def test_rows_to_keep_need_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(result_rows, "SOURCE", tmp_path / "result_rows.py")
    done = bench_train("--case", "tiny/256/bf16", "--output", tmp_path / "rows.json")
    assert done.exit_code == 2 and "set it with COMMIT=..." in done.stderr


def test_tables_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tabulate", None)
    done = bench_train("--case", "tiny/256/bf16")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "pip install 'lightseq-fairseq[bench]'" in done.stderr


def test_nothing_is_made_where_nothing_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = bench_train(
        "--case", "tiny/256/bf16", "--systems", "fairseq_no_cudnn_apex", "--corpus",
        tmp_path / "corpus", "--logs", tmp_path / "logs", "--output", tmp_path / "rows.json",
    )  # fmt: skip
    assert done.exit_code == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr == (
        "lightseq-bench: error: No case can be measured here: tiny/256/bf16 without "
        "fairseq_no_cudnn_apex: apex is not installed.\n"
    )


def test_a_failed_run_is_told(small: corpus.Corpus, tmp_path: Path) -> None:
    """A corpus without sources: training fails at once, and no row is written."""
    damaged = tmp_path / "corpus"
    shutil.copytree(small.folder, damaged)
    (damaged / "train.en-de.en.bin").unlink()
    done = bench_forked(
        "train", "--case", "tiny/256/bf16", "--systems", "fairseq", "--corpus", damaged, "--pairs",
        small.pairs, "--vocabulary", small.vocabulary, "--logs", tmp_path, "--output",
        tmp_path / "rows.json", "--workers", 0, "--rounds", 2, status=2,
    )  # fmt: skip
    assert done.stderr.count("round 2 of 2") == 0
    assert "These runs failed: tiny/256/bf16 fairseq. Their logs say why." in done.stderr
    assert "the run ended with status 2; the last lines of " in done.stderr
    assert not (tmp_path / "rows.json").exists()


def test_everything_once(small: corpus.Corpus, tmp_path: Path) -> None:
    systems = ("ours", "ours_packed", "fairseq_no_cudnn", "torch_compile")
    done, found = bench_once(
        tmp_path, "tiny/256/bf16", (*systems, "fairseq_no_cudnn_apex"), *words_of(small)
    )
    assert "without fairseq_no_cudnn_apex: apex is not installed." in done.stderr
    assert set(found) == set(systems)
    for system, row in found.items():
        assert f"\n{system} " in done.stdout
        assert row["case"] == "tiny/256/bf16" and row["gpu"] == "none" and len(row["commit"]) == 40
        assert 0 < row["gpu_busy"] <= 1 and row["first_100_s"] is None and row["peak_gib"] > 0.1
        # Larger if the profiled steps were slower than the others.
        assert sum(row["part_ms"].values()) > 0.99 * row["ms_per_step"]
        assert row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
    # All systems but one train on the same batches, and all on models of one size.
    alike = [found[name] for name in systems if name != "ours_packed"]
    assert len({row["target_tokens"] for row in alike}) == 1
    assert len({row["profiled_tokens"] for row in alike if row["system"] != "ours"}) == 1
    for system in ("ours", "ours_packed"):
        log = (tmp_path / "logs" / f"tiny-256-bf16-{system}-1.log").read_text()
        (line,) = re.findall(r"^lightseq-train .*", log, re.MULTILINE)
        assert ("--pack-tokens" in line.split()) == (system == "ours_packed")
    log = (tmp_path / "logs" / "tiny-256-bf16-fairseq_no_cudnn-1.log").read_text()
    (count,) = re.findall(r"num. shared model params: ([\d,]+)", log)
    assert int(count.replace(",", "")) == parameters(SHAPES["tiny"], small.vocabulary)


def test_fp8_once(small: corpus.Corpus, tmp_path: Path) -> None:
    systems = ("ours", "fairseq_no_cudnn")
    done, found = bench_once(tmp_path, "tiny/256/fp8", systems, *words_of(small))
    assert "tiny/256/fp8 without fairseq_no_cudnn: only lightseq-train has --fp8." in done.stderr
    assert set(found) == {"ours"}
    assert found["ours"]["case"] == "tiny/256/fp8" and found["ours"]["tokens_per_s"] > 0
    assert '"fp8_sat"' in (tmp_path / "logs" / "tiny-256-fp8-ours-1.log").read_text()


def test_two_ranks(small: corpus.Corpus, tmp_path: Path) -> None:
    systems = ("ours", "fairseq_no_cudnn")
    done, found = bench_once(
        tmp_path, "tiny/256/bf16/x2", (*systems, "torch_compile"), *words_of(small)
    )
    assert "x2 without torch_compile: this baseline trains on one GPU only." in done.stderr
    assert set(found) == set(systems)
    for row in found.values():
        assert row["case"] == "tiny/256/bf16/x2" and row["part_ms"]["all_reduce"] > 0
        assert 0 <= row["overlap"]["hidden"] <= 1 and all(row["overlap"]["lanes_ms"].values())
        # Of both ranks together; a batch of fairseq's has up to 256 tokens.
        assert 256 < row["target_tokens"] <= 512 and 256 < row["profiled_tokens"] <= 512
    assert len({row["target_tokens"] for row in found.values()}) == 1
    log = (tmp_path / "logs" / "tiny-256-bf16-x2-ours-1.log").read_text()
    assert "step: without CUDA graphs, without padding" in log


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert why_not("ours", Case.parse("t2t_big/4096/bf16/x4")) is None
    assert why_not("ours", Case.parse("t2t_big/4096/bf16/x8")) == "this machine has 4 GPU(s)."
