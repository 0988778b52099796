"""Plots of measurements: classes for their content, and functions that draw them in one style.

An SVG contains its content as JSON in its description; `shown` reads it. A plot is up to date if
this content is, because its bytes also depend on the version of matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
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
Groups = Mapping[str, Mapping[str, tuple[float, str]]]
DESCRIPTION = ".//{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Bars:
    """Groups of horizontal bars, in panels one below the other.

    Attributes:
        axis: label of the axis: the meaning of a bar's length.
        colours: colour of each system, in the order of the legend.
        panels: title of a panel -> name of a group -> system -> length of its bar, as a share, and
            the text at its end.
    """

    title: str
    axis: str
    colours: Mapping[str, str]
    panels: Mapping[str, Groups]

    def _draw(self, figure: Figure) -> None:
        heights = [
            sum(BAR * len(bars) + GAP for bars in groups.values())
            for groups in self.panels.values()
        ]
        figure.set_size_inches(WIDTH, sum(heights) + 0.4 * len(heights) + 1.2)
        all_axes = figure.subplots(len(heights), 1, squeeze=False, sharex=True,
                                   height_ratios=heights)[:, 0]  # fmt: skip
        for axes, (title, groups) in zip(all_axes, self.panels.items()):
            self._draw_panel(axes, groups)
            axes.set_title(title, fontweight="bold")
        all_axes[-1].set_xlabel(self.axis)
        all_axes[-1].xaxis.set_major_formatter("{x:.0%}")

    def _draw_panel(self, axes: Axes, groups: Groups) -> None:
        y, middles = 0.0, []
        for bars in groups.values():
            middles.append(y + BAR * (len(bars) - 1) / 2)
            for name, (length, text) in bars.items():
                axes.barh(y, length, BAR * 0.9, color=self.colours[name])
                axes.annotate(text, (length, y), (3, 0), textcoords="offset points", va="center",
                              fontsize=8, color="#444444")  # fmt: skip
                y += BAR
            y += GAP
        axes.set_yticks(middles, list(groups))
        axes.set_ylim(y - GAP, -BAR)
        longest = max(len(text) for bars in groups.values() for _, text in bars.values())
        axes.set_xlim(0, 1.05 + 0.012 * longest)  # space for the text of the longest bar
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axes.grid(axis="y", visible=False)


@dataclass(frozen=True)
class Panel:
    """A set of curves in one pair of axes.

    Attributes:
        across, up: labels of the x axis and the y axis.
        limits: limits of the y axis.
        curves: name (as in the legend) and points of each curve; later ones are on top.
    """

    title: str
    across: str
    up: str
    limits: tuple[float, float]
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]

    def draw(self, axes: Axes, colours: Mapping[str, str], dashed: Sequence[str]) -> None:
        for name, points in self.curves:
            mark = "." if len(points) < FEW else None
            look = {"ls": (0, (2, 2)), "lw": 0.8} if name in dashed else {}
            axes.plot(*zip(*points), color=colours[name], marker=mark, markersize=4, **look)
        axes.set(title=self.title, xlabel=self.across, ylabel=self.up, ylim=self.limits)
        axes.set_xlim(left=0)


@dataclass(frozen=True)
class Curves:
    """Panels side by side.

    Attributes:
        colours: colour of each curve's name, in the legend's order.
        dashed: names of curves that are thin and dashed, so that one sees the curves below them.
    """

    title: str
    colours: Mapping[str, str]
    panels: Sequence[Panel]
    dashed: Sequence[str] = ()

    def _draw(self, figure: Figure) -> None:
        figure.set_size_inches(WIDTH, 3.9)
        for axes, panel in zip(figure.subplots(1, len(self.panels), squeeze=False)[0], self.panels):
            panel.draw(axes, self.colours, self.dashed)


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


def speed(per_second: float) -> str:
    """Return a speed with three digits or so: "330k", "790", "3.2"."""
    if per_second >= 10_000:
        return f"{per_second / 1e3:.0f}k"
    return f"{per_second:.1f}" if per_second < 10 else f"{per_second:.0f}"


def colours_of(panels: Mapping[str, Groups], systems: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return name -> colour of the systems that a panel shows; ``systems``: names and colours."""
    shown = {name for groups in panels.values() for bars in groups.values() for name in bars}
    named = {name.replace("`", ""): colour for name, colour in systems}
    return {name: colour for name, colour in named.items() if name in shown}


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
        patches = [Patch(color=colour, label=name) for name, colour in picture.colours.items()]
        # Two columns: text is wider in viewers with other fonts.
        legend = figure.legend(
            handles=patches, loc="outside upper left", ncols=3 if len(patches) == 3 else 2,
            title=picture.title, title_fontproperties={"size": 11, "weight": "bold"},
        )  # fmt: skip
        legend.set_alignment("left")
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
