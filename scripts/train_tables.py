"""The tables and the plots of the results of lightseq-bench train, for tables.py."""

from __future__ import annotations

import math
import re
from typing import Any

from lightseq_fairseq.base.result_rows import table

from . import plots
from .generate_tables import MODELS
from .plots import (
    FAIRSEQ,
    FAIRSEQ_PALE,
    FAIRSEQ_TOO,
    OTHERS,
    OTHERS_PALE,
    OTHERS_TOO,
    OURS,
    OURS_TOO,
    Bars,
    Lanes,
)
from .sources import sourced_table

Rows = list[dict[str, Any]]

TRAIN_PLOT = "scripts/results/train-h200.svg"
TRAIN_SYSTEMS = {
    "ours": ("`lightseq-train`", OURS),
    "ours_packed": ("`lightseq-train --pack-tokens`", OURS_TOO),
    "torch_compile": ("packed PyTorch, torch.compile, CUDA graphs", OTHERS),
    "torch_compile_padded": ("padded PyTorch, torch.compile, CUDA graphs", OTHERS_PALE),
    "transformers_graphs": ("transformers, torch.compile, CUDA graphs", OTHERS_TOO),
    "transformers": ("transformers, torch.compile", OTHERS_PALE),
    "fairseq_no_cudnn_apex": ("fairseq + apex, cuDNN attention off", FAIRSEQ_TOO),
    "fairseq_no_cudnn": ("fairseq, cuDNN attention off", FAIRSEQ),
    "fairseq": ("fairseq as it comes", FAIRSEQ_PALE),
}
PARTS = {
    "gemm": "GEMM", "attention": "attention", "elementwise": "elementwise",
    "cross_entropy": "cross entropy", "optimizer": "optimizer", "all_reduce": "sum over GPUs",
    "gaps": "gaps",
}  # fmt: skip
MIX_TOKENS = 16_384  # of a batch of "bertmix"
LANGUAGE_MODELS = {
    "gpt2_124m": "`ls_transformer_lm_gpt3_small` with dropout 0.1",
    "lm_base": "`ls_transformer_lm`",
    "gpt2_small": "`ls_transformer_lm_gpt2_small`",
    "roberta_base": "`ls_roberta_base`",
    "roberta_large": "`ls_roberta_large`",
    "bart_large": "`ls_bart_large`",
    "marian_base": "`ls_marian_base`",
    "marian_big": "`ls_marian_big`",
    **{
        f"nllb_{x}": f"`ls_transformer_nllb_{x.replace('.', '_')}`"
        for x in ("600m", "1.3b", "3.3b")
    },
}


