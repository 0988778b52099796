"""Result rows from the reports of a system's runs, and the printed table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.cli.benchmark.generate.cases import Case
from lightseq_fairseq.cli.benchmark.runs import Row, quantile

# Of ours with a trained model: the steps of one search of all batches; the steps and the time of
# one search for each batch; and the share of sentences with the same words in both.
TOGETHER = ("steps", "steps_one_by_one", "one_by_one_s", "same_words")


def row(case: Case, system: str, runs: Sequence[Row], about: Row) -> Row:
    """The result row of a system: medians over the passes of all its runs.

    ``decode_s`` is the time for all ``sentences``; each pass over them is one sample. ``p50_ms``
    and ``p99_ms`` are times per batch (at batch 1: per sentence). Not included in these are
    ``load_s``, loading the model from the file to the device (CTranslate2 and transformers: and the
    first batch, with compilation), and ``first_s``, the first pass.
    """
    passes = [sum(seconds) for run in runs for seconds in run["batch_s"]]
    batches = [second for run in runs for seconds in run["batch_s"] for second in seconds]
    decode_s, last = statistics.median(passes), runs[-1]
    return {
        **about,
        "case": str(case),
        "system": system,
        "sentences_per_s": round(last["sentences"] / decode_s, 2),
        "tokens_per_s": round(last["tokens"] / decode_s),
        "decode_s": round(decode_s, 4),
        "decode_s_p20": round(quantile(passes, 0.2), 4),
        "decode_s_p80": round(quantile(passes, 0.8), 4),
        "p50_ms": round(1e3 * quantile(batches, 0.5), 3),
        "p99_ms": round(1e3 * quantile(batches, 0.99), 3),
        "load_s": round(statistics.median(run["load_s"] for run in runs), 2),
        "first_s": round(statistics.median(run["first_s"] for run in runs), 3),
        "peak_gib": round(max(run["peak_gib"] for run in runs), 2),
        "sentences": last["sentences"],
        "tokens": last["tokens"],
        "rounds": len(runs),
        **{name: round(last[name], 4) for name in TOGETHER if name in last},
    }


def table(rows: Sequence[Row]) -> list[str]:
    """The table of one case, fastest first; "ratio" is relative to fairseq."""
    fairseq: Any = {row["system"]: row["decode_s"] for row in rows}.get("fairseq_no_cudnn")
    head = [rows[0]["case"], "sent/s", "tokens/s", "ratio", "decode s", "p50 ms", "p99 ms",
            "first s", "load s", "GiB"]  # fmt: skip
    lines = [
        [
            row["system"], f"{row['sentences_per_s']:.1f}", str(row["tokens_per_s"]),
            "" if fairseq is None else f"{fairseq / row['decode_s']:.2f}",
            f"{row['decode_s']:.3f}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}",
            f"{row['first_s']:.2f}", f"{row['load_s']:.1f}", f"{row['peak_gib']:.1f}",
        ]
        for row in sorted(rows, key=lambda row: row["decode_s"])
    ]  # fmt: skip
    return result_rows.table(head, lines)
