"""The documents' tables and the plots agree with the result files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from scripts import plots
from scripts.overview_table import overview_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PLOT = "scripts/results/ops-h200.json", "scripts/results/ops-h200.svg"
MEASURED = "docs/measured.md"
README = (
    "Ops:\n\n<!-- table: ops -->\n<!-- end -->\n\n"
    "<!-- table: attention -->\n<!-- end -->\n\nThe rest.\n"
)
MS = {
    "embedding_fwd/T16384/bf16": {"ours": 0.02, "eager": 0.09, "compile": 0.03},
    "embedding_fwd/T4096/bf16": {"ours": 77.0, "eager": 88.0, "compile": 99.0},
    "linear_fwd.qkv/T16384/bf16": {"ours": 0.2, "eager": 0.2, "compile": 0.19, "library": 0.198},
    "embedding_fwd/T65536/bf16": {"ours": 77.0, "eager": 88.0, "compile": 75.0},
    "linear_fwd.qkv/T16384/fp32": {"ours": 77.0, "compile": 76.9},
    "embedding_fwd/T16384/fp32": {"ours": 0.04, "compile": 0.06},
    "adam_step/N217M/bf16": {"ours": 1.4, "eager": 6.0, "compile": 1.5, "library": 2.1},
    "attention_fwd.512.causal/T16384/bf16": {"ours": 1.0, "library": 3.0, "cudnn": 2.0},
    "attention_bwd.512.causal/T16384/bf16": {
        "ours": 1.5, "library": 2.5, "library_deterministic": 4.0, "cudnn": 1.0,
    },
    "attention_fwd.512.w128.nodrop/T16384/bf16": {"ours": 2.0, "library": 1.5},
    "attention_bwd.512.w128.nodrop/T16384/bf16": {"ours": 2.0, "library": 1.5},
}  # fmt: skip


def result_rows() -> list[dict[str, Any]]:
    about = {"commit": "0123456789abcdef", "date": "2026-11-21", "gpu": "GPU X", "torch": "2.11"}
    return [
        {
            **about, "case": case, "system": system, "ms": ms, "ms_p20": ms, "ms_p80": ms,
            "gb_per_s": 3400.4, "copy_share": 0.7 if case.endswith("fp32") else 0.8,
        }
        for case, systems in MS.items()
        for system, ms in systems.items()
    ]  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with only the tables' code and a README."""
    (tmp_path / "scripts").mkdir()
    for code in (ROOT / "scripts").glob("*.py"):
        shutil.copy(code, tmp_path / "scripts")
    (tmp_path / "README.md").write_text("Nothing was measured.\n")
    return tmp_path


@pytest.fixture
def measured(tree: Path) -> Path:
    (tree / RESULTS).parent.mkdir()
    (tree / RESULTS).write_text(json.dumps(result_rows()))
    (tree / "README.md").write_text(README)
    return tree


def tables(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.tables", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def squeezed(document: Path) -> str:
    """The text without the spaces and dashes that only align the columns."""
    return re.sub(" +", " ", document.read_text())


def words(picture: Path) -> set[str | None]:
    """All words of the text."""
    elements = ElementTree.parse(picture).getroot().iter()
    return {element.text for element in elements if element.tag.endswith("text")}


def test_no_results_no_table(tree: Path) -> None:
    assert tables(tree).returncode == tables(tree, "--check").returncode == 0
    assert (tree / "README.md").read_text() == "Nothing was measured.\n"
    assert not (tree / PLOT).exists()


def test_results_want_a_table(measured: Path) -> None:
    (measured / "README.md").write_text("Nothing was measured.\n")
    done = tables(measured)
    assert done.returncode != 0 and "have no place for the tables ops, attention" in done.stderr


def test_table_of_ops(measured: Path) -> None:
    assert tables(measured).returncode == 0
    text = squeezed(measured / "README.md")
    assert text.startswith("Ops:\n") and text.endswith("<!-- end -->\n\nThe rest.\n")
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `embedding_fwd` | 0.020 | 3400 | 80% | 4.50 | 1.50 | |",
        "| `linear_fwd.qkv` | 0.200 | 3400 | 80% | 1.00 | **0.95, slower** | 0.99 |",
        "| `adam_step` | 1.400 | 3400 | 80% | 4.29 | 1.07 | 1.50 |",
    ]
    assert "GPU X; torch 2.11; commit 0123456789;" in text
    assert (
        "\nAt other sizes and precisions ours is slower than torch.compile's code in 2 of 4 rows: "
        "`embedding_fwd/T65536/bf16` 0.974, `linear_fwd.qkv/T16384/fp32` 0.999. Lowest share of "
        "the copy bandwidth, without linear and attention: bf16 80% (`embedding_fwd`), fp32 70% "
        "(`embedding_fwd`).\n"
    ) in text


