"""The table of the results of examples/multi30k/translation.py, for tables.py."""

from __future__ import annotations

from typing import Any

from lightseq_fairseq.result_rows import table

Rows = list[dict[str, Any]]


def translation_table(rows: Rows) -> list[str]:
    """Return the table of how far both systems' translations agree, and validation times below."""
    compared = [row for row in rows if "identical_share" in row]
    lines = []
    for row in compared:
        gap = row["greatest_gap_of_a_difference"]
        cells = [
            f"`{row['flags'].removesuffix(' --fp16')}`",
            row["case"].rpartition("/")[2],
            str(row["sentences"]),
            f"{row['identical_share']:.1%}",
            _power(row["greatest_score_difference"]),
            "" if gap is None else _power(gap),
            f"{row['bleu']:.2f}",
            f"{row['fairseq_bleu']:.2f}",
        ]
        lines.append(cells)
    head = ["flags", "precision", "sentences", "identical", "greatest difference of scores",
            "greatest gap where tokens differ", "BLEU", "fairseq's BLEU"]  # fmt: skip
    notes = []
    if compared:
        signatures = sorted({row["signature"] for row in compared})
        notes.append(
            "same flags for `lightseq-generate` and `lightseq-generate --native`; identical: "
            "sentences of which all hypotheses have the same subwords; scores as fairseq prints "
            "them, log2 of a probability over length; sacrebleu "
            f"`{'`, `'.join(signatures)}`"
        )
    systems = {row["system"]: row for row in rows if row["case"] == "eval_bleu/fp32"}
    if len(systems) == 2:
        ours, fairseq = (systems[system] for system in ("ours", "fairseq_no_cudnn"))
        total, fairseq_total = (sum(row["validation_s"]) for row in (ours, fairseq))
        notes.append(
            f"a validation with `--eval-bleu`, beam 5: {ours['s_per_validation']:.2f} s, fairseq "
            f"{fairseq['s_per_validation']:.2f} s, "
            f"{fairseq['s_per_validation'] / ours['s_per_validation']:.1f} times as long (median "
            f"of {len(ours['validation_s']) - 1} after the first, which took "
            f"{ours['validation_s'][0]:.2f} and {fairseq['validation_s'][0]:.2f} s; all "
            f"{len(ours['validation_s'])}: {total:.1f} s, fairseq {fairseq_total:.1f} s, "
            f"{fairseq_total / total:.1f} times as long)"
        )
    common = {key: sorted({str(row[key])[:40] for row in rows}) for key in ("gpu", "torch")}
    commits = ", ".join(sorted({row["commit"][:10] for row in rows}))
    return [
        *([*table(head, lines, 2, "pipe"), ""] if lines else []),
        f"{', '.join(common['gpu'])}; torch {', '.join(common['torch'])}; commit {commits}; "
        f"{'; '.join(notes)}.",
    ]


def _power(number: float) -> str:
    return f"{number:.0e}"
