"""Plots of measurements: classes for their content, and functions that draw them in one style.

An SVG contains its content as JSON in its description; `shown` reads it. A plot is up to date if
this content is, because its bytes also depend on the version of matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:  # checking the content of a plot must not need matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, OURS_TOO, OURS_PALE = "#1f6fb4", "#5b9bd0", "#a3c8e6"
OTHERS = "#e39a3b"  # torch.compile, CTranslate2
OTHERS_PALE, OTHERS_TOO = "#f2cf9d", "#a8712a"  # torch.compile with pads, transformers
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
    "svg.fonttype": "none",  # store text as text; the viewer chooses the font
    "svg.hashsalt": "lightseq_fairseq",  # fixed, so that the same content gives the same file
}
WIDTH = 8.5  # inches
BAR, GAP = 0.15, 0.12  # inches: height of a bar, gap between groups
FEW = 30  # curves with fewer points get a mark at each point
DESCRIPTION = ".//{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Bars:
    """Groups of horizontal bars.

    Attributes:
        axis: label of the axis: the meaning of a bar's length.
        percent: whether lengths are shares; otherwise they are shown in thousands.
        colours: colour of each system, in the order of the legend.
        groups: name of a group -> system -> length of its bar and the text at its end.
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
        axes.margins(x=0.08)  # space for the text of the longest bar
        axes.set_xlabel(self.axis)
        axes.xaxis.set_major_formatter("{x:.0%}" if self.percent else in_thousands)
        figure.set_size_inches(WIDTH, y + 1.3)


@dataclass(frozen=True)
class Panel:
    """A set of curves in one pair of axes.

    Attributes:
        across, up: labels of the x axis and the y axis.
        limits: limits of the y axis.
        curves: name (as in the legend) and points of each curve.
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
    """Panels side by side. ``colours``: colour of each curve's name, in the legend's order."""

    title: str
    colours: Mapping[str, str]
    panels: Sequence[Panel]

    def _draw(self, figure: Figure) -> None:
        figure.set_size_inches(WIDTH, 3.9)
        for axes, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels):
            panel.draw(axes, self.colours)


@dataclass(frozen=True)
class Lanes:
    """What runs at the same time, in panels one below the other.

    Attributes:
        colours: colour of each lane's name.
        panels: title of a panel -> lane -> start and end of each span, in milliseconds.
    """

    title: str
    colours: Mapping[str, str]
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]

    def _draw(self, figure: Figure) -> None:
        figure.set_size_inches(WIDTH, 0.9 * len(self.panels) + 0.9)
        all_axes = figure.subplots(len(self.panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, (title, lanes) in zip(all_axes, self.panels.items()):
            for place, (name, spans) in enumerate(lanes.items()):
                lengths = [(start, end - start) for start, end in spans]
                axes.broken_barh(lengths, (place - 0.4, 0.8), color=self.colours[name])
            axes.set_yticks(range(len(lanes)), list(lanes))
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_title(title)
        all_axes[-1].set_xlabel("ms")


Picture = Bars | Curves | Lanes


def in_thousands(x: float, _: int) -> str:
    return f"{x / 1e3:.0f}k" if x else "0"


def gpus(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the names of the GPUs on which the rows were measured, for a title."""
    return ", ".join(sorted({row["gpu"] for row in rows}))


def draw(picture: Picture, path: Path) -> None:
    """Write the picture as an SVG file."""
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
    """Return the content of the plot in a file; None if the file is missing or has no content."""
    try:
        found = ElementTree.parse(path).find(DESCRIPTION)
        return None if found is None else json.loads(found.text or "")
    except (OSError, ElementTree.ParseError, ValueError):
        return None


def is_drawn(picture: Picture, path: Path) -> bool:
    """Return whether the file shows this picture."""
    return bool(shown(path) == json.loads(json.dumps(asdict(picture))))
