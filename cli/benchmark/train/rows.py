"""Result rows from the logs and reports of a case's runs, and the printed table.

The speed is taken from the training log: target tokens per second (fairseq's wps) and tokens per
step, for each interval of the log after the warm-up; then medians over the intervals of all rounds.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightseq_fairseq.base import result_rows
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.runs import Row, quantile
from lightseq_fairseq.cli.benchmark.train.cases import SYSTEMS, Case, Data
from lightseq_fairseq.cli.benchmark.train.corpus import NOISED_SHARE, SUMMARIES, Corpus
from lightseq_fairseq.cli.benchmark.train.floor import BURST, SUSTAINED, floor
from lightseq_fairseq.cli.profiling.timeline import GAPS

_HELD_UP_BY_GPU = 0.9  # busy share of a profile above which the GPU limits the step time
# Rows have fewer parts than a profile has classes.
_PARTS = {
    "contraction": "gemm", "communication": "all_reduce", "cross entropy": "cross_entropy",
    "normalisation": "elementwise", "embedding": "elementwise", "copies": "elementwise",
}  # fmt: skip
_LINE = re.compile(r"\| INFO \| train_inner \| (\{.*\})$", re.MULTILINE)


class Interval(NamedTuple):
    """Means over an interval of the log: target tokens per second, target tokens per step."""

    tokens_per_s: float
    tokens: float

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.tokens / self.tokens_per_s


class Run(NamedTuple):
    """One run: updates of the warm-up, the intervals of the log after it, the report."""

    warm_up: int
    intervals: list[Interval]
    report: dict[str, Any]


def intervals(log: str, after: int, until: int) -> list[Interval]:
    """Intervals that lie between update ``after`` and update ``until``, from a log in JSON lines.

    Raises:
        UserError: there is no such interval.
    """
    found = []
    previous = 0
    for text in _LINE.findall(log):
        line = json.loads(text)
        number = int(line["num_updates"])
        if previous >= after and number <= until:
            found.append(Interval(float(line["wps"]), float(line["wpb"])))
        previous = number
    if not found:
        raise UserError(f"the training log has no line between updates {after} and {until}.")
    return found


def row(case: Case, system: str, corpus: Corpus, runs: Sequence[Run], about: Row) -> Row:
    """The result row of a system, from all its runs.

    Source tokens are estimated from target tokens by the ratio of the corpus, since batches are
    random; text has none. Tokens are summed over all GPUs; the floor is for one GPU with
    its share of the tokens; the report is that of the first GPU. Profile, peak and warm-up are from
    the last run.
    ``part_ms`` is the kernel time of each part in a step of ``ms_per_step``, "gaps" is the time
    without kernels, and ``gpu_busy`` is the share of all parts except the gaps. With several GPUs
    ``overlap`` is that of `timeline.overlap`.

    A profiler makes steps longer. If the host limits the step time, the profiler adds host time:
    then the kernel times are those of the profile, scaled to the tokens of the measured steps (the
    profiled steps have other batches), except the optimizer's, which does not depend on the batch.
    If the GPU limits the step time, the profiler adds gaps between kernels and prevents their
    overlap: then the parts are the shares in the profile, and the true ``gpu_busy`` is higher.
    """
    steady = [interval for run in runs for interval in run.intervals]
    times = [interval.ms_per_step for interval in steady]
    low, middle, high = (quantile(times, share) for share in (0.2, 0.5, 0.8))
    speed = statistics.median(interval.tokens_per_s for interval in steady)
    target = statistics.mean(interval.tokens for interval in steady)
    source = target * corpus.source_tokens / corpus.target_tokens
    if case.data is Data.NOISED:
        source = target * NOISED_SHARE
    first = [run.report["first_100_s"] for run in runs if run.report["first_100_s"] is not None]
    report = runs[-1].report
    profile = report["timeline"]
    part_ms: dict[str, float] = {}
    for kind, ms in profile["class_ms"].items():
        if kind != GAPS:
            part = _PARTS.get(kind, kind)
            part_ms[part] = part_ms.get(part, 0.0) + ms
    if profile["busy"] > _HELD_UP_BY_GPU:
        part_ms = {part: ms * middle / profile["ms_per_step"] for part, ms in part_ms.items()}
    else:
        scale = target / report["profiled_tokens"]
        part_ms = {part: ms if part == "optimizer" else ms * scale for part, ms in part_ms.items()}
    busy = min(sum(part_ms.values()), middle)
    tokens = source / case.gpus, target / case.gpus
    words = case.words(corpus.vocabulary)
    classifies = case.data is Data.CLASSES
    in_fp8 = case.precision == "fp8"
    least, sustained = (
        sum(floor(case.shape, words, *tokens, case.block, _text(case), classifies, in_fp8, rates))
        for rates in (BURST, SUSTAINED)
    )
    rates_of_samples = {}
    if classifies:
        rates_of_samples = {"sentences_per_s": round(1e3 * case.sentences * case.gpus / middle)}
    elif case.shape.hugging_face and case.has_pairs:
        length = case.block or corpus.target_tokens / corpus.pairs
        rates_of_samples = {
            "real_tokens_per_s": round(speed * (source + target) / target),
            "sentences_per_s": round(speed / length),
        }
    return {
        **about,
        **rates_of_samples,
        **({"overlap": report["overlap"]} if case.gpus > 1 else {}),
        "case": str(case),
        "system": system,
        "tokens_per_s": round(speed),
        "ms_per_step": round(middle, 3),
        "ms_p20": round(low, 3),
        "ms_p50": round(middle, 3),
        "ms_p80": round(high, 3),
        "source_tokens": round(source),
        "target_tokens": round(target),
        "floor_share": round(least / middle, 4),
        "sustained_floor_share": round(sustained / middle, 4),
        "peak_gib": round(report["peak_gib"], 2),
        "first_100_s": round(statistics.median(first), 2) if first else None,
        "gpu_busy": round(busy / middle, 4),
        "profiled_ms_per_step": round(profile["ms_per_step"], 3),
        "profiled_tokens": round(report["profiled_tokens"]),
        "part_ms": {part: round(ms, 3) for part, ms in {**part_ms, "gaps": middle - busy}.items()},
        "warm_up": runs[-1].warm_up,
        "rounds": len(runs),
    }


def _text(case: Case) -> float:
    """Tokens of a source that a token of it sees, on average; 0: sources are short."""
    if case.data is Data.NOISED:
        return case.block * NOISED_SHARE
    return SUMMARIES.source.mean if case.data is Data.SUMMARIES else 0


def table(rows: Sequence[Row]) -> list[str]:
    """The table of one case; "ratio" is relative to the fastest fairseq run.

    There is no ratio for --pack-tokens, whose batches differ. For models of Hugging Face that read
    sentences, the table has sentences per second, too, and if they have a source, real tokens of
    both sides.
    """
    fastest = max(
        (row["tokens_per_s"] for row in rows if row["system"].startswith("fairseq")), default=None
    )
    ordered = sorted(rows, key=lambda row: -row["tokens_per_s"])
    head = [rows[0]["case"], "tokens/s", "ratio", "ms", "p20", "p80"]
    lines = []
    for row in ordered:
        compares = fastest is not None and not SYSTEMS[row["system"]].pack_tokens
        ratio = f"{row['tokens_per_s'] / fastest:.2f}" if compares else ""
        first = "" if row["first_100_s"] is None else f"{row['first_100_s']:.1f} s"
        times = [f"{row[key]:.2f}" for key in ("ms_per_step", "ms_p20", "ms_p80")]
        shares = [f"{row[key]:.0%}" for key in ("gpu_busy", "floor_share", "sustained_floor_share")]
        lines.append([row["system"], str(row["tokens_per_s"]), ratio, *times, *shares,
                      f"{row['peak_gib']:.1f}", first])  # fmt: skip
    head += ["busy", "floor", "sustained", "GiB", "first 100"]
    for key, title in (("real_tokens_per_s", "both sides/s"), ("sentences_per_s", "sentences/s")):
        if key in rows[0]:
            head.append(title)
            for line, row in zip(lines, ordered):
                line.append(str(row[key]))
    parts = list(dict.fromkeys(part for row in ordered for part in row["part_ms"]))
    by_part = [
        [row["system"], *(f"{row['part_ms'].get(part, 0.0):.2f}" for part in parts)]
        for row in ordered
    ]
    return [
        *result_rows.table(head, lines),
        "",
        *result_rows.table(["ms by part", *parts], by_part),
    ]