def test_table_of_attention(measured: Path) -> None:
    assert tables(measured).returncode == 0
    lines = squeezed(measured / "README.md").splitlines()
    assert [line for line in lines if line.startswith("| 512")] == [
        "| 512 | causal | 64 | 0.1 | 2.500 (1.000) | 5.500 (3.000) | 7.000 (3.000) "
        "| 3.000 (2.000) | 1.20 |",
        "| 512 | full | 128 | 0 | 4.000 (2.000) | 3.000 (1.500) | | | **0.75, slower** |",
    ]


def test_no_row_is_slower(measured: Path) -> None:
    fast = [row for row in result_rows() if "bf16" in row["case"] and "T65536" not in row["case"]]
    (measured / RESULTS).write_text(json.dumps(fast))
    assert tables(measured).returncode == 0
    text = squeezed(measured / "README.md")
    assert "torch.compile's code in none of 1 rows. Lowest share" in text


def test_plot_shows_what_is_bound_by_memory(measured: Path) -> None:
    tables(measured)
    found = words(measured / PLOT)
    assert {
        "embedding, forward",
        "Adam: update",
        "80%",
        "lightseq-fairseq",
        "torch.compile",
    } <= found
    assert not any(word and "linear" in word for word in found)


def test_fp8_ops(measured: Path) -> None:
    """Casts are bound by memory, products are not."""
    cases = ("fp8_quantise.f/T16384", "fp8_weights/N176M", "fp8_scales/M183",
             "fp8_dropout_residual_layer_norm_bwd/T16384", "fp8_activation_linear_bwd.gelu/T16384",
             "fp8_linear_fwd.fc1/T16384")  # fmt: skip
    rows = [{**result_rows()[0], "case": f"{case}/bf16", "system": "ours"} for case in cases]
    (measured / RESULTS).write_text(json.dumps([*result_rows(), *rows]))
    assert tables(measured).returncode == 0
    text = squeezed(measured / "README.md")
    assert "| `fp8_linear_fwd.fc1` | 0.020 |" in text and "| `fp8_weights` | 0.020 |" in text
    assert "fp8_scales" not in text and "(Adam: 217 M parameters; fp8_weights: 176 M)" in text
    shown = {word for word in words(measured / PLOT) if word and "fp8" in word}
    assert shown == {
        "fp8: cast (f)", "fp8: cast of all weights",
        "fp8: dropout + residual + LayerNorm, backward",
    }  # fmt: skip


@pytest.mark.parametrize("stale", ["README.md", PLOT])
def test_check_finds_what_is_stale(measured: Path, stale: str) -> None:
    tables(measured)
    assert tables(measured, "--check").returncode == 0
    old = (measured / stale).read_text().replace("80%", "81%")
    (measured / stale).write_text(old)
    done = tables(measured, "--check")
    assert done.returncode != 0 and f"{stale} differs from its result file" in done.stderr
    assert (measured / stale).read_text() == old
    assert tables(measured).returncode == tables(measured, "--check").returncode == 0


def test_check_asks_for_what_a_plot_shows_and_not_for_its_bytes(measured: Path) -> None:
    tables(measured)
    drawn = (measured / PLOT).read_text()
    assert plots.OURS in drawn.split("</metadata>")[1]
    (measured / PLOT).write_text(drawn.replace('width="', 'height-of-nothing="1" width="'))
    assert tables(measured, "--check").returncode == 0
    (measured / PLOT).write_text("no picture")
    assert tables(measured, "--check").returncode != 0
    tables(measured)
    assert (measured / PLOT).read_text() == drawn  # the same bytes again


