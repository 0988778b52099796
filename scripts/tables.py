"""Write the tables of measurements into the documents, and the plots, from the result files.

    python -m scripts.tables [--check]

A table is between ``<!-- table: NAME -->`` and ``<!-- end -->`` in one of ``DOCUMENTS``. ``TABLES``
lists their result files. A table whose result files are missing is not changed. ``--check`` writes
nothing, and fails if a table or the content of a plot does not agree with its result files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lightseq_fairseq.result_rows import table

from . import plots
from .convergence_tables import convergence_plot, convergence_table, precision_table
from .generate_tables import (
    GENERATE_PLOT,
    MODELS,
    generate_by_case,
    generate_features,
    generate_plot,
    generate_table,
    generate_text,
)
from .op_tables import OPS_PLOT, attention_table, op_plot, op_table
from .overview_table import overview_table
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
    Picture,
)
from .sources import machine, sourced_table
from .translation_tables import translation_table

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md", "docs/measured.md", "examples/language_model/README.md",
    "examples/roberta/README.md",
)  # fmt: skip
TRAIN_PLOT = "scripts/results/train-h200.svg"
CONVERGENCE = "scripts/results/convergence-h200.json"
TRAIN_SYSTEMS = {
    "ours": ("`lightseq-train`", OURS),
    "ours_packed": ("`lightseq-train --pack-tokens`", OURS_TOO),
    "torch_compile": ("packed PyTorch, torch.compile, CUDA graphs", OTHERS),
    "torch_compile_padded": ("padded PyTorch, torch.compile, CUDA graphs", OTHERS_PALE),
    "transformers": ("transformers, torch.compile, CUDA graphs", OTHERS_TOO),
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
}
SYSTEMS = {"lightseq": "`lightseq-train`", "fairseq": "fairseq (same flags, `--native`)"}


def bleu_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of BLEU, updates and training time of each run."""
    cells = {
        "BLEU": lambda row: f"{row['bleu']:.2f}",
        "updates": lambda row: str(row["updates"]),
        "training": lambda row: f"{row['train_seconds']:.0f} s",
    }
    signatures = sorted({row["signature"] for row in rows})
    return runs_table(rows, cells, f"sacrebleu `{'`, `'.join(signatures)}`")


def perplexity_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of test perplexity and updates of each run."""
    cells = {
        "test perplexity": lambda row: f"{row['perplexity']:.2f}",
        "bits a token": lambda row: f"{row['bits_per_token']:.3f}",
        "updates": lambda row: str(row["updates"]),
    }
    versions = sorted({row["python"] for row in rows})
    return runs_table(rows, cells, f"standard library of Python {', '.join(versions)}")


def accuracy_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of test accuracy and updates of each run, and the means over seeds."""
    cells = {
        "test accuracy": lambda row: f"{row['accuracy']:.1f}%",
        "updates of pre-training": lambda row: str(row["pretraining_updates"]),
        "of fine-tuning": lambda row: str(row["updates"]),
    }
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["case"], row["system"]), []).append(row["accuracy"])
    means = [
        f"{case}, {SYSTEMS[system]}: mean of {len(its)} seeds {sum(its) / len(its):.1f}%"
        for (case, system), its in found.items()
        if len(its) > 1
    ]
    return runs_table(rows, cells, "; ".join(means or ["one seed for each system"]))


def runs_table(
    rows: list[dict[str, Any]], cells: dict[str, Callable[[dict[str, Any]], str]], about: str
) -> list[str]:
    """Return a table with a line for each run of an example, and a sentence with its conditions.

    If the runs are from several machines, a column names the machine.

    Args:
        cells: head of a column -> the function that makes a cell of a row.
        about: a condition that is not in every row; the sentence ends with it.
    """
    ordered = sorted(rows, key=lambda row: (row["case"], row["seed"], row["system"] != "lightseq"))
    if len({machine(row) for row in rows}) > 1:
        cells = {"machine": machine, **cells}
    lines = [
        ([SYSTEMS[row["system"]], str(row["seed"]), *(cell(row) for cell in cells.values())], [row])
        for row in ordered
    ]
    return sourced_table(["system", "seed", *cells], lines, 1, about)