def train_cases(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """Return case -> system -> row. Models keep their order; small sizes and fast systems first."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: -row["tokens_per_s"]):
        cases.setdefault(row["case"], {})[row["system"]] = row
    models = list(dict.fromkeys(row["case"].split("/")[0] for row in rows))

    def place(case: str) -> tuple[int, int, str]:
        model, size, *rest = case.split("/")
        numbers = map(int, re.findall(r"\d+", size) or [MIX_TOKENS])
        return models.index(model), math.prod(numbers), "/".join(rest)

    return {case: cases[case] for case in sorted(cases, key=place)}


def train_table(rows: Rows) -> list[str]:
    """Return the table of each system's speed in each case, and one of the parts of our step."""
    lines, parts = [], []
    ours = [row["part_ms"] for row in rows if row["system"] == "ours"]
    shown = {part: name for part, name in PARTS.items() if any(ms.get(part) for ms in ours)}
    for case, systems in train_cases(rows).items():
        fairseq = [row["tokens_per_s"] for name, row in systems.items() if "fairseq" in name]
        for system, row in systems.items():
            compares = fairseq and system != "ours_packed"
            ratio = f"{row['tokens_per_s'] / max(fairseq):.2f}" if compares else ""
            first = "" if row["first_100_s"] is None else f"{row['first_100_s']:.1f} s"
            lines.append(([
                f"`{case}`", TRAIN_SYSTEMS[system][0], f"{row['tokens_per_s'] / 1e3:.0f}k", ratio,
                f"{row['ms_per_step']:.1f} ({row['ms_p20']:.1f}-{row['ms_p80']:.1f})",
                f"{row['gpu_busy']:.0%}", f"{row['floor_share']:.0%}",
                f"{row['sustained_floor_share']:.0%}", f"{row['peak_gib']:.1f}", first,
                str(row["warm_up"]),
            ], [row]))  # fmt: skip
        if "ours" in systems:
            part_ms = systems["ours"]["part_ms"]
            parts.append([f"`{case}`", *(f"{part_ms.get(part, 0.0):.2f}" for part in shown)])
    head = ["case", "system", "target tokens/s", "x fairseq", "ms a step (p20-p80)", "GPU busy",
            "of the floor", "sustained", "GiB of the GPU", "first 100 updates",
            "warm-up"]  # fmt: skip
    table_of_parts = table(["our step, ms", *shown.values()], parts, 1, "pipe")
    return sourced_table(
        head, lines, 2, f"{words_of_cases(rows)}; "
        '"x fairseq": target tokens/s, divided by those of the fastest row of fairseq in the case; '
        'speeds are medians over intervals of 50 updates, after the updates in "warm-up"; '
        '"of the floor": minimum time of a step (GEMMs at 790 TFLOP/s, which the GPU reaches in '
        "bursts, the least possible bytes at 4.3 TB/s), divided by the measured time; "
        '"sustained": the same with GEMMs at 630 TFLOP/s, the most at the power limit; "GPU busy" '
        "and the parts of a step come from a profile of ten or 30 steps. A profiled step is "
        "slower. So if steps wait for the GPU, the table has the shares in the profile (the true "
        "share of busy is higher); otherwise it has the times of the kernels, scaled to the tokens "
        "of the other steps; GiB: memory of the GPU that the process uses, without the CUDA "
        'context; "first 100 updates": a new process, without stored algorithms or compiled code',
        [*table_of_parts, ""],
    )  # fmt: skip


def fp8_table(rows: Rows) -> list[str]:
    """Return the table of our speed and memory in fp8, beside the row of the case in bf16."""
    lines = []
    for case, systems in train_cases(rows).items():
        ours = systems.get("ours")
        bf16 = train_cases(rows).get(case.replace("/fp8", "/bf16"), {}).get("ours")
        if "/fp8" not in case or ours is None or bf16 is None:
            continue
        speeds = [row["tokens_per_s"] for row in (bf16, ours)]
        lines.append(([
            f"`{case.removesuffix('/fp8')}`", *(f"{speed / 1e3:.0f}k" for speed in speeds),
            f"{speeds[1] / speeds[0]:.2f}", *(f"{row['peak_gib']:.1f}" for row in (bf16, ours)),
        ], [bf16, ours]))  # fmt: skip
    head = ["case", "bf16, target tokens/s", "fp8", "times as fast", "GiB, bf16", "GiB, fp8"]
    about = "the source of bf16 is named first"
    return sourced_table(head, lines, 1, about) if lines else []


def train_by_case(rows: Rows) -> list[str]:
    """Return a table with a line for each case with fairseq: fairseq's fastest system, and ours."""
    lines, shown = [], []
    for case, systems in train_cases(rows).items():
        native = [row for name, row in systems.items() if "fairseq" in name]
        if not native or "ours" not in systems:
            continue
        ours, fairseq = systems["ours"], max(native, key=lambda row: row["tokens_per_s"])
        shown += [ours, fairseq]
        speed, native_speed = ours["tokens_per_s"], fairseq["tokens_per_s"]
        lines.append([
            f"`{case}`", f"{speed / 1e3:.0f}k", f"{native_speed / 1e3:.0f}k",
            f"{speed / native_speed:.1f}", f"{ours['ms_per_step']:.1f}", f"{ours['peak_gib']:.1f}",
            f"{fairseq['peak_gib']:.1f}",
        ])  # fmt: skip
    head = ["case", "`lightseq-train`, target tokens/s", "fairseq", "times as fast", "ms a step",
            "GiB", "fairseq's"]  # fmt: skip
    gpus = sorted({f"{row['gpu']}; torch {row['torch']}" for row in shown})
    models = dict.fromkeys(row["case"].split("/")[0] for row in shown)
    archs = [f", `{name}` {LANGUAGE_MODELS[name]}" for name in models if name in LANGUAGE_MODELS]
    return [
        *table(head, lines, 1, "pipe"),
        "",
        f"{'; '.join(gpus)}; {words_of_cases(shown)}; `t2t_big` is "
        "`ls_transformer_wmt_en_de_big_t2t`, `12e12d` the same with 12 layers each"
        f"{''.join(archs)}.",
    ]


def words_of_cases(rows: Rows) -> str:
    """Return what the parts of a case are."""
    sizes = {row["case"].split("/")[1] for row in rows}
    text = any(re.fullmatch(r"\d+x\d+", size) for size in sizes)
    mix = any(size.startswith("bertmix") for size in sizes)
    blocks = ", for language models the tokens of a block x its blocks" * text
    blocks += f", for bertmix {MIX_TOKENS} if it has no number" * mix
    if any(size.startswith("sentences") for size in sizes):
        blocks += ", for fine-tuning the sentences of a batch"
    if any(size.startswith("summaries") for size in sizes):
        blocks += f", for summaries {MIX_TOKENS} if it has no number"
    if any(size.startswith("denoising") for size in sizes):
        blocks += ", for denoising the tokens of a block (x its blocks: 32 without a number)"
    if any(size.startswith("verses") for size in sizes):
        blocks += ", for verses the pairs of a batch (64 without a number)"
    return f"case: model, max-tokens of a GPU{blocks}, precision"


def train_plot(rows: Rows) -> Bars:
    """Return the plot of speeds on one GPU: each case that has another system's row.

    Our speed in fp8 is in the group of its case in bf16.
    """
    panels: dict[str, dict[str, Any]] = {}
    systems_shown = {"fp8": ("`lightseq-train --fp8`", plots.OURS_PALE), **TRAIN_SYSTEMS}
    cases = train_cases(rows)
    for case, systems in cases.items():
        if {"ours", "ours_packed"} >= systems.keys() or case.count("/") > 2:  # several GPUs
            continue
        speeds = {name: row["tokens_per_s"] for name, row in systems.items()}
        if fp8 := cases.get(case.replace("/bf16", "/fp8"), {}).get("ours"):
            speeds = {"fp8": fp8["tokens_per_s"], **speeds}
        model, size = in_words(case).removesuffix(", bf16").split(", ", 1)
        panels.setdefault(family(case), {})[f"{model}, {size}"] = {
            systems_shown[name][0].replace("`", ""): (
                value / max(speeds.values()),
                plots.speed(value),
            )
            for name, value in speeds.items()
        }
    return Bars(
        title=f"Training speed, bf16, {plots.gpus(rows)}",
        axis="share of the fastest system's speed; the numbers are target tokens a second",
        colours=plots.colours_of(panels, systems_shown.values()),
        panels=panels,
    )


def several_gpus_plot(rows: Rows) -> Bars | None:
    """Return the plot of our speeds on 1, 2 and 4 GPUs; None without a row of several GPUs."""
    colours = {"1 GPU": plots.OURS_PALE, "2 GPUs": OURS_TOO, "4 GPUs": OURS}
    groups: dict[str, dict[str, tuple[float, str]]] = {}
    speeds = {row["case"]: row["tokens_per_s"] for row in rows if row["system"] == "ours"}
    for case in speeds:
        found = {n: speeds.get(case if n == 1 else f"{case}/x{n}") for n in (1, 2, 4)}
        if found[2] is None:
            continue
        groups[in_words(case)] = {
            name: (value / (n * found[1]), f"{plots.speed(value)}, {value / found[1]:.2f} x")
            for (n, value), name in zip(found.items(), colours)
            if value is not None
        }
    if not groups:
        return None
    return Bars(
        title=f"Training on several GPUs, {plots.gpus(rows)}",
        axis="share of perfect scaling; the numbers are target tokens a second, and times one GPU",
        colours=colours,
        panels={"": groups},
    )


def overlap_plot(rows: Rows) -> Lanes | None:
    """Return the plot of our steps of Transformer big on several GPUs; None without such a row."""
    found = [
        row
        for row in rows
        if row["case"].startswith("t2t_big/")
        and row["system"].startswith("ours")
        and row.get("overlap", {}).get("hidden") is not None
    ]
    if not found:
        return None
    panels = {
        f"{in_words(row['case'])}, {TRAIN_SYSTEMS[row['system']][0].strip('`')}: "
        f"{row['overlap']['hidden']:.0%} of the collectives' time is hidden": row["overlap"][
            "lanes_ms"
        ]
        for row in found
    }
    colours = {"computation": plots.OURS, "collectives": plots.OTHERS}
    return Lanes(f"One step of the first GPU, {plots.gpus(found)}", colours, panels)


def family(case: str) -> str:
    """Return the title of the panel that shows a case."""
    model = case.partition("/")[0]
    if model.startswith("roberta"):
        return "RoBERTa"
    if model.startswith(("bart", "nllb", "marian")):
        return "BART, NLLB and Marian"
    return "Language models" if model in LANGUAGE_MODELS else "Translation models"


def in_words(case: str) -> str:
    """ "t2t_big/4096/bf16" -> "Transformer big, 4096 tokens, bf16"."""
    model, size, precision, *gpus = case.split("/")
    if size.startswith("sentences"):
        tokens = f"{size.removeprefix('sentences')} sentences"
    elif size.startswith("bertmix"):
        tokens = f"{size.removeprefix('bertmix') or MIX_TOKENS} tokens in BERT's mix of lengths"
    elif size.startswith("summaries"):
        tokens = f"{size.removeprefix('summaries') or MIX_TOKENS} tokens of texts to summarise"
    elif size.startswith("denoising"):
        block, _, blocks = size.removeprefix("denoising").partition("x")
        tokens = f"{blocks or 32} x {block} noised tokens"
    elif size.startswith("verses"):
        tokens = f"{size.removeprefix('verses') or 64} verses"
    else:
        block, _, blocks = size.partition("x")
        tokens = f"{blocks} x {block} tokens" if blocks else f"{size} tokens"
    return ", ".join([MODELS[model], tokens, precision, *(f"{x[1:]} GPUs" for x in gpus)])