def test_check_wants_the_plot(measured: Path) -> None:
    tables(measured)
    (measured / PLOT).unlink()
    assert tables(measured, "--check").returncode != 0


TRAIN_RESULTS, TRAIN_PLOT = "scripts/results/train-h200.json", "scripts/results/train-h200.svg"
TRAIN_README = "<!-- table: train -->\n<!-- end -->\n"
BY_CASE = "<!-- table: {}_by_case -->\n<!-- end -->\n"


def train_rows() -> list[dict[str, Any]]:
    speeds = {
        "t2t_big/4096/bf16": {
            "ours": 320_400,
            "ours_packed": 330_000,
            "fairseq": 24_000,
            "fairseq_no_cudnn": 80_100,
        },
        "base/4096/bf16": {"ours": 700_000},
    }
    return [
        {
            **about, "case": case, "system": system, "tokens_per_s": speed, "ms_per_step": 11.5,
            "ms_p20": 11.1, "ms_p80": 12.25, "gpu_busy": 0.975, "floor_share": 0.81,
            "sustained_floor_share": 0.93, "peak_gib": 9.25, "profiled_tokens": 3700,
            "warm_up": 150, "first_100_s": None if system == "fairseq" else 3.21,
            "part_ms": {
                "cross_entropy": 0.2, "optimizer": 1.5, "attention": 1.0, "gemm": 6.5,
                "elementwise": 0.8, "gaps": 0.25,
            },
        }
        for about in [{"commit": "0123456789abcdef", "gpu": "GPU X", "torch": "2.11"}]
        for case, systems in speeds.items()
        for system, speed in systems.items()
    ]  # fmt: skip


@pytest.fixture
def trained(tree: Path) -> Path:
    (tree / TRAIN_RESULTS).parent.mkdir()
    (tree / TRAIN_RESULTS).write_text(json.dumps(train_rows()))
    (tree / "README.md").write_text(BY_CASE.format("train"))
    (tree / "docs").mkdir()
    (tree / MEASURED).write_text(TRAIN_README)
    assert tables(tree).returncode == tables(tree, "--check").returncode == 0
    return tree


def test_table_of_training(trained: Path) -> None:
    text = squeezed(trained / MEASURED)
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `t2t_big/4096/bf16` | `lightseq-train --pack-tokens` | 330k | | 11.5 (11.1-12.2) | "
        "98% | 81% | 93% | 9.2 | 3.2 s | 150 |",
        "| `t2t_big/4096/bf16` | `lightseq-train` | 320k | 4.00 | 11.5 (11.1-12.2) | "
        "98% | 81% | 93% | 9.2 | 3.2 s | 150 |",
        "| `t2t_big/4096/bf16` | fairseq, cuDNN attention off | 80k | 1.00 | 11.5 (11.1-12.2) | "
        "98% | 81% | 93% | 9.2 | 3.2 s | 150 |",
        "| `t2t_big/4096/bf16` | fairseq as it comes | 24k | 0.30 | 11.5 (11.1-12.2) | "
        "98% | 81% | 93% | 9.2 | | 150 |",
        "| `base/4096/bf16` | `lightseq-train` | 700k | | 11.5 (11.1-12.2) | "
        "98% | 81% | 93% | 9.2 | 3.2 s | 150 |",
        "| `t2t_big/4096/bf16` | 6.50 | 1.00 | 0.80 | 0.20 | 1.50 | 0.25 |",
        "| `base/4096/bf16` | 6.50 | 1.00 | 0.80 | 0.20 | 1.50 | 0.25 |",
    ]


def test_table_of_training_by_case(trained: Path) -> None:
    text = squeezed(trained / "README.md")
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `t2t_big/4096/bf16` | 320k | 80k | 4.0 | 11.5 | 9.2 | 9.2 |",
    ]


def test_plot_of_training(trained: Path) -> None:
    found = words(trained / TRAIN_PLOT)
    assert {
        "Transformer big, 4096 tokens, bf16",
        "320k",
        "80k",
        "700k",
        "Training speed, GPU X",
    } <= found
    assert {"lightseq-train", "fairseq, cuDNN attention off"} <= found


