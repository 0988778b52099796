"""The tables and the plot of the results of examples/multi30k/convergence.py, for tables.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import mean, variance
from typing import Any

from .plots import FAIRSEQ, OURS, OURS_PALE, Curves, Panel, gpus
from .sources import sourced_table

Rows = list[dict[str, Any]]

MODELS = {
    "small": "4+4 layers of width 128",
    "t2t_big": "Transformer big: 6+6 layers of width 1024",
}
# system -> its name, colour of its validation losses, and a paler colour of its training losses
SYSTEMS = {
    "lightseq": ("`lightseq-train`", OURS, OURS_PALE),
    "fairseq": ("fairseq, cuDNN attention off", "#000000", FAIRSEQ),
}


def of_all_systems(rows: Rows) -> Rows:
    """Return the rows of seeds that each system of their case has trained.

    Runs of a seed end at different times: until all have ended, the means would be of other seeds.
    """
    trained = {(row["case"], row["updates"], row["system"], row["seed"]) for row in rows}
    systems = {(case, system) for case, _, system, _ in trained}
    return [
        row for row in rows
        if all((case, row["updates"], system, row["seed"]) in trained
               for case, system in systems if case == row["case"])
    ]  # fmt: skip


def cases(rows: Rows) -> Iterator[tuple[str, dict[str, Rows]]]:
    """Yield each case, once for each number of updates, with its rows by system, ours first."""
    rows = of_all_systems(rows)
    for case, updates in sorted({(row["case"], row["updates"]) for row in rows}):
        its = [row for row in rows if (row["case"], row["updates"]) == (case, updates)]
        systems = {system: [row for row in its if row["system"] == system] for system in SYSTEMS}
        yield case, {system: its for system, its in systems.items() if its}


def level(rows: Iterable[dict[str, Any]]) -> float:
    """Return a validation loss that every run reaches: 1% above the worst run's best loss."""
    return 1.01 * max(min(loss for _, _, loss in row["valid_curve"]) for row in rows)


def convergence_table(rows: Rows) -> list[str]:
    """Return the table of BLEU, last validation loss and training time of each model and system."""
    lines = []
    for case, systems in cases(rows):
        model, _, precision = case.partition("/")
        goal = level(row for its in systems.values() for row in its)
        for system, its in systems.items():
            reached = [
                next(point for point in row["valid_curve"] if point[2] <= goal) for row in its
            ]
            cells = [
                f"{MODELS[model]}, {precision}",
                SYSTEMS[system][0],
                str(len(its)),
                _range([row["updates"] for row in its], 0),
                "" if its[0]["bleu"] is None else _range([row["bleu"] for row in its], 2),
                _range([row["valid_loss"] for row in its], 3),
                _range([row["seconds"] for row in its], 0, " s"),
                f"{goal:.2f}: {mean(point[1] for point in reached):.0f} s, "
                f"{mean(point[0] for point in reached):.0f} updates",
            ]
            lines.append((cells, its))
    head = ["model", "system", "seeds", "updates", "BLEU", "last validation loss",
            "training time", "time to a validation loss of"]  # fmt: skip
    company = "; ".join(
        f"{MODELS[model]}, {_company([row for row in rows if row['case'].startswith(f'{model}/')])}"
        for model in sorted({row["case"].partition("/")[0] for row in rows})
    )
    return sourced_table(
        head, lines, 2,
        f"{_circumstances(rows)}; times are wall times of training with its validations. Several "
        f"runs shared the GPU ({company}), so compare times only between the two systems of the "
        "same model",
    )  # fmt: skip