def train_cases(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
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


def train_table(rows: list[dict[str, Any]]) -> list[str]:
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


def fp8_table(rows: list[dict[str, Any]]) -> list[str]:
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


def train_by_case(rows: list[dict[str, Any]]) -> list[str]:
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


def words_of_cases(rows: list[dict[str, Any]]) -> str:
    """Return what the parts of a case are."""
    sizes = {row["case"].split("/")[1] for row in rows}
    text = any(re.fullmatch(r"\d+x\d+", size) for size in sizes)
    mix = any(size.startswith("bertmix") for size in sizes)
    blocks = ", for language models the tokens of a block x its blocks" * text
    blocks += f", for bertmix {MIX_TOKENS} if it has no number" * mix
    if any(size.startswith("sentences") for size in sizes):
        blocks += ", for fine-tuning the sentences of a batch"
    return f"case: model, max-tokens of a GPU{blocks}, precision"


def train_plot(rows: list[dict[str, Any]]) -> Bars:
    """Return the plot of target tokens per second of each system in each case."""
    groups = {
        in_words(case): {
            TRAIN_SYSTEMS[system][0].strip("`"): (
                row["tokens_per_s"],
                f"{row['tokens_per_s'] / 1e3:.0f}k",
            )
            for system, row in systems.items()
        }
        for case, systems in train_cases(rows).items()
    }
    measured = {name for bars in groups.values() for name in bars}
    systems = {name.strip("`"): colour for name, colour in TRAIN_SYSTEMS.values()}
    return Bars(
        title=f"Training speed, {plots.gpus(rows)}",
        axis="target tokens a second; beside the model stands the size of a batch",
        percent=False,
        colours={name: colour for name, colour in systems.items() if name in measured},
        groups=groups,
    )


def overlap_plot(rows: list[dict[str, Any]]) -> Lanes | None:
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


def in_words(case: str) -> str:
    """ "t2t_big/4096/bf16" -> "Transformer big, 4096 tokens, bf16"."""
    model, size, precision, *gpus = case.split("/")
    if size.startswith("sentences"):
        tokens = f"{size.removeprefix('sentences')} sentences"
    elif size.startswith("bertmix"):
        tokens = f"{size.removeprefix('bertmix') or MIX_TOKENS} tokens in BERT's mix of lengths"
    else:
        block, _, blocks = size.partition("x")
        tokens = f"{blocks} x {block} tokens" if blocks else f"{size} tokens"
    return ", ".join([MODELS[model], tokens, precision, *(f"{x[1:]} GPUs" for x in gpus)])


def check_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the checks of gpu_check.sh: numbers of tests, and what they found."""
    lines = []
    for row in rows:
        found = "; ".join(row.get("summary", []))
        failures = row["failures"] + row["errors"]
        cells = row["case"], row["tests"], failures, row["skipped"], found
        gpu = row["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
        lines.append([*map(str, cells), gpu, row["commit"][:10]])
    head = ["check", "tests", "failures", "skipped", "found", "GPU", "commit"]
    return [
        *table(head, lines, 1, "pipe"),
        "",
        f"torch {', '.join(sorted({r['torch'] for r in rows}))}.",
    ]


TRAIN, GENERATE = "scripts/results/train-h200.json", "scripts/results/generate-h200.json"
TRANSLATION = "scripts/results/translation-h200.json"
# name of a table -> its result files, and the function that makes the table from their rows
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., list[str]]]] = {
    "overview": ((TRAIN, GENERATE, CONVERGENCE, TRANSLATION), overview_table),
    "quickstart": (("examples/quickstart/results/bleu.json",), bleu_table),
    "language_model": (("examples/language_model/results/perplexity.json",), perplexity_table),
    "roberta": (("examples/roberta/results/accuracy.json",), accuracy_table),
    "ops": (("scripts/results/ops-h200.json",), op_table),
    "attention": (("scripts/results/ops-h200.json",), attention_table),
    "train": ((TRAIN,), train_table),
    "train_by_case": ((TRAIN,), train_by_case),
    "fp8": ((TRAIN,), fp8_table),
    "generate": ((GENERATE,), generate_table),
    "generate_by_case": ((GENERATE,), generate_by_case),
    "generate_text": (("scripts/results/generate-text-h200.json",), generate_text),
    "generate_features": (("scripts/results/generate-features-h200.json",), generate_features),
    "convergence": ((CONVERGENCE,), convergence_table),
    "precisions": (("scripts/results/precisions-h200.json",), precision_table),
    "translation": ((TRANSLATION,), translation_table),
    "gpu_check": (("scripts/results/gpu-check.json",), check_table),
}
PLOTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Picture | None]]] = {
    OPS_PLOT: ("scripts/results/ops-h200.json", op_plot),
    TRAIN_PLOT: (TRAIN, train_plot),
    "docs/overlap.svg": (TRAIN, overlap_plot),
    GENERATE_PLOT: (GENERATE, generate_plot),
    "docs/convergence.svg": (CONVERGENCE, convergence_plot),
}


def filled(text: str) -> str:
    """Return ``text`` with every table rewritten."""

    def table(match: re.Match[str]) -> str:
        paths, render = TABLES[match[1]]
        if not all((ROOT / path).exists() for path in paths):
            return match[0]
        lines = render(*map(rows_of, paths))
        return "\n".join([f"<!-- table: {match[1]} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def rows_of(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a table or plot is out of date"
    )
    check = parser.parse_args().check
    documents = [ROOT / name for name in DOCUMENTS if (ROOT / name).exists()]
    texts = {document: document.read_text(encoding="utf-8") for document in documents}
    measured = [
        name for name, (paths, _) in TABLES.items() if all((ROOT / path).exists() for path in paths)
    ]
    places = "".join(texts.values())
    missing = [name for name in measured if f"<!-- table: {name} -->" not in places]
    if missing:
        sys.exit(f"{' and '.join(DOCUMENTS)} have no place for the tables {', '.join(missing)}")

    for document, text in texts.items():
        if not check:
            document.write_text(filled(text), encoding="utf-8")
        elif text != filled(text):
            stale(document)
    for name, (path, picture_of) in PLOTS.items():
        if (ROOT / path).exists():
            picture = picture_of(rows_of(path))
            if picture is None:
                continue
            if not check:
                plots.draw(picture, ROOT / name)
            elif not plots.is_drawn(picture, ROOT / name):
                stale(ROOT / name)


def stale(file: Path) -> NoReturn:
    sys.exit(f"{file.relative_to(ROOT)} differs from its result file: run python -m scripts.tables")


if __name__ == "__main__":
    main()
