"""Time per class of operators in a step, from a profile.

The input is the events of a trace file of ``torch.profiler`` (Chrome format: ``ts`` and ``dur`` in
microseconds). There is a mark between two steps, so the time from the first mark to the last is a
whole number of steps.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MARK = "spin_kernel"
# The first pattern found in the name of a kernel, or on a CPU of an op, decides its class. All
# others are "elementwise": dropout, activations, sums, and kernels of fairseq's loss and Adam that
# have generic names.
CLASSES = {
    "cross entropy": r"cross_entropy|log_?softmax|nll_loss",
    "optimizer": r"adam|advance_kernel|multi_tensor|lpnorm|update_scalars|fp8_(scales|weights)",
    "attention": r"attention|flash|fmha|sdpa|softmax|::bmm|::baddbmm",
    "communication": r"nccl|all_?reduce|c10d",
    "contraction": r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|mm\b|::(\w+_)?linear(?!_dbias)|"
    r"matmul",
    "embedding": r"embedding",
    "normalisation": r"(layer|rms)_?norm",
    "copies": r"mem(cpy|set)|copy|catarray|::(cat|clone|contiguous|stack)\b",
    "elementwise": r"",
}
GAPS = "gaps"
# Event categories of device work; without a GPU, torch's CPU ops. Copies between host and device
# run in parallel with it and are not counted.
_WORK = ("kernel", "gpu_memset", "gpu_memcpy", "cpu_op")
_BESIDE = re.compile(r"Memcpy (HtoD|DtoH)")
_OP = re.compile(
    r"(aten|lightseq|_?c10d\w*)::"
)  # other CPU events are parts of autograd, of modules
_NEAR = 20.0  # microseconds: a lane of the overlap shows no shorter gaps

Span = tuple[float, float]  # start and end
Kernel = tuple[float, float, str]  # start, end and name


class Timeline(NamedTuple):
    """Means over the steps.

    Attributes:
        ms_per_step: wall time under the profiler.
        busy: share of that time in which the device works.
        class_ms: milliseconds per step for each class, with `GAPS`; their sum is ``ms_per_step``.
        launches: kernels per step of each class, on a CPU ops.
    """

    ms_per_step: float
    busy: float
    class_ms: dict[str, float]
    launches: dict[str, float]


class Overlap(NamedTuple):
    """Collectives beside other kernels.

    Attributes:
        hidden: share of the collectives' time in which other kernels run; None if there are none.
        lanes_ms: "computation" and "collectives" -> their spans in one step, in the middle of the
            profile, in milliseconds since its start.
    """

    hidden: float | None
    lanes_ms: dict[str, list[Span]]


@functools.cache  # a profile has many events of few names
def class_of(name: str) -> str:
    """The class of a kernel or an op, from its name."""
    return next(kind for kind, found in CLASSES.items() if re.search(found, name, re.IGNORECASE))


def timeline(events: Iterable[dict[str, Any]]) -> Timeline:
    """The timeline between the first and the last mark.

    If kernels overlap, the time counts for the one that started first, so nothing counts twice.

    Raises:
        ValueError: there are too few marks.
    """
    marks, work = _recorded(events)
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    microseconds, launches = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0)
    covered = begin
    for start, stop, name in work:
        stop, kind = min(stop, end), class_of(name)
        if stop > covered:
            microseconds[kind] += stop - max(start, covered)
            covered = stop
            launches[kind] += start >= begin
    busy = sum(microseconds.values())
    microseconds[GAPS] = end - begin - busy
    return Timeline(
        (end - begin) / steps / 1e3,
        busy / (end - begin),
        {kind: total / steps / 1e3 for kind, total in microseconds.items()},
        {kind: count / steps for kind, count in launches.items()},
    )


def overlap(events: Iterable[dict[str, Any]]) -> Overlap:
    """How collectives and other kernels overlap, between the first and the last mark.

    Raises:
        ValueError: there are too few marks.
    """
    marks, work = _recorded(events)
    lanes: dict[str, list[Span]] = {"computation": [], "collectives": []}
    for start, stop, name in work:
        lane = "collectives" if class_of(name) == "communication" else "computation"
        lanes[lane].append((start, stop))
    whole = {lane: _within(spans, marks[0], marks[-1]) for lane, spans in lanes.items()}
    begin, end = marks[(len(marks) - 1) // 2 :][:2]
    lanes_ms = {
        lane: [
            (round((start - begin) / 1e3, 3), round((stop - begin) / 1e3, 3))
            for start, stop in _united(_within(spans, begin, end), _NEAR)
        ]
        for lane, spans in lanes.items()
    }
    collectives = _united(whole["collectives"])
    either = _length(_united([*collectives, *whole["computation"]]))
    time, computing = _length(collectives), _length(_united(whole["computation"]))
    return Overlap((time + computing - either) / time if time else None, lanes_ms)


def _recorded(events: Iterable[dict[str, Any]]) -> tuple[list[float], list[Kernel]]:
    """The times of the marks, and the kernels, both in order."""
    timed = [event for event in events if event.get("ph") == "X"]
    marks = sorted(float(event["ts"]) for event in timed if MARK in event["name"])
    if len(marks) < 2:
        raise ValueError(f"the profile holds {len(marks)} marks, 2 are needed")
    work = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])
        for event in timed
        if event.get("cat") in _WORK
        and (event["cat"] != "cpu_op" or _OP.match(event["name"]))
        and MARK not in event["name"]
        and not _BESIDE.match(event["name"])
    )
    return marks, work


def _within(spans: Sequence[Span], begin: float, end: float) -> list[Span]:
    """The parts of spans between two times."""
    cut = ((max(start, begin), min(stop, end)) for start, stop in spans)
    return [(start, stop) for start, stop in cut if start < stop]


def _united(spans: Sequence[Span], near: float = 0.0) -> list[Span]:
    """The spans in order, joined where the next one begins less than ``near`` after an end."""
    united: list[Span] = []
    for start, stop in sorted(spans):
        if united and start <= united[-1][1] + near:
            united[-1] = united[-1][0], max(stop, united[-1][1])
        else:
            united.append((start, stop))
    return united


def _length(spans: Sequence[Span]) -> float:
    return sum(stop - start for start, stop in spans)
