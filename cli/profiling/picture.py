"""The picture of a profile: the time of each class, and the ops against the machine's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.profiling.rates import Rates
from lightseq_fairseq.cli.profiling.report import Line
from lightseq_fairseq.cli.profiling.timeline import CLASSES, GAPS

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c",
            "#ccb974", "#e8e8e8")  # fmt: skip


def matplotlib() -> Any:
    """The package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("--output draws by matplotlib: run pip install matplotlib.") from None
    matplotlib.use("Agg")
    return matplotlib


def draw(
    systems: Mapping[str, Sequence[Line]], ops: Sequence[Line], rates: Rates, path: Path
) -> None:
    """A stacked bar for each system, and a roofline with a point for each op."""
    matplotlib()
    from matplotlib import pyplot

    colours = dict(zip((*CLASSES, GAPS), _COLOURS, strict=True))
    figure, (bars, roof) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for place, lines in enumerate(systems.values()):
        begin = 0.0
        for line in sorted(lines, key=lambda line: [*colours].index(line.kind)):
            bars.bar(place, line.ms, bottom=begin, color=colours[line.kind], width=0.6)
            begin += line.ms
        floor = sum(line.floor_ms for line in lines)
        bars.hlines(floor, place - 0.4, place + 0.4, color="black")
        bars.annotate("floor", (place + 0.31, floor), va="bottom", fontsize=8)
        bars.annotate(f"{begin:.2f} ms", (place, begin), ha="center", va="bottom")
    bars.set_xticks(range(len(systems)), [*systems])
    bars.set_ylabel("ms of a step")
    used = [kind for kind in colours if any(x.kind == kind for s in systems.values() for x in s)]
    bars.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in used], used,
        fontsize=8, loc="upper right",
    )  # fmt: skip
    bars.set_xlim(-0.6, len(systems) + 0.4)
    _roofline(roof, ops, rates, colours)
    figure.savefig(path)
    pyplot.close(figure)


def _roofline(axes: Any, ops: Sequence[Line], rates: Rates, colours: Mapping[str, str]) -> None:
    points = [line for line in ops if line.flop and line.bytes and line.ms]
    knee = rates.flop / rates.bytes
    ends = [line.flop / line.bytes for line in points] + [knee / 30, knee * 30]
    for flop, style in ((rates.flop, "-"), (rates.fp8, "--")):
        if flop is not None:
            edges = [min(ends), flop / rates.bytes, max(ends)]
            limit = [min(x * rates.bytes, flop) / 1e12 for x in edges]
            axes.plot(edges, limit, style, color="black")
    for line in points:
        rate = line.flop / line.ms / 1e9  # TFLOP/s
        axes.scatter(line.flop / line.bytes, rate, s=14, color=colours[line.kind], alpha=0.7)
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP for each byte that must move", ylabel="TFLOP/s",
        title="ops with products, and the machine's limits",
    )  # fmt: skip
