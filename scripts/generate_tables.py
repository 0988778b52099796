"""The tables and the plot of the results of lightseq-bench generate, for tables.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightseq_fairseq.base.result_rows import table

from .plots import FAIRSEQ, OTHERS, OTHERS_TOO, OURS, Bars, colours_of, gpus, speed
from .sources import sourced_table

Rows = list[dict[str, Any]]

GENERATE_PLOT = "scripts/results/generate-h200.svg"
MODELS = {
    "t2t_big": "Transformer big",
    "12e12d": "Transformer big, 12+12 layers",
    "24e24d": "Transformer big, 24+24 layers",
    "base": "Transformer base",
    "iwslt": "Transformer iwslt",
    "gpt2_124m": "GPT-2 124M",
    "lm_base": "language model of 6 layers",
    "gpt2_small": "language model of 24 layers",
    "roberta_base": "RoBERTa base",
    "roberta_large": "RoBERTa large",
    "bart_large": "BART large",
    "marian_base": "Marian base",
    "marian_big": "Marian big",
    "nllb_600m": "NLLB 600M",
    "nllb_1.3b": "NLLB 1.3B",
    "nllb_3.3b": "NLLB 3.3B",
}
SYSTEMS = {
    "ours": ("`lightseq-generate`", OURS),
    "ctranslate2": ("CTranslate2", OTHERS),
    "transformers": ("transformers", OTHERS_TOO),
    "fairseq_no_cudnn": ("fairseq, cuDNN attention off", FAIRSEQ),
}
COLUMNS = {
    "ours": "`lightseq-generate`, sentences/s", "ctranslate2": "CTranslate2",
    "transformers": "transformers", "fairseq_no_cudnn": "fairseq",
}  # fmt: skip
LANGUAGE_SYSTEMS = {
    "ours": SYSTEMS["ours"][0],
    "ctranslate2": SYSTEMS["ctranslate2"][0],
    "transformers": "transformers, static cache, compiled",
    "fairseq_no_cudnn": SYSTEMS["fairseq_no_cudnn"][0],
}
FEATURES_SYSTEMS = {
    "ours": "`lightseq_fairseq.RobertaModel`",
    "transformers": "transformers, compiled",
    "fairseq_no_cudnn": SYSTEMS["fairseq_no_cudnn"][0],
}


def cases(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """Return case -> system -> row; cases in the order of the file, the fastest system first."""
    found: dict[str, dict[str, dict[str, Any]]] = {row["case"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: row["decode_s"]):
        found[row["case"]][row["system"]] = row
    return found


def compared(rows: Rows, speed: str) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Yield (case, system, row, its column ``speed`` as a multiple of fairseq's, "" if unknown)."""
    for case, systems in cases(rows).items():
        fairseq = systems.get("fairseq_no_cudnn")
        for system, row in systems.items():
            yield case, system, row, f"{row[speed] / fairseq[speed]:.1f}" if fairseq else ""


def generate_table(rows: Rows) -> list[str]:
    """Return the table of speed, latency and memory of each system in each case."""
    lines = []
    for case, system, row, ratio in compared(rows, "sentences_per_s"):
        lines.append(([
            f"`{case}`", SYSTEMS[system][0], f"{row['sentences_per_s']:.0f}",
            str(row["tokens_per_s"]), ratio, f"{row['decode_s']:.3f}",
            f"{row['p50_ms']:.1f}, {row['p99_ms']:.1f}", f"{row['peak_gib']:.1f}",
            f"{row['load_s']:.1f}", f"{row['first_s']:.2f}",
        ], [row]))  # fmt: skip
    head = ["case", "system", "sentences/s", "tokens/s", "x fairseq", "decode s",
            "ms a batch p50, p99", "GiB", "load s", "first pass s"]  # fmt: skip
    tokens = sorted({row["max_tokens"] for row in rows if "/btokens/" in row["case"]})
    by_tokens = f"; `btokens`: at most {', '.join(map(str, tokens))} source tokens" * bool(tokens)
    texts = any("/cnn" in row["case"] for row in rows) * (
        "; `cnn`: batches of 32 texts of 700 tokens on average, summaries of 141 tokens, with "
        "fairseq's settings for CNN/DailyMail"
    )
    return sourced_table(
        head, lines, 2,
        f"case: model, sentences of a batch, beam, precision{by_tokens}{texts}; random weights, "
        "hypotheses as long as the longest source of their batch; medians over passes after the "
        "warm-up; not in the time: loading the model, making batches, text; in the first pass "
        "ours captures graphs and times algorithms",
    )  # fmt: skip


