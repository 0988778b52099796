"""Write the tables of measurements into the documents, and the plots, from the result files.

    python -m scripts.tables [--check]

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->`` in one of ``DOCUMENTS``. ``TABLES``
lists their result files. A table whose result files are missing is not changed. ``--check`` writes
nothing, and fails if a table or the content of a plot does not agree with its result files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from examples import curves
from lightseq_fairseq.base.result_rows import table

from . import plots
from .convergence_tables import convergence_plot, convergence_table, precision_table
from .generate_tables import (
    GENERATE_PLOT,
    generate_by_case,
    generate_features,
    generate_plot,
    generate_table,
    generate_text,
    generate_trained,
)
from .hugging_face_tables import hugging_face_table
from .op_tables import OPS_PLOT, attention_table, op_plot, op_table
from .overview_table import OVERVIEW_PLOT, overview_plot, overview_table
from .plots import Picture
from .sources import machine, sourced_table
from .train_tables import (
    TRAIN_PLOT,
    fp8_table,
    overlap_plot,
    several_gpus_plot,
    train_by_case,
    train_plot,
    train_table,
)
from .translation_tables import translation_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md", "docs/measured.md", "examples/language_model/README.md",
    "examples/roberta/README.md",
)  # fmt: skip
CONVERGENCE = "scripts/results/convergence-h200.json"
SYSTEMS = {"lightseq": "`lightseq-train`", "fairseq": "fairseq (same flags, `--native`)"}


def bleu_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of BLEU and updates of each run."""
    cells = {
        "BLEU": lambda row: f"{row['bleu']:.2f}",
        "updates": lambda row: str(row["updates"]),
    }
    signatures = sorted({row["signature"] for row in rows})
    return runs_table(rows, cells, f"sacrebleu `{'`, `'.join(signatures)}`")


def bleu_plot(rows: list[dict[str, Any]]) -> Picture | None:
    """Return the plot of the curves of the first run that has them."""
    for row in rows:
        if "curves" in row:
            found = {name: dict(points) for name, points in row["curves"].items()}
            return curves.picture(found, f"{row['case']}, {machine(row)}, seed {row['seed']}")
    return None


def perplexity_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of test perplexity and updates of each run."""
    cells = {
        "test perplexity": lambda row: f"{row['perplexity']:.2f}",
        "bits a token": lambda row: f"{row['bits_per_token']:.3f}",
        "updates": lambda row: str(row["updates"]),
    }
    versions = sorted({row["python"] for row in rows})
    return runs_table(rows, cells, f"standard library of Python {', '.join(versions)}")


def accuracy_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of test accuracy and updates of each run, and the means over seeds."""
    cells = {
        "test accuracy": lambda row: f"{row['accuracy']:.1f}%",
        "updates of pre-training": lambda row: str(row["pretraining_updates"]),
        "of fine-tuning": lambda row: str(row["updates"]),
    }
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["case"], row["system"]), []).append(row["accuracy"])
    means = [
        f"{case}, {SYSTEMS[system]}: mean of {len(its)} seeds {sum(its) / len(its):.1f}%"
        for (case, system), its in found.items()
        if len(its) > 1
    ]
    return runs_table(rows, cells, "; ".join(means or ["one seed for each system"]))


def runs_table(
    rows: list[dict[str, Any]], cells: dict[str, Callable[[dict[str, Any]], str]], about: str
) -> list[str]:
    """Return a table with a line for each run of an example, and a sentence with its conditions.

    If the runs are from several machines, a column names the machine.

    Args:
        cells: head of a column -> the function that makes a cell of a row.
        about: a condition that is not in every row; the sentence ends with it.
    """
    ordered = sorted(rows, key=lambda row: (row["case"], row["seed"], row["system"] != "lightseq"))
    if len({machine(row) for row in rows}) > 1:
        cells = {"machine": machine, **cells}
    lines = [
        ([SYSTEMS[row["system"]], str(row["seed"]), *(cell(row) for cell in cells.values())], [row])
        for row in ordered
    ]
    return sourced_table(["system", "seed", *cells], lines, 1, about)