def test_plot_of_overlap(trained: Path) -> None:
    """It exists if one of our rows of Transformer big on several GPUs has its overlap."""
    plot = trained / "docs/overlap.svg"
    assert not plot.exists()
    overlap = {"hidden": 0.25, "lanes_ms": {"computation": [[0, 9.5]], "collectives": [[7, 11]]}}
    row = {**train_rows()[0], "case": "t2t_big/8192/bf16/x2", "overlap": overlap}
    alone = {**row, "case": "base/4096/bf16/x2", "overlap": {**overlap, "hidden": None}}
    (trained / TRAIN_RESULTS).write_text(json.dumps([*train_rows(), row, alone]))
    assert tables(trained, "--check").returncode == 1
    assert tables(trained).returncode == tables(trained, "--check").returncode == 0
    (panel,) = plots.shown(plot)["panels"].items()
    assert panel[1] == overlap["lanes_ms"]
    assert "2 GPUs" in panel[0] and "25% of the collectives' time is hidden" in panel[0]
    assert {"computation", "collectives", "ms"} <= words(plot)


def test_language_models_beside_translation(trained: Path) -> None:
    rows = train_rows()
    for row in (rows[0], rows[3]):
        for case in ("gpt2_small/512x32/bf16", "gpt2_124m/1024x32/bf16", "gpt2_124m/512x32/bf16"):
            rows.append({**row, "case": case})
    (trained / TRAIN_RESULTS).write_text(json.dumps(rows))
    assert tables(trained).returncode == tables(trained, "--check").returncode == 0
    found = re.findall(r"^\| `(\S+)` \|.* 4\.0 \|", squeezed(trained / "README.md"), re.MULTILINE)
    assert found == [
        "t2t_big/4096/bf16", "gpt2_small/512x32/bf16", "gpt2_124m/512x32/bf16",
        "gpt2_124m/1024x32/bf16",
    ]  # fmt: skip
    sizes = "max-tokens of a GPU, for language models the tokens of a block x its blocks, precision"
    below = (trained / "README.md").read_text()
    assert f"; case: model, {sizes}; `t2t_big` is" in below
    assert "`gpt2_124m` `ls_transformer_lm_gpt3_small` with dropout 0.1" in below
    assert "lm_base" not in below
    assert sizes in (trained / MEASURED).read_text()
    assert "GPT-2 124M, 32 x 1024 tokens, bf16" in words(trained / TRAIN_PLOT)


def test_roberta_beside_translation(trained: Path) -> None:
    rows = train_rows()
    for row in (rows[0], rows[3]):
        for size in ("bertmix", "128x128", "bertmix8192", "sentences32"):
            rows.append({**row, "case": f"roberta_large/{size}/bf16"})
    rows.append({**rows[0], "case": "roberta_large/bertmix/bf16", "system": "torch_compile_padded"})
    (trained / TRAIN_RESULTS).write_text(json.dumps(rows))
    assert tables(trained).returncode == tables(trained, "--check").returncode == 0
    below = (trained / "README.md").read_text()
    found = re.findall(r"^\| `(roberta\S+)` \|", squeezed(trained / "README.md"), re.MULTILINE)
    sizes = "sentences32", "bertmix8192", "bertmix", "128x128"
    assert found == [f"roberta_large/{size}/bf16" for size in sizes]
    mix = "for bertmix 16384 if it has no number"
    assert f"x its blocks, {mix}, for fine-tuning the sentences of a batch, precision" in below
    assert "`roberta_large` `ls_roberta_large`" in below
    assert "padded PyTorch, torch.compile, CUDA graphs" in (trained / MEASURED).read_text()
    plotted = words(trained / TRAIN_PLOT)
    assert "RoBERTa large, 8192 tokens in BERT's mix of lengths, bf16" in plotted
    assert "RoBERTa large, 32 sentences, bf16" in plotted


CURVES, CURVES_PLOT = "scripts/results/convergence-h200.json", "docs/convergence.svg"