def generate_by_case(rows: Rows) -> list[str]:
    """Return a table: per case, sentences per second of each system, and our speed-up."""
    lines = []
    shown = [name for name in COLUMNS if any(row["system"] == name for row in rows)]
    for case, systems in cases(rows).items():
        speeds = {name: row["sentences_per_s"] for name, row in systems.items()}
        fairseq = speeds.get("fairseq_no_cudnn")
        ours = systems["ours"]
        cells = [f"{speeds[name]:.0f}" if name in speeds else "" for name in shown]
        cells.append(f"{speeds['ours'] / fairseq:.1f}" if fairseq else "")
        cells += [f"{ours['p50_ms']:.1f}, {ours['p99_ms']:.1f}", f"{ours['peak_gib']:.1f}"]
        lines.append([f"`{case}`", *cells])
    head = ["case", *(COLUMNS[name] for name in shown), "times as fast as fairseq",
             "ms a batch p50, p99", "GiB"]  # fmt: skip
    gpus = sorted({f"{row['gpu']}; torch {row['torch']}" for row in rows})
    below = f"{'; '.join(gpus)}; case: model, sentences of a batch, beam, precision."
    return [*table(head, lines, 1, "pipe"), "", below]


def generate_text(rows: Rows) -> list[str]:
    """Return a table: per case of greedy search, new tokens per second of each system."""
    return _beside_fairseq(
        rows, LANGUAGE_SYSTEMS, "tokens_per_s", "new tokens/s",
        "prompts or texts of a batch, tokens of each + new tokens, precision; random weights, "
        "greedy search; the time to read the prompts or texts is included",
    )  # fmt: skip


def generate_trained(rows: Rows) -> list[str]:
    """Return a table: per case of a trained model, the speed of each system, and for ours what one
    search of all batches saves."""
    lines = []
    for case, system, row, ratio in compared(rows, "sentences_per_s"):
        cells = [f"`{case}`", SYSTEMS[system][0], f"{row['sentences_per_s']:.0f}",
                 str(row["tokens_per_s"]), ratio, f"{row['peak_gib']:.1f}"]  # fmt: skip
        saved = ["", "", ""]
        if "steps" in row:
            saved = [f"{1 - row['steps'] / row['steps_one_by_one']:.0%}",
                     f"{row['one_by_one_s'] / row['decode_s']:.2f}",
                     f"{row['same_words']:.1%}"]  # fmt: skip
        lines.append(([*cells, *saved], [row]))
    head = ["case", "system", "sentences/s", "tokens/s", "x fairseq", "GiB", "steps saved",
            "x one batch at a time", "same words"]  # fmt: skip
    return sourced_table(
        head, lines, 2,
        "case: batch, beam, precision; medians over passes after the warm-up; last columns: one "
        "search of all batches beside one search for each batch: steps, speed, and the share of "
        "sentences with the same words",
    )  # fmt: skip


def generate_features(rows: Rows) -> list[str]:
    """Return a table: per case of RoBERTa, sentences per second of each system."""
    tokens = sorted({str(row["max_tokens"]) for row in rows if "max_tokens" in row})
    by_tokens = f" (`btokens`: at most {', '.join(tokens)} tokens, pads included)" * bool(tokens)
    return _beside_fairseq(
        rows, FEATURES_SYSTEMS, "sentences_per_s", "sentences/s",
        f"sentences of a batch{by_tokens}, precision; random weights; from token numbers in host "
        "memory to features on the GPU",
    )  # fmt: skip


def _beside_fairseq(
    rows: Rows, names: dict[str, str], speed: str, unit: str, about: str
) -> list[str]:
    """Return a table of the column ``speed`` of each system, its latency and its memory.

    names: of the systems. about: what a case is after its model, and what is measured.
    """
    lines = []
    for case, system, row, ratio in compared(rows, speed):
        lines.append(([
            f"`{case}`", names[system], f"{row[speed]:.0f}", ratio,
            f"{row['p50_ms']:.1f}, {row['p99_ms']:.1f}", f"{row['peak_gib']:.1f}",
        ], [row]))  # fmt: skip
    head = ["case", "system", unit, "x fairseq", "ms a batch p50, p99", "GiB"]
    return sourced_table(head, lines, 2, f"case: model, {about}")


def generate_plot(rows: Rows) -> Bars:
    """Return the plot of sentences per second, in each case as a share of the fastest system's."""
    panels: dict[str, dict[str, Any]] = {}
    for case, systems in cases(rows).items():
        fastest = max(row["sentences_per_s"] for row in systems.values())
        model, size = in_words(case, next(iter(systems.values()))).split(", ", 1)
        panels.setdefault(model, {})[size.removesuffix(", bf16")] = {
            SYSTEMS[system][0].strip("`"): (
                row["sentences_per_s"] / fastest,
                speed(row["sentences_per_s"]),
            )
            for system, row in systems.items()
        }
    return Bars(
        title=f"Translation speed, bf16, {gpus(rows)}",
        axis="share of the fastest system's speed; the numbers are sentences a second",
        colours=colours_of(panels, SYSTEMS.values()),
        panels=panels,
    )


def in_words(case: str, row: dict[str, Any]) -> str:
    """ "t2t_big/b32/beam4/bf16" -> "Transformer big, 32 sentences at once, beam 4, bf16"."""
    model, batch, beam, precision = case.split("/")
    size = f"{batch.removeprefix('b')} sentence{'s' * (batch != 'b1')}"
    if batch.startswith("cnn"):
        size = f"{batch.removeprefix('cnn') or 32} texts to summarise"
    if "tokens" in batch:
        size = f"{row['max_tokens']} tokens"
    return f"{MODELS[model]}, {size} at once, {beam.replace('beam', 'beam ')}, {precision}"
