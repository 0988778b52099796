"""Pictures of measured figures: what they show, and matplotlib's drawing of it with one look.

An SVG carries what it shows as JSON in its description, which `shown` reads back. Whether a picture
is up to date is asked of that alone: its bytes are another matplotlib's to change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:  # who only asks what a picture shows needs no matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OURS_TOO, OURS_PALE = "#1f6fb4", "#5b9bd0", "#a3c8e6"
OTHERS = "#e39a3b"  # who else makes code for GPUs: torch.compile, CTranslate2
FAIRSEQ, FAIRSEQ_TOO, FAIRSEQ_PALE = "#5c5c5c", "#909090", "#c6c6c6"

LOOK: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "figure.titlesize": 11,
    "figure.titleweight": "bold",
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": "#444444",
    "xtick.color": "#999999",
    "xtick.labelcolor": "#444444",
    "ytick.color": "#999999",
    "ytick.labelcolor": "#222222",
    "ytick.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "lines.linewidth": 1.1,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, in a font that the reader has
    "svg.hashsalt": "lightseq_fairseq",  # and no date: the same figures give the same file
}
WIDTH = 8.5  # inches
BAR, GAP = 0.15, 0.12  # inches, of a bar and between groups
FEW = 30  # points, each of which gets a mark
DESCRIPTION = ".//{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Bars:
    """Groups of horizontal bars.

    Attributes:
        axis: what a bar's length is.
        percent: whether it is a share; else a number of thousands.
        colours: what the bars are of -> colour, as the legend has them.
        groups: name -> what a bar is of -> its length and what stands at its end.
    """

    title: str
    axis: str
    percent: bool
    colours: Mapping[str, str]
    groups: Mapping[str, Mapping[str, tuple[float, str]]]

    def _draw(self, figure: Figure) -> None:
        axes = figure.subplots()
        y, middles = 0.0, []
        for bars in self.groups.values():
            middles.append(y + BAR * (len(bars) - 1) / 2)
            for name, (length, text) in bars.items():
                axes.barh(y, length, BAR * 0.9, color=self.colours[name])
                axes.annotate(text, (length, y), (3, 0), textcoords="offset points", va="center",
                              fontsize=7, color="#444444")  # fmt: skip
                y += BAR
            y += GAP
        axes.set_yticks(middles, list(self.groups))
        axes.set_ylim(y - GAP, -BAR)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.08)  # for the text of the longest
        axes.set_xlabel(self.axis)
        axes.xaxis.set_major_formatter("{x:.0%}" if self.percent else in_thousands)
        figure.set_size_inches(WIDTH, y + 1.3)


@dataclass(frozen=True)
class Panel:
    """Curves with axes of their own.

    Attributes:
        across, up: what the axes are.
        limits: the lowest and the highest that is shown.
        curves: what each is of, and its points.
    """

    title: str
    across: str
    up: str
    limits: tuple[float, float]
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]

    def draw(self, axes: Axes, colours: Mapping[str, str]) -> None:
        for name, points in self.curves:
            mark = "." if len(points) < FEW else None
            axes.plot(*zip(*points), color=colours[name], marker=mark, markersize=4)
        axes.set(title=self.title, xlabel=self.across, ylabel=self.up, ylim=self.limits)
        axes.set_xlim(left=0)


@dataclass(frozen=True)
class Curves:
    """Panels side by side; ``colours``: what a curve is of -> colour, as the legend has them."""

    title: str
    colours: Mapping[str, str]
    panels: Sequence[Panel]

    def _draw(self, figure: Figure) -> None:
        figure.set_size_inches(WIDTH, 3.9)
        for axes, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels):
            panel.draw(axes, self.colours)


def in_thousands(x: float, _: int) -> str:
    return f"{x / 1e3:.0f}k" if x else "0"


def gpus(rows: Sequence[Mapping[str, Any]]) -> str:
    """Those on which rows were measured, for a title."""
    return ", ".join(sorted({row["gpu"] for row in rows}))


def draw(picture: Bars | Curves, path: Path) -> None:
    """Writes an SVG of it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with rc_context(LOOK):
        figure = Figure(layout="constrained")
        picture._draw(figure)
        figure.suptitle(picture.title, x=0.01, horizontalalignment="left")
        patches = [Patch(color=colour, label=name) for name, colour in picture.colours.items()]
        columns = 2 if len(patches) == 4 else 3
        figure.legend(handles=patches, loc="outside lower left", ncols=columns)
        described = {"Date": None, "Description": json.dumps(asdict(picture))}
        figure.savefig(path, format="svg", metadata=described)


def shown(path: Path) -> Any:
    """What the picture in a file shows; None where there is none, or it does not say."""
    try:
        found = ElementTree.parse(path).find(DESCRIPTION)
        return None if found is None else json.loads(found.text or "")
    except (OSError, ElementTree.ParseError, ValueError):
        return None


def is_drawn(picture: Bars | Curves, path: Path) -> bool:
    """Whether the file shows it."""
    return bool(shown(path) == json.loads(json.dumps(asdict(picture))))
