"""The documents' tables and the plots agree with the result files.

A folder in tests/bench/tables has result files and the documents that `python -m scripts.tables`
writes from them: `full` has rows of all kinds, `small` lacks those that a sentence depends on.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers import forked_commands

from scripts import plots

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "tables"
OPS_PLOT, TRAIN_PLOT, GENERATE_PLOT, GPUS_PLOT, OVERVIEW = (
    f"scripts/results/{name}-h200.svg"
    for name in ("ops", "train", "generate", "train-gpus", "overview")
)
CURVES, OVERLAP = "docs/convergence.svg", "docs/overlap.svg"
MEASURED = "docs/measured.md"


def tables(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [forked_commands.python(), "-m", "scripts.tables", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True)


def copied(name: str, tree: Path) -> Path:
    """Copy a folder of tests/bench/tables, and add the tables' code."""
    shutil.copytree(GOLDEN / name, tree, dirs_exist_ok=True)
    for code in (*ROOT.glob("scripts/*.py"), *ROOT.glob("examples/*.py")):
        (tree / code.relative_to(ROOT).parent).mkdir(exist_ok=True)
        shutil.copy(code, tree / code.relative_to(ROOT))
    return tree


def written(name: str, tree: Path) -> Path:
    """The same without the contents of its tables, which are then written, as are its plots."""
    copied(name, tree)
    for page in tree.rglob("*.md"):
        text = page.read_text()
        empty = re.sub(r"(<!-- table: \w+ -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.DOTALL)
        page.write_text(empty)
    done = tables(tree)
    assert done.returncode == 0, done.stderr
    return tree


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return copied("small", tmp_path)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("full", tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def small_written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("small", tmp_path_factory.mktemp("small"))


@pytest.fixture
def own(small_written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(small_written, tmp_path, dirs_exist_ok=True))


def words(picture: Path) -> set[str | None]:
    """All words of the text."""
    elements = ElementTree.parse(picture).getroot().iter()
    return {element.text for element in elements if element.tag.endswith("text")}


def test_tables_are_those_of_the_golden_documents(full: Path, small_written: Path) -> None:
    """If a difference is intended, the documents in the temporary folder are the new ones."""
    for tree, name in ((full, "full"), (small_written, "small")):
        assert tables(tree, "--check").returncode == 0
        pages = [page.relative_to(tree) for page in tree.rglob("*.md")]
        assert len(pages) > 1
        for page in pages:
            assert (tree / page).read_text() == (GOLDEN / name / page).read_text(), tree / page


def test_no_results_no_table(small: Path) -> None:
    for results in small.rglob("*.json"):
        results.unlink()
    (small / "README.md").write_text("Nothing was measured.\n")
    assert tables(small).returncode == tables(small, "--check").returncode == 0
    assert (small / "README.md").read_text() == "Nothing was measured.\n"
    assert not (small / OPS_PLOT).exists()


def test_results_want_a_table(small: Path) -> None:
    (small / MEASURED).write_text("Nothing was measured.\n")
    done = tables(small)
    assert done.returncode != 0 and "have no place for the tables ops, attention" in done.stderr


@pytest.mark.parametrize("stale", [MEASURED, OPS_PLOT])
def test_check_finds_what_is_stale(own: Path, stale: str) -> None:
    old = (own / stale).read_text().replace("80%", "81%")
    (own / stale).write_text(old)
    done = tables(own, "--check")
    assert done.returncode != 0 and f"{stale} differs from its result file" in done.stderr
    assert (own / stale).read_text() == old
    assert tables(own).returncode == tables(own, "--check").returncode == 0


def test_check_asks_for_what_a_plot_shows_and_not_for_its_bytes(own: Path) -> None:
    plot = own / OPS_PLOT
    drawn = plot.read_text()
    assert plots.OURS in drawn.split("</metadata>")[1]
    plot.write_text(drawn.replace('width="', 'height-of-nothing="1" width="'))
    assert tables(own, "--check").returncode == 0
    plot.write_text("no picture")
    assert tables(own, "--check").returncode != 0
    tables(own)
    assert plot.read_text() == drawn  # the same bytes again


@pytest.mark.parametrize("plot", [OPS_PLOT, CURVES])
def test_check_wants_the_plots(own: Path, plot: str) -> None:
    (own / plot).unlink()
    done = tables(own, "--check")
    assert done.returncode != 0 and f"{plot} differs" in done.stderr


def test_plot_of_ops_shows_what_is_bound_by_memory(full: Path) -> None:
    """Casts are bound by memory, products are not."""
    found = words(full / OPS_PLOT)
    ops = {"embedding, forward", "Adam: update"}
    assert {*ops, "80%", "lightseq-fairseq", "torch.compile"} <= found
    assert not any(word and "linear" in word for word in found)
    assert {word for word in found if word and "fp8" in word} == {
        "fp8: cast (4096 columns)", "fp8: cast of all weights",
        "fp8: dropout + residual + LayerNorm, backward",
    }  # fmt: skip


def test_plot_of_training(full: Path) -> None:
    """It has the cases of one GPU that another system ran; ours in fp8 is beside bf16."""
    found = words(full / TRAIN_PLOT)
    assert {"Training speed, bf16, GPU X", "320k", "80k", "400k"} <= found and "700k" not in found
    assert {"lightseq-train", "lightseq-train --fp8", "fairseq, cuDNN attention off"} <= found
    panels = plots.shown(full / TRAIN_PLOT)["panels"]
    assert list(panels) == ["Translation models", "Language models", "RoBERTa"]
    assert panels["Translation models"] == {
        "Transformer big, 4096 tokens": {
            "lightseq-train --fp8": [1.0, "400k"],
            "lightseq-train --pack-tokens": [330_000 / 400_500, "330k"],
            "lightseq-train": [0.8, "320k"],
            "fairseq, cuDNN attention off": [0.2, "80k"],
            "fairseq as it comes": [24_000 / 400_500, "24k"],
        }
    }
    assert {
        "GPT-2 124M, 32 x 1024 tokens",
        "RoBERTa large, 8192 tokens in BERT's mix of lengths",
        "RoBERTa large, 32 sentences",
    } <= found


def test_plot_of_several_gpus(full: Path, small_written: Path) -> None:
    """It has the models with a row of one GPU and of two."""
    assert not (small_written / GPUS_PLOT).exists()
    assert plots.shown(full / GPUS_PLOT)["panels"][""] == {
        "Transformer base, 4096 tokens, bf16": {
            "1 GPU": [1.0, "700k, 1.00 x"],
            "2 GPUs": [320_400 / 1_400_000, "320k, 0.46 x"],
        }
    }


def test_plot_of_the_overview(full: Path, small_written: Path) -> None:
    """It has the cases with a row of ours, of a compiled system and of fairseq."""
    assert not (small_written / OVERVIEW).exists()
    assert plots.shown(full / OVERVIEW)["panels"][""] == {
        "translate\n(Transformer big, beam 4)": {
            "lightseq-fairseq": [1.0, "120 sentences/s, 40.0 times fairseq"],
            "fastest compiled system": [20 / 120, "20"],
            "fairseq": [3 / 120, "3.0"],
        }
    }


def test_plot_of_overlap(full: Path, small_written: Path) -> None:
    """It exists if one of our rows of Transformer big on several GPUs has its overlap."""
    assert not (small_written / OVERLAP).exists()
    (panel,) = plots.shown(full / OVERLAP)["panels"].items()
    assert panel[1] == {"computation": [[0, 9.5]], "collectives": [[7, 11]]}
    assert "2 GPUs" in panel[0] and "25% of the collectives' time is hidden" in panel[0]
    assert {"computation", "collectives", "ms"} <= words(full / OVERLAP)


def test_plot_of_convergence(full: Path) -> None:
    found = words(full / CURVES)
    assert {"lightseq-train: validation", "updates", "seconds"} <= found
    panels: list[dict[str, Any]] = plots.shown(full / CURVES)["panels"]
    # Two runs of each system; training and validation of the big one. Very large losses are left
    # out, and so is the third run of ours, whose seed fairseq has not trained.
    assert [[len(points) for _, points in panel["curves"]] for panel in panels] == [
        [2] * 4,
        [2] * 8,
    ]


def test_plot_of_generation(full: Path) -> None:
    found = words(full / GENERATE_PLOT)
    assert {"Transformer big", "4096 tokens at once, beam 5", "6001", "2000", "120"} <= found
    assert {"1 sentence at once, beam 4", "CTranslate2"} <= found


def test_plot_of_the_quickstart(full: Path) -> None:
    plot = plots.shown(full / "examples/quickstart/results/curves.svg")
    assert plot["title"] == "numbers, two CPU cores, seed 1"
    losses, bleu = (panel["curves"] for panel in plot["panels"])
    assert losses == [["training", [[150, 5.5], [300, 2.5]]], ["validation", [[300, 2.25]]]]
    assert bleu == [["validation", [[300, 97.5]]]]


def test_translation_without_times(small: Path) -> None:
    """`small` has the times alone."""
    results = "scripts/results/translation-h200.json"
    rows = json.loads((GOLDEN / "full" / results).read_text())
    (small / results).write_text(json.dumps([row for row in rows if "updates" not in row]))
    assert tables(small).returncode == 0
    text = (small / MEASURED).read_text()
    assert "| flags " in text and "A validation with" not in text
