"""A profile of training steps, as time by part of the step.

Input are the events of a trace file of ``torch.profiler`` (the Chrome format: ``ts`` and ``dur`` in
microseconds). Between steps stand marks, so that what lies between the first and the last of them
is a whole number of steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

MARK = "spin_kernel"
# The first that is found in a kernel's name counts. What none of them finds is elementwise: norms,
# dropout, activations, embeddings, copies, and whatever of fairseq's loss and Adam has no name.
PARTS = {
    "cross_entropy": r"cross_entropy|log_?softmax|nll_loss",
    "optimizer": r"adam|advance_kernel|multi_tensor|lpnorm",
    "attention": r"attention|flash|fmha|sdpa|softmax",
    "all_reduce": r"nccl|all_?reduce",
    "gemm": r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|_mm\b|::(relu_)?linear(?!_dbias)|matmul",
    "elementwise": r"",
}
# Work of the device. Copies from and to the host run beside it. Without a GPU: torch's CPU ops.
_WORK = ("kernel", "gpu_memset", "gpu_memcpy", "cpu_op")
_BESIDE = re.compile(r"Memcpy (HtoD|DtoH)")


class Timeline(NamedTuple):
    """Means over the steps.

    Attributes:
        ms_per_step: wall time under the profiler.
        busy: share of it in which the device works.
        part_ms: milliseconds a step by part, "gaps" included; their sum is ``ms_per_step``.
    """

    ms_per_step: float
    busy: float
    part_ms: dict[str, float]


def part_of(name: str) -> str:
    """The part of the step that a kernel belongs to, by its name."""
    return next(part for part, found in PARTS.items() if re.search(found, name, re.IGNORECASE))


def timeline(events: Iterable[dict[str, Any]]) -> Timeline:
    """What lies between the marks.

    Where kernels overlap, the one that started first has the time, so that nothing counts twice.

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
