"""Draw the loss and BLEU curves of a training log (``--log-format json``) as one SVG file."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# A fixed salt and no date: the same log gives the same file, byte for byte.
matplotlib.rcParams["svg.hashsalt"] = "lightseq_fairseq"

import matplotlib.pyplot as plt  # noqa: E402  (the backend is chosen first)

Curve = dict[int, float]  # number of updates -> value

# fairseq logs a batch's figures as `... | train_inner | {"epoch": 1, ...}` and a validation's as
# `... | valid | {...}`; other log lines hold braces too, but no quoted first key after this bar.
RECORD = re.compile(r"\| (train_inner|valid) \| (\{\".*\})\s*$")


def read_records(log: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the records of a log in order: ``train_inner`` or ``valid``, fairseq's figures."""
    for line in log.read_text(encoding="utf-8").splitlines():
        match = RECORD.search(line)
        if match is not None:
            yield match.group(1), json.loads(match.group(2))


def read_curves(log: Path) -> dict[str, Curve]:
    """Read ``train_loss``, ``valid_loss`` and, where it was logged, ``valid_bleu``.

    The losses are in bits a target token and include the label smoothing. An update that the log
    holds twice, because the run was resumed, keeps its last value.
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


def draw(curves: dict[str, Curve], title: str, svg: Path) -> None:
    """Draw both losses over the updates and, on an axis of its own, BLEU."""
    figure, loss_axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, colour in (("train_loss", "tab:blue"), ("valid_loss", "tab:cyan")):
        curve = curves[name]
        loss_axis.plot(list(curve), list(curve.values()), color=colour, label=name)
    loss_axis.set(title=title, xlabel="updates", ylabel="loss (bits a target token)")
    loss_axis.set_ylim(bottom=0)
    bleu = curves["valid_bleu"]
    if bleu:
        bleu_axis = loss_axis.twinx()
        bleu_axis.plot(list(bleu), list(bleu.values()), "o-", color="tab:red", label="valid_bleu")
        bleu_axis.set(ylabel="BLEU (valid, greedy)", ylim=(0, 100))
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(svg, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="what the training command printed")
    parser.add_argument("svg", type=Path, help="the file to write")
    parser.add_argument("--title", default="", help="title of the plot")
    args = parser.parse_args()
    curves = read_curves(args.log)
    if not curves["train_loss"]:
        raise SystemExit(f"{args.log} holds no training figures; train with --log-format json")
    draw(curves, args.title, args.svg)


if __name__ == "__main__":
    main()