def convergence_rows() -> list[dict[str, Any]]:
    # Case -> system -> last loss (less 0.01 for each further seed), and the BLEU of each seed
    runs = {
        "small/fp32": {"lightseq": (3.0, [39.0, 39.5]), "fairseq": (3.0, [39.4])},
        "t2t_big/bf16": {"fairseq": (4.0, [None, None]), "lightseq": (4.01, [None])},
    }
    return [
        {
            "commit": "0123456789abcdef", "gpu": "GPU X", "torch": "2.11",
            "runs_at_once": 9 if case.startswith("small") else 4, "mps": seed == 0,
            "case": case, "system": system, "seed": seed, "bleu": bleu, "signature": "nrefs:1",
            "updates": 300, "valid_loss": loss - 0.01 * seed, "seconds": 30.0 + 2 * seed,
            "train_curve": [[100, 10.0, 90.0], [200, 20.0, 4.5], [300, 30.0, 4.0]],
            "valid_curve": [[100, 10.0, 9.0], [200, 20.0, loss], [300, 30.0, loss - 0.01 * seed]],
        }
        for case, systems in runs.items()
        for system, (loss, scores) in systems.items()
        for seed, bleu in enumerate(scores)
    ]  # fmt: skip


@pytest.fixture
def converged(tree: Path) -> Path:
    (tree / CURVES).parent.mkdir()
    (tree / CURVES).write_text(json.dumps(convergence_rows()))
    (tree / "docs").mkdir()
    (tree / "README.md").write_text("<!-- table: convergence -->\n<!-- end -->\n")
    assert tables(tree).returncode == tables(tree, "--check").returncode == 0
    return tree


def test_table_of_convergence(converged: Path) -> None:
    text = squeezed(converged / "README.md")
    big, small = "Transformer big: 6+6 layers of width 1024, bf16", "4+4 layers of width 128, fp32"
    native = "fairseq, cuDNN attention off"
    assert [line for line in text.splitlines() if line.startswith("| ")][1:] == [
        f"| {small} | `lightseq-train` | 2 | 300 | 39.25 (39.00 to 39.50) | "
        "2.995 (2.990 to 3.000) | 31 s (30 to 32) | 3.03: 20 s, 200 updates |",
        f"| {small} | {native} | 1 | 300 | 39.40 | 3.000 | 30 s | 3.03: 20 s, 200 updates |",
        f"| {big} | `lightseq-train` | 1 | 300 | | 4.010 | 30 s | 4.05: 20 s, 200 updates |",
        f"| {big} | {native} | 2 | 300 | | 3.995 (3.990 to 4.000) | 31 s (30 to 32) | "
        "4.05: 20 s, 200 updates |",
    ]
    assert "| training time |" in text
    assert "GPU X; torch 2.11; commit 0123456789; means over the seeds" in text
    assert "BLEU: test_2016_flickr, translated after training with the average of a run's" in text
    assert "last checkpoints (sacrebleu `nrefs:1`); losses in bits" in text
    assert (
        "4+4 layers of width 128, 9 at once by CUDA's MPS; Transformer big: 6+6 layers of width "
        "1024, 4 at once by CUDA's MPS), so compare times only between the two systems of the same "
        "model.\n"
    ) in text


def test_table_of_convergence_without_bleu(converged: Path) -> None:
    big = [row for row in convergence_rows() if row["bleu"] is None]
    (converged / CURVES).write_text(json.dumps([{**row, "mps": False} for row in big]))
    assert tables(converged).returncode == 0
    text = squeezed(converged / "README.md")
    assert "test_2016" not in text and text.count("sacrebleu") == 0
    assert "width 1024, 4 at once), so compare times" in text


