"""The table of the results of examples/multi30k/translation.py, for tables.py."""

from __future__ import annotations

from typing import Any

from .sources import source, sourced_table

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
        lines.append((cells, [row]))
    head = ["flags", "precision", "sentences", "identical", "greatest difference of scores",
            "greatest gap where tokens differ", "BLEU", "fairseq's BLEU"]  # fmt: skip
    parts = []
    if compared:
        signatures = sorted({row["signature"] for row in compared})
        about = (
            "same flags for `lightseq-generate` and `lightseq-generate --native`; identical: "
            "sentences of which all hypotheses have the same subwords; scores as fairseq prints "
            "them, log2 of a probability over length; sacrebleu "
            f"`{'`, `'.join(signatures)}`"
        )
        parts.append(sourced_table(head, lines, 2, about))
    systems = {row["system"]: row for row in rows if row["case"] == "eval_bleu/fp32"}
    if len(systems) == 2:
        parts.append([_validations(systems["ours"], systems["fairseq_no_cudnn"])])
    return [line for part in parts for line in (*part, "")][:-1]


def _validations(ours: dict[str, Any], fairseq: dict[str, Any]) -> str:
    """Return a sentence about the times of both systems' validations."""
    total, fairseq_total = (sum(row["validation_s"]) for row in (ours, fairseq))
    return (
        f"A validation with `--eval-bleu`, beam 5: {ours['s_per_validation']:.2f} s, fairseq "
        f"{fairseq['s_per_validation']:.2f} s, "
        f"{fairseq['s_per_validation'] / ours['s_per_validation']:.1f} times as long (median "
        f"of {len(ours['validation_s']) - 1} after the first, which took "
        f"{ours['validation_s'][0]:.2f} and {fairseq['validation_s'][0]:.2f} s; all "
        f"{len(ours['validation_s'])}: {total:.1f} s, fairseq {fairseq_total:.1f} s, "
        f"{fairseq_total / total:.1f} times as long); {'; '.join(source(ours))}."
    )


def _power(number: float) -> str:
    return f"{number:.0e}"