def check_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the checks of gpu_check.sh: numbers of tests, and what they found."""
    lines = []
    for row in rows:
        found = "; ".join(row.get("summary", []))
        failures = row["failures"] + row["errors"]
        cells = row["case"], row["tests"], failures, row["skipped"], found
        gpu = row["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
        lines.append([*map(str, cells), gpu, row["commit"][:10]])
    head = ["check", "tests", "failures", "skipped", "found", "GPU", "commit"]
    return [
        *table(head, lines, 1, "pipe"),
        "",
        f"torch {', '.join(sorted({r['torch'] for r in rows}))}.",
    ]


TRAIN, GENERATE = "scripts/results/train-h200.json", "scripts/results/generate-h200.json"
GENERATE_TEXT = "scripts/results/generate-text-h200.json"
TRANSLATION = "scripts/results/translation-h200.json"
QUICKSTART = "examples/quickstart/results/bleu.json"
# name of a table -> its result files, and the function that makes the table from their rows
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., list[str]]]] = {
    "overview": ((TRAIN, GENERATE, CONVERGENCE, TRANSLATION), overview_table),
    "quickstart": ((QUICKSTART,), bleu_table),
    "language_model": (("examples/language_model/results/perplexity.json",), perplexity_table),
    "roberta": (("examples/roberta/results/accuracy.json",), accuracy_table),
    "ops": (("scripts/results/ops-h200.json",), op_table),
    "attention": (("scripts/results/ops-h200.json",), attention_table),
    "train": ((TRAIN,), train_table),
    "train_by_case": ((TRAIN,), train_by_case),
    "fp8": ((TRAIN,), fp8_table),
    "generate": ((GENERATE,), generate_table),
    "generate_by_case": ((GENERATE,), generate_by_case),
    "generate_text": ((GENERATE_TEXT,), generate_text),
    "generate_trained": (("scripts/results/generate-trained-h200.json",), generate_trained),
    "generate_features": (("scripts/results/generate-features-h200.json",), generate_features),
    "huggingface": (("scripts/results/huggingface-h200.json",), hugging_face_table),
    "convergence": ((CONVERGENCE,), convergence_table),
    "precisions": (("scripts/results/precisions-h200.json",), precision_table),
    "translation": ((TRANSLATION,), translation_table),
    "gpu_check": (("scripts/results/gpu-check.json",), check_table),
}
PLOTS: dict[str, tuple[tuple[str, ...], Callable[..., Picture | None]]] = {
    OVERVIEW_PLOT: ((TRAIN, GENERATE, GENERATE_TEXT), overview_plot),
    OPS_PLOT: (("scripts/results/ops-h200.json",), op_plot),
    TRAIN_PLOT: ((TRAIN,), train_plot),
    "scripts/results/train-gpus-h200.svg": ((TRAIN,), several_gpus_plot),
    "docs/overlap.svg": ((TRAIN,), overlap_plot),
    GENERATE_PLOT: ((GENERATE,), generate_plot),
    "docs/convergence.svg": ((CONVERGENCE,), convergence_plot),
    "examples/quickstart/results/curves.svg": ((QUICKSTART,), bleu_plot),
}


def filled(text: str) -> str:
    """Return ``text`` with every table rewritten."""

    def table(match: re.Match[str]) -> str:
        paths, render = TABLES[match[1]]
        if not all((ROOT / path).exists() for path in paths):
            return match[0]
        lines = render(*map(rows_of, paths))
        return "\n".join([f"<!-- table: {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def rows_of(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a table or plot is out of date"
    )
    check = parser.parse_args().check
    documents = [ROOT / name for name in DOCUMENTS if (ROOT / name).exists()]
    texts = {document: document.read_text(encoding="utf-8") for document in documents}
    measured = [
        name for name, (paths, _) in TABLES.items() if all((ROOT / path).exists() for path in paths)
    ]
    places = "".join(texts.values())
    missing = [name for name in measured if f"<!-- table: {name} -->" not in places]
    if missing:
        sys.exit(f"{' and '.join(DOCUMENTS)} have no place for the tables {', '.join(missing)}")

    for document, text in texts.items():
        if not check:
            document.write_text(filled(text), encoding="utf-8")
        elif text != filled(text):
            stale(document)
    for name, (paths, picture_of) in PLOTS.items():
        if all((ROOT / path).exists() for path in paths):
            picture = picture_of(*map(rows_of, paths))
            if picture is None:
                continue
            if not check:
                plots.draw(picture, ROOT / name)
            elif not plots.is_drawn(picture, ROOT / name):
                stale(ROOT / name)


def stale(file: Path) -> NoReturn:
    sys.exit(f"{file.relative_to(ROOT)} differs from its result file: run python -m scripts.tables")


if __name__ == "__main__":
    main()
