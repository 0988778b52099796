"""The table and the plot of what examples/multi30k/convergence.py has trained, for tables.py."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]

MODELS = {
    "small": "4+4 layers of width 128",
    "t2t_big": "Transformer big: 6+6 layers of width 1024",
}
# system -> its name, colour of its losses in validation and, paler, in training
SYSTEMS = {
    "lightseq": ("`lightseq-train`", "#1f6fb4", "#8ebbe0"),
    "fairseq": ("fairseq, cuDNN attention off", "#555555", "#b8b8b8"),
}


def cases(rows: Rows) -> Iterator[tuple[str, dict[str, Rows]]]:
    """Yields each case, and its rows by system, ours first."""
    for case in sorted({row["case"] for row in rows}):
        systems = {
            system: [row for row in rows if (row["case"], row["system"]) == (case, system)]
            for system in SYSTEMS
        }
        yield case, {system: its for system, its in systems.items() if its}


def level(rows: Iterable[dict[str, Any]]) -> float:
    """A validation loss that every run gets to: 1% above the best one of the worst run."""
    return 1.01 * max(min(loss for _, _, loss in row["valid_curve"]) for row in rows)


def convergence_table(rows: Rows) -> list[str]:
    """BLEU and last validation loss of each model and system, and how soon it got there."""
    lines = [
        "| model | system | seeds | updates | BLEU | last validation loss | training, to that BLEU "
        "and loss | time to a validation loss of |",
        "|---|---|---|---|---|---|---|---|",
    ]
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
            lines.append(f"| {' | '.join(cells)} |")
    common = {key: sorted({str(row[key]) for row in rows}) for key in ("gpu", "torch", "commit")}
    signatures = sorted({f"sacrebleu `{row['signature']}`" for row in rows if row["bleu"]})
    scored = (
        "BLEU of test_2016_flickr by the average of a run's last checkpoints, scored once, when "
        f"training has ended, so the time to it is training's ({', '.join(signatures)}); "
    )
    company = "; ".join(
        f"{MODELS[case.split('/')[0]]}, {_company(its)}" for case, its in cases(rows)
    )
    return [
        *lines,
        "",
        f"{', '.join(common['gpu'])}; torch {', '.join(common['torch'])}; commit "
        f"{', '.join(commit[:10] for commit in common['commit'])}; means over the "
        f"seeds (least to most); {scored if signatures else ''}losses in bits a target token, "
        "label smoothing included; times are wall times of training with its validations, and "
        "compare the systems of one model with each other and with nothing else, as runs shared "
        f"the GPU: {company}.",
    ]


def _company(systems: dict[str, Rows]) -> str:
    """How many runs of a case there were at a time."""
    rows = [row for its in systems.values() for row in its]
    at_once = " or ".join(map(str, sorted({row["runs_at_once"] for row in rows})))
    shared = " by CUDA's MPS" if any(row["mps"] for row in rows) else ""
    return f"{at_once} at once{shared}"


def _range(values: list[float], digits: int, unit: str = "") -> str:
    """The mean, and what it is the mean of where that differs."""
    least, middle, most = (f"{f(values):.{digits}f}" for f in (min, mean, max))
    return f"{middle}{unit}" + f" ({least} to {most})" * (least != most)


class Line(NamedTuple):
    """A curve through (x, loss), its colour, and its tooltip."""

    points: list[tuple[float, float]]
    colour: str
    title: str


def convergence_plot(rows: Rows) -> str:
    """SVG: losses of the big layers over updates; of the small model over time, validation only."""
    panels: list[str] = []
    for case, systems in cases(rows):
        big = case.startswith("t2t_big")
        lines = []
        for kind, shade in (("train", 2), ("valid", 1)) if big else (("valid", 1),):
            for system, its in reversed(systems.items()):  # ours on top
                for row in its:
                    points = [
                        (update if big else seconds, loss)
                        for update, seconds, loss in row[f"{kind}_curve"]
                    ]
                    title = f"{system}, seed {row['seed']}, {kind}"
                    lines.append(Line(points, SYSTEMS[system][shade], title))
        title = f"{case}: {'training (pale) and validation' if big else 'validation'} loss"
        left = 420 * len(panels)
        panels.append(
            f'<g transform="translate({left})">\n'
            + "\n".join(panel(title, "updates" if big else "seconds", lines))
            + "\n</g>"
        )
    legend = [
        f'<text x="{40 + 420 * place}" y="16" fill="{colour}">{name.strip("`")}</text>'
        for place, (name, colour, _) in enumerate(SYSTEMS.values())
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{420 * len(panels) + 20}" height="340" '
        'font-family="sans-serif" font-size="12">'
    )
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, white, *legend, *panels, "</svg>"]) + "\n"


def panel(title: str, unit: str, lines: list[Line]) -> Iterator[str]:
    """Axes and curves, 420 wide; what is above twice the least loss is left out."""
    left, top, width, height = 40, 56, 360, 240
    losses = [loss for line in lines for _, loss in line.points]
    low = math.floor(min(losses))
    high = math.ceil(2 * min(losses))
    last = max(x for line in lines for x, _ in line.points)
    x_step = next(
        step
        for power in range(9)
        for step in (10**power, 2 * 10**power, 5 * 10**power)
        if last <= 6 * step
    )
    x_scale, y_scale = width / max(last, 1), height / (high - low)

    def across(x: float) -> float:
        return left + x * x_scale

    def down(loss: float) -> float:
        return top + (high - loss) * y_scale

    yield f'<text x="{left}" y="{top - 14}">{title}</text>'
    for tick in range(low, high + 1):
        y = down(tick)
        yield f'<path d="M{left} {y:.1f}h{width}" stroke="#ddd"/>'
        yield f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{tick}</text>'
    for tick in range(0, int(last) + 1, x_step):
        yield (
            f'<text x="{across(tick):.1f}" y="{top + height + 16}" text-anchor="middle" '
            f'fill="#666">{tick}</text>'
        )
    yield (
        f'<text x="{left + width}" y="{top + height + 32}" text-anchor="end" fill="#666">{unit}'
        "</text>"
    )
    for line in lines:
        points = " ".join(
            f"{across(x):.1f},{down(loss):.1f}" for x, loss in line.points if loss <= high
        )
        yield (
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.2">'
            f"<title>{line.title}</title></polyline>"
        )