def test_table_of_precisions(tree: Path) -> None:
    """Two seeds of the small model; of the big one, one in fp8."""
    runs = [("small/bf16", 3.0, 39.0), ("small/bf16", 3.1, 40.0), ("small/fp8", 3.0, 39.1),
            ("small/fp8", 3.3, 39.5), ("t2t_big/bf16", 4.0, None), ("t2t_big/bf16", 4.2, None),
            ("t2t_big/fp8", 4.15, None)]  # fmt: skip
    rows = [
        {**convergence_rows()[0], "case": case, "seed": seed, "valid_loss": loss, "bleu": bleu}
        for seed, (case, loss, bleu) in enumerate(runs)
    ]
    file = tree / "scripts/results/precisions-h200.json"
    file.parent.mkdir()
    file.write_text(json.dumps(rows))
    (tree / "README.md").write_text("<!-- table: precisions -->\n<!-- end -->\n")
    assert tables(tree).returncode == tables(tree, "--check").returncode == 0
    text = squeezed(tree / "README.md")
    small, big = "4+4 layers of width 128", "Transformer big: 6+6 layers of width 1024"
    assert [line for line in text.splitlines() if line.startswith("| ")][1:] == [
        f"| {small}, bf16 | 2 | 300 | 39.50 (39.00 to 40.00) | | 3.050 (3.000 to 3.100) | |",
        f"| {small}, fp8 | 2 | 300 | 39.30 (39.10 to 39.50) | -0.20 ± 0.54 | "
        "3.150 (3.000 to 3.300) | +0.100 ± 0.158 |",
        f"| {big}, bf16 | 2 | 300 | | | 4.100 (4.000 to 4.200) | |",
        f"| {big}, fp8 | 1 | 300 | | | 4.150 | +0.050 |",
    ]
    assert "label smoothing included; differences of means, with standard errors.\n" in text


def test_plot_of_convergence(converged: Path) -> None:
    found = words(converged / CURVES_PLOT)
    assert {"lightseq-train: validation", "updates", "seconds"} <= found
    small, big = plots.shown(converged / CURVES_PLOT)["panels"]
    # Three runs of each model; training and validation of the big one. Very large losses are left
    # out.
    assert [len(points) for _, points in small["curves"]] == [2] * 3
    assert [len(points) for _, points in big["curves"]] == [2] * 6
    (converged / CURVES_PLOT).unlink()
    assert "docs/convergence.svg differs" in tables(converged, "--check").stderr


GENERATE_RESULTS = "scripts/results/generate-h200.json"
GENERATE_PLOT = "scripts/results/generate-h200.svg"


@pytest.fixture
def translated(tree: Path) -> Path:
    """Translation of a test set in batches by tokens, by all systems, and of single sentences, by
    ours."""
    about = {"commit": "0123456789abcdef", "gpu": "GPU X", "torch": "2.11"}
    figures = {"p50_ms": 8.04, "p99_ms": 20.5, "peak_gib": 3.25, "load_s": 2.75, "first_s": 1.5,
               "tokens_per_s": 5}  # fmt: skip
    rows = [
        {**about, **figures, "case": case, "system": system, "sentences_per_s": speed,
         "decode_s": 3003 / speed, **more}
        for case, systems, more in (
            ("t2t_big/btokens/beam5/bf16",
             {"fairseq_no_cudnn": 400, "ours": 6000.6, "ctranslate2": 2000}, {"max_tokens": 4096}),
            ("t2t_big/b1/beam4/bf16", {"ours": 120}, {}),
        )
        for system, speed in systems.items()
    ]  # fmt: skip
    (tree / GENERATE_RESULTS).parent.mkdir()
    (tree / GENERATE_RESULTS).write_text(json.dumps(rows))
    (tree / "README.md").write_text(BY_CASE.format("generate"))
    (tree / "docs").mkdir()
    (tree / MEASURED).write_text("<!-- table: generate -->\n<!-- end -->\n")
    assert tables(tree).returncode == tables(tree, "--check").returncode == 0
    return tree


def test_table_of_generation(translated: Path) -> None:
    text = squeezed(translated / MEASURED)
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `t2t_big/btokens/beam5/bf16` | `lightseq-generate` | 6001 | 5 | 15.0 | 0.500 | "
        "8.0, 20.5 | 3.2 | 2.8 | 1.50 |",
        "| `t2t_big/btokens/beam5/bf16` | CTranslate2 | 2000 | 5 | 5.0 | 1.502 | 8.0, 20.5 | 3.2 | "
        "2.8 | 1.50 |",
        "| `t2t_big/btokens/beam5/bf16` | fairseq, cuDNN attention off | 400 | 5 | 1.0 | 7.508 | "
        "8.0, 20.5 | 3.2 | 2.8 | 1.50 |",
        "| `t2t_big/b1/beam4/bf16` | `lightseq-generate` | 120 | 5 | | 25.025 | 8.0, 20.5 | 3.2 | "
        "2.8 | 1.50 |",
    ]
    assert "`btokens`: at most 4096 source tokens" in text
    assert "| load s | first pass s |" in text and "in the first pass ours captures graphs" in text


