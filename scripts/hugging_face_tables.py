"""The table of the results of lightseq-bench huggingface, for tables.py."""

from __future__ import annotations

from typing import Any

from .sources import Line, sourced_table

_PLAIN = {
    "transformers": "transformers",
    "transformers_compiled": "transformers, compiled",
    "transformers_graphs": "transformers, compiled, CUDA graphs",
}
SYSTEMS = {
    "ours": "transformers, with our `accelerate`",
    "ours_trainer": "our `Trainer`",
    **_PLAIN,
    **{f"{system}_grouped": f"{name}, grouped by length" for system, name in _PLAIN.items()},
}


def hugging_face_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of speed, memory and first update of each system in each case."""
    lines: list[Line] = []
    for case in dict.fromkeys(row["case"] for row in rows):
        its = [row for row in rows if row["case"] == case]
        unit = "images_per_s" if "images_per_s" in its[0] else "real_tokens_per_s"
        speeds = [row[unit] for row in its if "transformers" in row["system"]]
        for row in sorted(its, key=lambda row: -row[unit]):
            speed = row[unit]
            tokens = "" if unit == "images_per_s" else f"{speed / 1e3:.0f}k"
            cells = [
                f"`{case}`", SYSTEMS[row["system"]], tokens,
                f"{row.get('sentences_per_s', speed):.0f}",
                f"{speed / max(speeds):.2f}" if speeds else "",
                f"{row['ms_per_step']:.2f} ({row['ms_p20']:.2f}-{row['ms_p80']:.2f})",
                f"{row['peak_gib']:.1f}",
                f"{row['train_to_first_s']:.1f} s" if "train_to_first_s" in row else "",
            ]  # fmt: skip
            lines.append((cells, [row]))
    head = ["case", "system", "tokens/s", "sentences or images/s", "x transformers",
            "ms a batch (p20-p80)", "GiB of the GPU", "first update"]  # fmt: skip
    return sourced_table(
        head, lines, 2,
        "bf16, random weights; tokens without pads, of pairs those of both sides; medians over "
        'blocks of updates after the warm-up; "x transformers": tokens/s or images/s, divided by '
        'those of the fastest row without our layers in the case; "first update": from `train()` '
        "on, with compilation",
    )  # fmt: skip
