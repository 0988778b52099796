"""Writes the tables of measured figures into the README, from the result files.

    python scripts/tables.py [--check]

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. ``--check`` writes nothing and
fails when a table differs from what its file gives.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SYSTEMS = {"lightseq": "`lightseq-train`", "fairseq": "fairseq (same flags, `--native`)"}


def bleu_table(rows: list[dict[str, Any]]) -> list[str]:
    """BLEU, updates and training time of each run; machine and signature below."""
    lines = ["| system | seed | BLEU | updates | training |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["seed"], row["system"] != "lightseq")):
        lines.append(
            f"| {SYSTEMS[row['system']]} | {row['seed']} | {row['bleu']:.2f} | {row['updates']} | "
            f"{row['train_seconds']:.0f} s |"
        )
    common = {key: sorted({str(row[key]) for row in rows}) for key in ("gpu", "torch", "signature")}
    commits = sorted({row["commit"][:10] for row in rows})
    gpus = ["two CPU cores" if gpu == "none" else gpu for gpu in common["gpu"]]
    return [
        *lines,
        "",
        f"{', '.join(gpus)}; torch {', '.join(common['torch'])}; commit {', '.join(commits)}; "
        f"sacrebleu `{'`, `'.join(common['signature'])}`.",
    ]


TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], list[str]]]] = {
    "quickstart": ("examples/quickstart/results/bleu.json", bleu_table),
    "multi30k": ("examples/multi30k/results/bleu.json", bleu_table),
}


def filled(text: str) -> str:
    """``text`` with every table made anew."""

    def table(match: re.Match[str]) -> str:
        path, render = TABLES[match[1]]
        rows = json.loads((ROOT / path).read_text(encoding="utf-8"))
        return "\n".join([f"<!-- table: {match[1]} -->", *render(rows), "<!-- end -->"])

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail instead of writing")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    new = filled(text)
    missing = [name for name in TABLES if f"<!-- table: {name} -->" not in text]
    if missing:
        sys.exit(f"README.md has no place for the tables {', '.join(missing)}")
    if check and new != text:
        sys.exit("README.md's tables differ from the result files: run python scripts/tables.py")
    if not check:
        README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
