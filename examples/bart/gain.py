"""Print and draw BLEU over the number of sentence pairs, with and without pre-training.

python -m examples.bart.gain BLEU.json PLOT.svg --size cpu|gpu
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.plots import FAIRSEQ, FAIRSEQ_PALE, OURS, OURS_PALE, Curves, Panel, draw

# (system, begin) -> colour
COLOURS = {
    ("lightseq", "pre-trained"): OURS,
    ("lightseq", "scratch"): OURS_PALE,
    ("fairseq", "pre-trained"): FAIRSEQ,
    ("fairseq", "scratch"): FAIRSEQ_PALE,
}
Points = dict[tuple[str, str], list[tuple[float, float]]]


def points(rows: list[dict[str, Any]], size: str) -> Points:
    """Return the points (thousands of pairs, BLEU, the mean of all seeds) of each curve."""
    scores: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if f", {size}, " in row["case"]:
            scores[row["system"], row["begin"]][row["pairs"]].append(row["bleu"])
    return {
        curve: [(pairs / 1000, mean(found)) for pairs, found in sorted(scores[curve].items())]
        for curve in COLOURS
        if curve in scores
    }


def picture(found: Points, size: str) -> Curves:
    """Return the plot."""
    named = {f"{system}, {begin}": curve for (system, begin), curve in found.items()}
    colours = {f"{system}, {begin}": COLOURS[system, begin] for system, begin in found}
    top = max(1.0, 1.2 * max(bleu for curve in found.values() for _, bleu in curve))
    panel = Panel("", "thousand sentence pairs", "BLEU", (0, top), list(named.items()))
    return Curves(f"Multi30k, German to English, {size}", colours, [panel])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="bleu.json that run.sh wrote")
    parser.add_argument("svg", type=Path, help="file to write")
    parser.add_argument("--size", choices=["cpu", "gpu"], required=True)
    args = parser.parse_args()
    found = points(json.loads(args.rows.read_text(encoding="utf-8")), args.size)
    for (system, begin), curve in found.items():
        scores = ", ".join(f"{1000 * pairs:.0f} pairs: {bleu:.1f}" for pairs, bleu in curve)
        print(f"{system}, {begin}: BLEU of {scores}")
    draw(picture(found, args.size), args.svg)


if __name__ == "__main__":
    main()