def test_table_of_generation_by_case(translated: Path) -> None:
    text = squeezed(translated / "README.md")
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `t2t_big/btokens/beam5/bf16` | 6001 | 2000 | 400 | 15.0 | 8.0, 20.5 | 3.2 |",
        "| `t2t_big/b1/beam4/bf16` | 120 | | | | 8.0, 20.5 | 3.2 |",
    ]


def lines_of(tree: Path, table: str, file: str, rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the cases in a table whose result file has these rows."""
    path = tree / "scripts/results" / file
    path.parent.mkdir()
    path.write_text(json.dumps(rows))
    (tree / "README.md").write_text(f"<!-- table: {table} -->\n<!-- end -->\n")
    assert tables(tree).returncode == tables(tree, "--check").returncode == 0
    text = squeezed(tree / "README.md")
    return [line for line in text.splitlines() if line.startswith("| `")]


def test_table_of_text(tree: Path) -> None:
    about = {"commit": "0123456789abcdef", "gpu": "GPU X", "torch": "2.11"}
    rows = [
        {**about, "case": "gpt2_124m/b1/128+256/bf16", "system": system, "tokens_per_s": speed,
         "sentences_per_s": speed / 256, "decode_s": 256 / speed, "p50_ms": 8.04, "p99_ms": 20.5,
         "peak_gib": 3.25}
        for system, speed in (("fairseq_no_cudnn", 100), ("ours", 2500), ("transformers", 1000))
    ]  # fmt: skip
    assert lines_of(tree, "generate_text", "generate-text-h200.json", rows) == [
        "| `gpt2_124m/b1/128+256/bf16` | `lightseq-generate` | 2500 | 25.0 | 8.0, 20.5 | 3.2 |",
        "| `gpt2_124m/b1/128+256/bf16` | transformers, static cache, compiled | 1000 | 10.0 | "
        "8.0, 20.5 | 3.2 |",
        "| `gpt2_124m/b1/128+256/bf16` | fairseq, cuDNN attention off | 100 | 1.0 | 8.0, 20.5 | "
        "3.2 |",
    ]


def test_table_of_features(tree: Path) -> None:
    about = {"commit": "0123456789abcdef", "gpu": "GPU X", "torch": "2.11", "max_tokens": 4096}
    case = "roberta_base/btokens/features/bf16"
    rows = [
        {**about, "case": case, "system": system, "sentences_per_s": speed, "decode_s": 1 / speed,
         "p50_ms": 8.04, "p99_ms": 20.5, "peak_gib": 3.25}
        for system, speed in (("fairseq_no_cudnn", 100.4), ("ours", 401.6), ("transformers", 200))
    ]  # fmt: skip
    assert lines_of(tree, "generate_features", "generate-features-h200.json", rows) == [
        f"| `{case}` | `lightseq_fairseq.RobertaModel` | 402 | 4.0 | 8.0, 20.5 | 3.2 |",
        f"| `{case}` | transformers, compiled | 200 | 2.0 | 8.0, 20.5 | 3.2 |",
        f"| `{case}` | fairseq, cuDNN attention off | 100 | 1.0 | 8.0, 20.5 | 3.2 |",
    ]
    assert "(`btokens`: at most 4096 tokens, pads included)" in squeezed(tree / "README.md")


def test_plot_of_generation(translated: Path) -> None:
    found = words(translated / GENERATE_PLOT)
    assert {"Transformer big, 4096 tokens at once, beam 5, bf16", "6001", "2000", "120"} <= found
    assert {"Transformer big, 1 sentence at once, beam 4, bf16", "CTranslate2"} <= found


TRANSLATION = "scripts/results/translation-h200.json"


@pytest.fixture
def alike(tree: Path) -> Path:
    """Two cases, one of them with a difference, and validations by both systems."""
    about = {"commit": "0123456789abcdef", "gpu": "GPU X", "torch": "2.11"}
    score = {"system": "ours", "signature": "nrefs:1", "bleu": 39.31, "fairseq_bleu": 39.4}
    rows = [
        {**about, **score, "case": case, "flags": flags, "sentences": 1000, "hypotheses": 1000,
         "identical_share": share, "greatest_score_difference": 1.4e-6, "differences": [],
         "greatest_gap_of_a_difference": gap}
        for case, flags, share, gap in (
            ("lenpen-0.6/fp32", "--beam 4 --lenpen 0.6", 1.0, None),
            ("beam-5/fp16", "--beam 5 --fp16", 0.985, 0.0012),
        )
    ] + [
        {**about, "case": "eval_bleu/fp32", "system": system, "updates": 300, "bleu": 38.0,
         "s_per_validation": seconds, "validation_s": [9.0, seconds, seconds]}
        for system, seconds in (("fairseq_no_cudnn", 4.0), ("ours", 0.5))
    ]  # fmt: skip
    (tree / TRANSLATION).parent.mkdir()
    (tree / TRANSLATION).write_text(json.dumps(rows))
    (tree / "README.md").write_text("<!-- table: translation -->\n<!-- end -->\n")
    return tree


def test_table_of_translation(alike: Path) -> None:
    assert tables(alike).returncode == tables(alike, "--check").returncode == 0
    text = squeezed(alike / "README.md")
    assert [line for line in text.splitlines() if line.startswith("| `")] == [
        "| `--beam 4 --lenpen 0.6` | fp32 | 1000 | 100.0% | 1e-06 | | 39.31 | 39.40 |",
        "| `--beam 5` | fp16 | 1000 | 98.5% | 1e-06 | 1e-03 | 39.31 | 39.40 |",
    ]
    assert "GPU X; torch 2.11; commit 0123456789; same flags" in text
    assert "0.50 s, fairseq 4.00 s, 8.0 times as long (median of 2 after the first," in text
    assert "; all 3: 10.0 s, fairseq 17.0 s, 1.7 times as long)." in text


@pytest.mark.parametrize("timed", [False, True])
def test_half_of_the_table_of_translation(alike: Path, timed: bool) -> None:
    rows = json.loads((alike / TRANSLATION).read_text())
    (alike / TRANSLATION).write_text(json.dumps([r for r in rows if timed == ("updates" in r)]))
    assert tables(alike).returncode == 0
    text = squeezed(alike / "README.md")
    assert ("| flags |" in text, "a validation with" in text) == (not timed, timed)
    assert "commit 0123456789; " in text


def test_overview_has_a_column_for_each_system(tree: Path) -> None:
    about = {"gpu": "GPU X", "torch": "2.11"}
    generate = [
        {**about, "case": "t2t_big/b1/beam4/bf16", "system": system, "sentences_per_s": speed,
         "peak_gib": 2.0}
        for system, speed in (("ours", 120), ("fairseq_no_cudnn", 3), ("ctranslate2", 20))
    ]  # fmt: skip
    same = [{**about, "case": "beam-5/fp32", "bleu": 39.31, "fairseq_bleu": 39.4}]
    parts = train_rows(), generate, convergence_rows(), same
    lines = overview_table(*parts)
    (tree / "README.md").write_text("\n".join(lines))
    found = [line for line in squeezed(tree / "README.md").splitlines() if line.startswith("| ")]
    assert [found[1], found[3], *found[7:]] == [
        "| training big, 4096 (tokens/s) | 320k, 9.2 GiB | 80k, 9.2 GiB | 4.0 | | |",
        "| training base, 4096 (tokens/s) | 700k, 9.2 GiB | | | | |",
        "| translating, batch size 1 (sentences/s) | 120, 2.0 GiB | 3.0, 2.0 GiB | 40.0 | | "
        "20, 2.0 GiB |",
        "| BLEU, separately trained models | 39.25 | 39.40 | | | |",
        "| BLEU, both with the same checkpoint | 39.31 | 39.40 | | | |",
    ]
    assert lines[-1] == "GPU X; torch 2.11."
