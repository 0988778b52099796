"""Draw the loss and BLEU curves of a training log (``--log-format json``) as one SVG file."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.plots import OURS, OURS_PALE, Curves, Panel, draw

Curve = dict[int, float]  # number of updates -> value

# fairseq logs training as `... | train_inner | {"epoch": 1, ...}` and validation as
# `... | valid | {...}`. Other log lines may contain braces, but not after these words and bars.
RECORD = re.compile(r"\| (train_inner|valid) \| (\{\".*\})\s*$")


def read_records(log: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of a log in order: ("train_inner" or "valid", fairseq's figures)."""
    for line in log.read_text(encoding="utf-8").splitlines():
        match = RECORD.search(line)
        if match is not None:
            yield match.group(1), json.loads(match.group(2))


def read_curves(log: Path) -> dict[str, Curve]:
    """Read the curves ``train_loss``, ``valid_loss`` and ``valid_bleu`` (empty if not logged).

    Losses are in bits per target token and include label smoothing. If an update is logged twice,
    because the run was resumed, its last value counts.
    """
    curves: dict[str, Curve] = {"train_loss": {}, "valid_loss": {}, "valid_bleu": {}}
    for kind, record in read_records(log):
        if kind == "train_inner":
            curves["train_loss"][int(record["num_updates"])] = float(record["loss"])
            continue
        for name in ("valid_loss", "valid_bleu"):
            if name in record:
                curves[name][int(record["valid_num_updates"])] = float(record[name])
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def picture(curves: dict[str, Curve], title: str) -> Curves:
    """Return the plot of both losses over the updates and, if it was logged, BLEU."""
    losses = [("training", list(curves["train_loss"].items())),
              ("validation", list(curves["valid_loss"].items()))]  # fmt: skip
    most = max(loss for _, points in losses for _, loss in points)
    panels = [Panel("", "updates", "loss, bits per target token", (0, most), losses)]
    colours = {"training": OURS_PALE, "validation": OURS}
    if curves["valid_bleu"]:
        bleu = [("validation", list(curves["valid_bleu"].items()))]
        panels.append(Panel("", "updates", "BLEU by greedy search", (0, 100), bleu))
    return Curves(title, colours, panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="output of the training command")
    parser.add_argument("svg", type=Path, help="file to write")
    parser.add_argument("--title", default="", help="title of the plot")
    args = parser.parse_args()
    curves = read_curves(args.log)
    if not curves["train_loss"]:
        raise SystemExit(f"{args.log} has no training records; train with --log-format json")
    draw(picture(curves, args.title), args.svg)


if __name__ == "__main__":
    main()
