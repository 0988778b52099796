"""Result rows from the reports of a system's runs, and the printed table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.cli.benchmark.huggingface.cases import Case
from lightseq_fairseq.cli.benchmark.runs import Row, quantile

# The first one that a row has is that of its ratio.
_SPEEDS = {
    "real_tokens_per_s": "tokens/s", "sentences_per_s": "sentences/s", "images_per_s": "images/s",
}  # fmt: skip
_TIMES = ("train_to_first_s", "start_to_first_s", "job_s")


def row(case: Case, system: str, runs: Sequence[Row], about: Row) -> Row:
    """The result row of a system: medians over the blocks of all its runs.

    A step is an update, or without training the features of a batch. Tokens are without pads; of
    pairs, those of both sides. Images have ``images_per_s`` only.
    ``train_to_first_s`` is the time from the call of ``train`` to the end of the first update,
    with compilation; ``start_to_first_s`` and ``job_s`` begin with the process. ``peak_gib`` is
    that of `MemoryMeter`, ``allocated_gib`` torch's ``max_memory_allocated``. ``fallbacks`` are
    calls of the encoder that our layers did not compute.
    """
    blocks = [
        (1e3 * seconds / run["block_batches"], tokens / seconds)
        for run in runs
        for seconds, tokens in zip(run["block_s"], run["block_tokens"])
    ]
    ms = [block[0] for block in blocks]
    middle = statistics.median(ms)
    last = runs[-1]
    found: Row = {}
    for name in _TIMES:
        if name in last:
            found[name] = round(statistics.median(run[name] for run in runs), 2)
    for name in ("peak_gib", "allocated_gib"):
        if name in last:
            found[name] = round(max(run[name] for run in runs), 2)
    if "fallbacks" in last:
        found["fallbacks"] = last["fallbacks"]
    if "losses" in last:
        found["losses"] = [round(loss, 4) for loss in last["losses"]]
    speed, samples = statistics.median(block[1] for block in blocks), 1e3 * case.batch / middle
    speeds: Row = {"images_per_s": round(speed, 1)}
    if case.kind != "images":
        speeds = {"real_tokens_per_s": round(speed), "sentences_per_s": round(samples, 1)}
    return {
        **about,
        "case": str(case),
        "system": system,
        **speeds,
        "ms_per_step": round(middle, 3),
        "ms_p20": round(quantile(ms, 0.2), 3),
        "ms_p80": round(quantile(ms, 0.8), 3),
        **found,
        "blocks": len(blocks),
        "rounds": len(runs),
    }


def table(rows: Sequence[Row]) -> list[str]:
    """The table of one case, fastest first; "ratio" is relative to the fastest run without our
    layers. For training, the table has the losses of the first updates, too."""
    units = {name: unit for name, unit in _SPEEDS.items() if name in rows[0]}
    speed, *others = units
    theirs = [row[speed] for row in rows if row["system"].startswith("transformers")]
    fastest = max(theirs, default=None)
    ordered = sorted(rows, key=lambda row: -row[speed])
    times = [name for name in _TIMES if name in rows[0]]
    lines = [
        [
            row["system"], str(row[speed]),
            "" if fastest is None else f"{row[speed] / fastest:.2f}",
            *(f"{row[name]:.1f}" for name in others),
            *(f"{row[key]:.2f}" for key in ("ms_per_step", "ms_p20", "ms_p80")),
            f"{row['peak_gib']:.1f}", *(f"{row[name]:.1f}" for name in times),
        ]
        for row in ordered
    ]  # fmt: skip
    speeds = [units[speed], "ratio", *(units[name] for name in others)]
    head = [rows[0]["case"], *speeds, "ms", "p20", "p80", "GiB"]
    names = {"train_to_first_s": "train() to first s", "start_to_first_s": "start to first s",
             "job_s": "all s"}  # fmt: skip
    made = result_rows.table([*head, *(names[name] for name in times)], lines)
    if "losses" in rows[0]:
        losses = [[row["system"], *(f"{x:.4f}" for x in row["losses"][:6])] for row in ordered]
        first = [str(number) for number in range(1, len(losses[0]))]
        made += ["", *result_rows.table(["loss of update", *first], losses)]
    return made