def precision_table(rows: Rows) -> list[str]:
    """Return the table that compares the precisions of a model, and each with bf16."""
    lines = []
    for case, systems in cases(rows):
        model, _, precision = case.partition("/")
        its = systems["lightseq"]
        base = [row for row in rows if row["case"] == f"{model}/bf16"]
        has_bleu = its[0]["bleu"] is not None
        cells = [f"{MODELS[model]}, {precision}", str(len(its)), _range(_of(its, "updates"), 0)]
        for key, digits, exists in (("bleu", 2, has_bleu), ("valid_loss", 3, True)):
            ours, others = _of(its, key), _of(base, key)
            cells.append(_range(ours, digits) if exists else "")
            is_compared = exists and precision != "bf16"
            cells.append(_difference(ours, others, digits) if is_compared else "")
        lines.append((cells, its))
    head = ["model", "seeds", "updates", "BLEU", "less that of bf16", "last validation loss",
            "less that of bf16"]  # fmt: skip
    about = f"{_circumstances(rows)}; differences of means, with standard errors"
    return sourced_table(head, lines, 1, about)


def _of(rows: Rows, key: str) -> list[float]:
    return [row[key] for row in rows]


def _difference(ours: list[float], others: list[float], digits: int) -> str:
    """Return the difference of the means, with its standard error if there are several values."""
    text = f"{mean(ours) - mean(others):+.{digits}f}"
    if min(len(ours), len(others)) < 2:
        return text
    error = math.sqrt(sum(variance(values) / len(values) for values in (ours, others)))
    return f"{text} ± {error:.{digits}f}"


def _circumstances(rows: Rows) -> str:
    """Return the part of the notes that the tables share."""
    signatures = sorted({f"sacrebleu `{row['signature']}`" for row in rows if row["bleu"]})
    scored = (
        "BLEU: test_2016_flickr, translated after training with the average of a run's last "
        f"checkpoints ({', '.join(signatures)}); "
    )
    return (
        f"means over the seeds (least to most); {scored if signatures else ''}losses in bits a "
        "target token, label smoothing included"
    )


def _company(rows: Rows) -> str:
    """Return how many runs shared the GPU."""
    at_once = " or ".join(map(str, sorted({row["runs_at_once"] for row in rows})))
    shared = " by CUDA's MPS" if any(row["mps"] for row in rows) else ""
    return f"{at_once} at once{shared}"


def _range(values: list[float], digits: int, unit: str = "") -> str:
    """Return the mean, and minimum and maximum if they differ."""
    least, middle, most = (f"{f(values):.{digits}f}" for f in (min, mean, max))
    return f"{middle}{unit}" + f" ({least} to {most})" * (least != most)


def convergence_plot(rows: Rows) -> Curves:
    """Return the plot of losses: t2t_big over updates; small over time, validation only.

    The curves of one system form a bundle, as wide as seeds differ. Of a case with several numbers
    of updates, it shows the most.
    """
    panels = []
    for case, systems in dict(cases(rows)).items():
        big = case.startswith("t2t_big")
        curves = [
            (in_words(system, kind), [(update if big else seconds, loss)
                                      for update, seconds, loss in row[f"{kind}_curve"]])
            for kind in (("train", "valid") if big else ("valid",))
            for system, its in systems.items()  # fairseq's, dashed, on top
            for row in its
        ]  # fmt: skip
        least = min(loss for _, points in curves for _, loss in points)
        limits = math.floor(least), math.ceil(2 * least)
        shown = [(name, [p for p in points if p[1] <= limits[1]]) for name, points in curves]
        model, _, precision = case.partition("/")
        across = "updates" if big else "seconds"
        title = f"{MODELS[model]}, {precision}"
        panels.append(Panel(title, across, "loss, bits a target token", limits, shown))
    colours = {
        in_words(system, kind): colour
        for system, (_, *its) in SYSTEMS.items()
        for kind, colour in zip(("valid", "train"), its)
    }
    dashed = [in_words("fairseq", kind) for kind in ("valid", "train")]
    title = f"Losses on Multi30k, one curve for each seed, {gpus(rows)}"
    return Curves(title, colours, panels, dashed)


def in_words(system: str, kind: str) -> str:
    name = SYSTEMS[system][0].strip("`")
    return f"{name}: {'validation' if kind == 'valid' else 'training'}"
