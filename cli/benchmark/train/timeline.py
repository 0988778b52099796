"""Time per part of the training step, from a profile.

The input is the events of a trace file of ``torch.profiler`` (Chrome format: ``ts`` and ``dur`` in
microseconds). There is a mark between two steps, so the time from the first mark to the last is a
whole number of steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

MARK = "spin_kernel"
# The first pattern found in a kernel's name decides its part. All other kernels are "elementwise":
# norms, dropout, activations, embeddings, copies, and kernels of fairseq's loss and Adam that have
# generic names.
PARTS = {
    "cross_entropy": r"cross_entropy|log_?softmax|nll_loss",
    "optimizer": r"adam|advance_kernel|multi_tensor|lpnorm|fp8_(scales|weights)",
    "attention": r"attention|flash|fmha|sdpa|softmax",
    "all_reduce": r"nccl|all_?reduce",
    "gemm": r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|_mm\b|::(\w+_)?linear(?!_dbias)|matmul",
    "elementwise": r"",
}
# Event categories of device work; without a GPU, torch's CPU ops. Copies between host and device
# run in parallel with it and are not counted.
_WORK = ("kernel", "gpu_memset", "gpu_memcpy", "cpu_op")
_BESIDE = re.compile(r"Memcpy (HtoD|DtoH)")


class Timeline(NamedTuple):
    """Means over the steps.

    Attributes:
        ms_per_step: wall time under the profiler.
        busy: share of that time in which the device works.
        part_ms: milliseconds per step for each part, with "gaps"; their sum is ``ms_per_step``.
    """

    ms_per_step: float
    busy: float
    part_ms: dict[str, float]


def part_of(name: str) -> str:
    """The part of the step to which a kernel belongs, from its name."""
    return next(part for part, found in PARTS.items() if re.search(found, name, re.IGNORECASE))


def timeline(events: Iterable[dict[str, Any]]) -> Timeline:
    """The timeline between the first and the last mark.

    If kernels overlap, the time counts for the one that started first, so nothing counts twice.

    Raises:
        ValueError: there are too few marks.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    marks = sorted(float(event["ts"]) for event in timed if MARK in event["name"])
    if len(marks) < 2:
        raise ValueError(f"the profile holds {len(marks)} marks, 2 are needed")
    begin, end, steps = marks[0], marks[-1], len(marks) - 1
    work = sorted(
        (float(event["ts"]), float(event["dur"]), event["name"])
        for event in timed
        if event.get("cat") in _WORK
        and MARK not in event["name"]
        and not _BESIDE.match(event["name"])
    )
    microseconds = dict.fromkeys(PARTS, 0.0)
    covered = begin
    for start, duration, name in work:
        stop = min(start + duration, end)
        if stop > covered:
            microseconds[part_of(name)] += stop - max(start, covered)
            covered = stop
    busy = sum(microseconds.values())
    microseconds["gaps"] = end - begin - busy
    part_ms = {part: total / steps / 1e3 for part, total in microseconds.items()}
    return Timeline((end - begin) / steps / 1e3, busy / (end - begin), part_ms)
