"""README's one table: speed, memory and BLEU of every system, for tables.py."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from lightseq_fairseq.result_rows import table

Rows = list[dict[str, Any]]

TRAINING = {
    "t2t_big/4096/bf16": "training big, 4096",
    "t2t_big/16384/bf16": "training big, 16384",
    "base/4096/bf16": "training base, 4096",
}
TRANSLATION = {
    "t2t_big/btokens/beam4/bf16": "translating a test set",
    "t2t_big/b1/beam4/bf16": "translating one by one",
}
# The original LightSeq 2.2.1 and fairseq + apex: target tokens a second, measured when the project
# began, before there were result files.
AT_THE_START = {
    "t2t_big/4096/bf16": ("163k", "88k"),
    "t2t_big/16384/bf16": ("214k", "158k-163k"),
    "base/4096/bf16": ("257k", "99k"),
}
NATIVE = "fairseq", "fairseq_no_cudnn", "fairseq_no_cudnn_apex"


def overview_table(train: Rows, generate: Rows, convergence: Rows, translation: Rows) -> list[str]:
    """A line for each measured case, a column for each system; without a row a cell is empty."""
    lines = []
    for case, words in TRAINING.items():
        row = {r["system"]: r for r in train if r["case"] == case}
        speeds = {
            name: f"{r['tokens_per_s'] / 1e3:.0f}k, {r['peak_gib']:.1f} GiB"
            for name, r in row.items()
        }
        native = _fastest_native(row, "tokens_per_s")
        ratio = _ratio(row, native, "tokens_per_s")
        lines.append([
            words, speeds.get("ours", ""), speeds.get(native, ""), ratio,
            speeds.get("torch_compile", ""), "", *AT_THE_START[case],
        ])  # fmt: skip
    for case, words in TRANSLATION.items():
        row = {r["system"]: r for r in generate if r["case"] == case}
        speeds = {
            name: f"{_speed(r['sentences_per_s'])}, {r['peak_gib']:.1f} GiB"
            for name, r in row.items()
        }
        native = _fastest_native(row, "sentences_per_s")
        ratio = _ratio(row, native, "sentences_per_s")
        lines.append([
            words, speeds.get("ours", ""), speeds.get(native, ""), ratio, "",
            speeds.get("ctranslate2", ""), "", "",
        ])  # fmt: skip
    scores = [
        [r["bleu"] for r in convergence if r["system"] == system and r["bleu"] is not None]
        for system in ("lightseq", "fairseq")
    ]
    lines.append(["BLEU, each trains its model", *(_mean(s) for s in scores), *[""] * 5])
    same = [r for r in translation if r["case"] == "beam-5/fp32"]
    pairs = [[r[key] for r in same] for key in ("bleu", "fairseq_bleu")]
    lines.append(["BLEU, the same checkpoint", *(_mean(s) for s in pairs), *[""] * 5])

    head = ["", "lightseq-fairseq", "fairseq", "times as fast", "torch.compile", "CTranslate2",
            "LightSeq\\*", "fairseq + apex\\*"]  # fmt: skip
    rows = [*train, *generate, *convergence, *translation]
    machines = sorted({f"{row['gpu']}; torch {row['torch']}" for row in rows})
    return [*table(head, lines, 1, "pipe"), "", f"{', '.join(machines)}."]


def _fastest_native(row: dict[str, dict[str, Any]], figure: str) -> str:
    natives = [name for name in NATIVE if name in row]
    return max(natives, key=lambda name: row[name][figure], default="")


def _ratio(row: dict[str, dict[str, Any]], native: str, figure: str) -> str:
    both = "ours" in row and native in row
    return f"{row['ours'][figure] / row[native][figure]:.1f}" if both else ""


def _speed(sentences: float) -> str:
    return f"{sentences:.1f}" if sentences < 10 else f"{sentences:.0f}"


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    return f"{mean(values):.2f}" if values else ""
