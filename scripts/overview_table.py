"""The overview of all measurements: README's chart and a table, for tables.py."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean
from typing import Any

from lightseq_fairseq.base.result_rows import table

from .convergence_tables import of_all_systems
from .plots import FAIRSEQ, OTHERS, OURS, Bars, gpus, speed

Rows = list[dict[str, Any]]

TRAINING = {
    "t2t_big/4096/bf16": "training big, 4096 (tokens/s)",
    "t2t_big/16384/bf16": "training big, 16384 (tokens/s)",
    "base/4096/bf16": "training base, 4096 (tokens/s)",
    "gpt2_124m/1024x32/bf16": "training GPT-2 (tokens/s)",
    "lm_base/512x32/bf16": "training `transformer_lm` (tokens/s)",
}
TRANSLATION = {
    "t2t_big/btokens/beam4/bf16": "translating, large batches (sentences/s)",
    "t2t_big/b1/beam4/bf16": "translating, batch size 1 (sentences/s)",
}
NATIVE = "fairseq", "fairseq_no_cudnn", "fairseq_no_cudnn_apex"


def overview_table(train: Rows, generate: Rows, convergence: Rows, translation: Rows) -> list[str]:
    """Return a line per case and a column per system; a cell without a result row is empty."""
    lines = []
    for case, words in TRAINING.items():
        ours, native, ratio, cells = _systems(train, case, "tokens_per_s")
        lines.append([words, ours, native, ratio, cells.get("torch_compile", ""), ""])
    for case, words in TRANSLATION.items():
        ours, native, ratio, cells = _systems(generate, case, "sentences_per_s")
        lines.append([words, ours, native, ratio, "", cells.get("ctranslate2", "")])
    trained = of_all_systems(convergence)
    scores = [
        [r["bleu"] for r in trained if r["system"] == system and r["bleu"] is not None]
        for system in ("lightseq", "fairseq")
    ]
    lines.append(["BLEU, separately trained models", *(_mean(s) for s in scores), *[""] * 3])
    same = [r for r in translation if r["case"] == "beam-5/fp32"]
    pairs = [[r[key] for r in same] for key in ("bleu", "fairseq_bleu")]
    lines.append(["BLEU, both with the same checkpoint", *(_mean(s) for s in pairs), *[""] * 3])

    head = ["", "lightseq-fairseq", "fairseq", "speed-up", "torch.compile", "CTranslate2"]
    rows = [*train, *generate, *trained, *translation]
    machines = sorted({f"{row['gpu']}; torch {row['torch']}" for row in rows})
    return [*table(head, lines, 1, "pipe"), "", f"{', '.join(machines)}."]


# Of the chart: name of a group -> its case, the key of its speed, and the unit.
SHOWN = {
    "train a translation model\n(Transformer big)":
        ("t2t_big/4096/bf16", "tokens_per_s", "tokens/s"),
    "train a language model\n(GPT-2)":
        ("gpt2_124m/1024x32/bf16", "tokens_per_s", "tokens/s"),
    "train RoBERTa\n(large)":
        ("roberta_large/512x32/bf16", "tokens_per_s", "tokens/s"),
    "translate\n(Transformer big, beam 4)":
        ("t2t_big/btokens/beam4/bf16", "sentences_per_s", "sentences/s"),
    "generate text\n(GPT-2, 32 prompts)":
        ("gpt2_124m/b32/128+256/bf16", "tokens_per_s", "tokens/s"),
}  # fmt: skip
OVERVIEW_PLOT = "scripts/results/overview-h200.svg"
COMPILED = "torch_compile", "transformers", "transformers_graphs", "ctranslate2"


def overview_plot(train: Rows, generate: Rows, text: Rows) -> Bars | None:
    """Return README's chart: ours, the fastest compiled system and fairseq's fastest, for the cases
    that have all three; None if there is no such case."""
    names = "lightseq-fairseq", "fastest compiled system", "fairseq"
    rows = [*train, *generate, *text]
    groups = {}
    for words, (case, key, unit) in SHOWN.items():
        speeds = {row["system"]: row[key] for row in rows if row["case"] == case}
        best = [
            max((speeds[system] for system in systems if system in speeds), default=None)
            for systems in (("ours",), COMPILED, NATIVE)
        ]
        if None in best:
            continue
        ours, _, fairseq = best
        texts = [speed(value) for value in best]
        texts[0] += f" {unit}, {ours / fairseq:.1f} times fairseq"
        groups[words] = {name: (value / ours, its) for name, value, its in zip(names, best, texts)}
    if not groups:
        return None
    return Bars(
        title=f"Speed on one {gpus(rows)}, bf16",
        axis="share of lightseq-fairseq's speed",
        colours=dict(zip(names, (OURS, OTHERS, FAIRSEQ))),
        panels={"": groups},
    )


def _systems(rows: Rows, case: str, figure: str) -> tuple[str, str, str, dict[str, str]]:
    """Return the cells of a case: ours, fairseq's fastest, their ratio; and all by system."""
    row = {r["system"]: r for r in rows if r["case"] == case}
    cells = {name: f"{speed(r[figure])}, {r['peak_gib']:.1f} GiB" for name, r in row.items()}
    natives = [name for name in NATIVE if name in row]
    native = max(natives, key=lambda name: row[name][figure], default="")
    both = "ours" in row and native in row
    ratio = f"{row['ours'][figure] / row[native][figure]:.1f}" if both else ""
    return cells.get("ours", ""), cells.get(native, ""), ratio, cells


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    return f"{mean(values):.2f}" if values else ""
