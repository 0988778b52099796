"""The table of a profile: time by class of operators, against what the machine can do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.cli.profiling.rates import Rates

Report = Mapping[str, Any]


class Line(NamedTuple):
    """A class of operators, or an op of a module, in a step.

    Attributes:
        name: of the class, or of the module and the op.
        kind: its class.
        launches: kernels, on a CPU ops.
        ms: its time.
        flop, bytes: what it must compute, and must move at least.
        floor_ms: the time of that at the sustained rates.
    """

    name: str
    kind: str
    launches: float
    ms: float
    flop: float
    bytes: float
    floor_ms: float


def classes(
    report: Report, calls: Sequence[Mapping[str, Any]], rates: Rates, share: float
) -> list[Line]:
    """A line for each class, the longest first, and the gaps.

    calls: the ops of a step. share: its tokens to those of the profiled steps.
    """
    # of each class: flop, bytes, floor
    needed = defaultdict[str, tuple[float, float, float]](lambda: (0.0, 0.0, 0.0))
    for call in calls:
        scale = 1.0 if call["kind"] == "optimizer" else 1 / share
        flop, size, before = needed[call["kind"]]
        needed[call["kind"]] = (
            flop + scale * call["flop"], size + scale * call["bytes"],
            before + scale * floor(call, rates),
        )  # fmt: skip
    profile = report["timeline"]
    factor = report["ms_per_step"] / profile["ms_per_step"]
    found = [
        Line(kind, kind, profile["launches"].get(kind, 0.0), factor * ms, *needed[kind])
        for kind, ms in profile["class_ms"].items()
        if ms > 0
    ]
    return sorted(found, key=lambda line: -line.ms)


def floor(call: Mapping[str, Any], rates: Rates) -> float:
    """Milliseconds that an op takes at least."""
    flop = rates.fp8 if call["fp8"] and rates.fp8 else rates.flop
    return 1e3 * max(call["flop"] / flop, call["bytes"] / rates.bytes)


def ops(calls: Sequence[Mapping[str, Any]], rates: Rates) -> list[Line]:
    """A line for each op of each module, in the order in which they first run."""
    found: dict[str, Line] = {}
    for call in calls:
        name = f"{call['place']} {call['name'].partition('::')[2]}".strip()
        line = found.get(name, Line(name, call["kind"], 0, 0.0, 0.0, 0.0, 0.0))
        found[name] = Line(
            name, line.kind, line.launches + 1, line.ms + 1e3 * call["seconds"],
            line.flop + call["flop"], line.bytes + call["bytes"],
            line.floor_ms + floor(call, rates),
        )  # fmt: skip
    return [*found.values()]


def table(lines: Sequence[Line], rates: Rates, title: str, step_ms: float) -> list[str]:
    """Lines to print, with these columns:

    % of rate: of products or of copies, for each op the one that limits it. MUE: the bytes that it
    must move, of those that the machine could have moved in its time (memory usage efficiency of
    Ivanov et al. 2021, "Data movement is all you need").
    """
    head = [
        title, "launches", "ms", "share", "GFLOP", "MB", "TFLOP/s", "GB/s", "% of rate", "MUE %",
        "floor ms",
    ]  # fmt: skip
    rows = []
    for line in lines:
        seconds = line.ms / 1e3
        per_flop, per_byte = (x / seconds if seconds else 0.0 for x in (line.flop, line.bytes))
        reached = line.floor_ms / line.ms if line.ms else 0.0
        rows.append(
            [
                line.name, f"{line.launches:.0f}", f"{line.ms:.3f}", f"{line.ms / step_ms:.1%}",
                _or_dash(line.flop, 1e9), _or_dash(line.bytes, 1e6), _or_dash(per_flop, 1e12, 2),
                _or_dash(per_byte, 1e9), _or_dash(100 * reached, 1, 0),
                _or_dash(100 * per_byte / rates.bytes, 1, 0), f"{line.floor_ms:.3f}",
            ]
        )  # fmt: skip
    return result_rows.table(head, rows)


def _or_dash(number: float, unit: float, digits: int = 1) -> str:
    return f"{number / unit:.{digits}f}" if number else "-"


def losses(lines: Iterable[Line], step_ms: float) -> list[str]:
    """The three largest losses against the floor, a sentence each."""
    found = sorted(lines, key=lambda line: line.floor_ms - line.ms)[:3]
    return [
        f"{line.name}: {line.ms:.3f} ms, of which {line.floor_ms:.3f} ms are the floor: "
        f"{line.ms - line.floor_ms:.3f} ms ({(line.ms - line.floor_ms) / step_ms:.1%} of the step) "
        "are lost."
        for line in found
        if line.ms > line.floor_ms
    ]
