"""The table and the plot of the results of bench_ops.py, for tables.py."""

from __future__ import annotations

from typing import Any

from .plots import OTHERS, OURS, Bars, gpus
from .sources import sourced_table

Rows = list[dict[str, Any]]

# Rows in the table: one number of tokens, and the only sizes of Adam and of the cast of weights.
OPS_SIZE, UPDATE_SIZES = "T16384", ("N217M", "N176M")
OPS_PLOT = "scripts/results/ops-h200.svg"
# Limited by arithmetic, not by memory; so is attention.
PRODUCTS = "linear", "activation_linear", "fp8_linear", "fp8_activation_linear"
PLOTTED = {"ours": ("lightseq-fairseq", OURS), "compile": ("torch.compile", OTHERS)}
# Words for parts of names, in the plot; the table has the names of the code.
WORDS = {
    "dropout_residual_layer_norm": "dropout + residual + LayerNorm",
    "bias_activation_dropout": "bias + activation + dropout",
    "adam_norm": "Adam: norm of the gradient",
    "adam_step": "Adam: update",
    "fp8_quantise": "fp8: cast",
    "fp8_weights": "fp8: cast of all weights",
    "fp8_adam_step": "fp8: Adam's update and cast of all weights",
    "fp8_": "fp8: ",
    "_fwd": ", forward",
    "_bwd": ", backward",
    "_": " ",
}
VARIANTS = {
    "long": "long sentences",
    "c": "1024 columns",
    "f": "4096 columns",
    "c.sums": "1024 columns and their sums",
    "f.sums": "4096 columns and their sums",
    "values.sums": "1024 cast columns and their sums",
}


def op_cases(rows: Rows, precision: str = "bf16") -> dict[str, dict[str, dict[str, Any]]]:
    """Return op -> system -> row for the sizes of the table, in the order of the file."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        op, size, dtype = row["case"].split("/")
        if dtype == precision and size in (OPS_SIZE, *UPDATE_SIZES) and not by_length(row):
            cases.setdefault(op, {})[row["system"]] = row
    return cases


def by_length(row: dict[str, Any]) -> bool:
    """Whether the row is one of attention_table: `attention_fwd.512.causal/T16384/bf16`."""
    op, _, variant = row["case"].partition(".")
    return op.startswith("attention_") and variant[:1].isdigit()


def slower_elsewhere(rows: Rows) -> str:
    """Return a sentence: rows outside the table in which ours is slower than other code."""
    cases: dict[str, dict[str, float]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["system"]] = row["ms"]
    shown = {row["case"] for systems in op_cases(rows).values() for row in systems.values()}
    found = []
    for system, name in (("compile", "torch.compile's code"), ("library", "the library")):
        ratios = {
            case: ms[system] / ms["ours"]
            for case, ms in cases.items()
            if case not in shown and {"ours", system} <= ms.keys()
        }
        slower = [f"`{case}` {ratio:.3f}" for case, ratio in ratios.items() if round(ratio, 3) < 1]
        found.append(
            f"than {name} in {len(slower) or 'none'} of {len(ratios)} rows"
            f"{': ' * bool(slower)}{', '.join(slower)}"
        )
    return f"At other sizes and precisions ours is slower {'; '.join(found)}."


def least_shares(rows: Rows) -> str:
    """Return a sentence with the lowest share of copy bandwidth per precision, at these sizes."""
    least = []
    for precision in dict.fromkeys(row["case"].split("/")[2] for row in rows):
        shares = {
            op: systems["ours"]["copy_share"]
            for op, systems in op_cases(rows, precision).items()
            if "ours" in systems and not op.startswith((*PRODUCTS, "attention"))
        }
        if shares:
            op = min(shares, key=shares.__getitem__)
            least.append(f"{precision} {shares[op]:.0%} (`{op}`)")
    return (
        "Lowest share of the copy bandwidth, without linear and attention: "
        + ", ".join(least)
        + "."
    )


def op_table(rows: Rows) -> list[str]:
    """Return the table: time and rate of every op, and the speed-up over each baseline.

    A sentence below it names the unfavourable rows that the table does not show.
    """
    lines = []
    for op, systems in op_cases(rows).items():
        ours = systems["ours"]
        cells = [f"`{op}`", f"{ours['ms']:.3f}", f"{ours['gb_per_s']:.0f}"]
        cells.append(f"{ours['copy_share']:.0%}")
        for system in ("eager", "compile", "library"):
            ratio = systems[system]["ms"] / ours["ms"] if system in systems else None
            cells.append("" if ratio is None else _marked(f"{ratio:.2f}"))
        lines.append((cells, list(systems.values())))
    head = ["op", "ms", "GB/s", "of a copy", "x eager", "x torch.compile", "x library"]
    cast = "; fp8_weights: 176 M" if any("`fp8_weights`" in cells for cells, _ in lines) else ""
    rows = [row for row in rows if not by_length(row)]
    return sourced_table(
        head, lines, 1,
        f"{OPS_SIZE[1:]} tokens in WMT-like sentences (Adam: 217 M parameters{cast}), width 1024, "
        "ffn 4096, 40 000 words, 16 heads, dropout 0.1, bf16; medians, cold L2; GB/s: the least "
        "possible bytes, divided by the time",
        [f"{slower_elsewhere(rows)} {least_shares(rows)}", ""],
    )  # fmt: skip


def _marked(ratio: str) -> str:
    """Return the printed ratio, with a mark if it is below 1."""
    return ratio if float(ratio) >= 1 else f"**{ratio}, slower**"


def _range(what: str, ratios: list[float]) -> str:
    slower = sum(ratio < 1 for ratio in ratios)
    return (
        f"{what} {min(ratios):.2f} to {max(ratios):.2f}, below 1 in {slower} of {len(ratios)} rows"
    )


def attention_table(rows: Rows) -> list[str]:
    """Return the table of attention by length: forward + backward of ours and of the libraries."""
    cases: dict[str, dict[str, list[float]]] = {}  # variant -> system -> [forward, backward] in ms
    its_rows: dict[str, Rows] = {}  # variant -> rows
    for row in filter(by_length, rows):
        _, _, variant = row["case"].partition("/")[0].partition(".")
        cases.setdefault(variant, {}).setdefault(row["system"], []).append(row["ms"])
        its_rows.setdefault(variant, []).append(row)
    lines = []
    forward: dict[str, list[float]] = {"with dropout": [], "without": []}
    for variant, systems in cases.items():
        length, *words = variant.split(".")
        deterministic = systems.get("library_deterministic")
        if deterministic:  # it has no forward pass of its own
            deterministic.insert(0, systems["library"][0])
        others = [systems[name] for name in ("library", "cudnn") if name in systems]
        ratio = min(map(sum, others)) / sum(systems["ours"])
        alone = min(ms[0] for ms in others) / systems["ours"][0]
        if "window" not in words:
            forward["without" if "nodrop" in words else "with dropout"].append(alone)
        lines.append((
            [
                f"20 to {length}, mean 248" if "bertmix" in words else length,
                next((word for word in ("causal", "window") if word in words), "full"),
                "128" if "w128" in words else "64",
                "0" if "nodrop" in words else "0.1",
                *(
                    f"{sum(ms):.3f} ({ms[0]:.3f})" if ms else ""
                    for ms in (
                        systems["ours"], systems["library"], deterministic, systems.get("cudnn"),
                    )
                ),
                _marked(f"{ratio:.2f}"),
            ],
            its_rows[variant],
        ))  # fmt: skip
    head = [
        "tokens", "mask", "head width", "dropout", "ours", "FlashAttention-2",
        "FlashAttention-2, deterministic", "cuDNN", "x faster library",
    ]  # fmt: skip
    return sourced_table(
        head, lines, 1,
        "16384 tokens, 1024 columns in all heads, bf16; ms, forward + backward (forward alone); "
        "medians, cold L2",
        [f"Forward alone, x faster library: {'; '.join(map(_range, *zip(*forward.items())))}.", ""],
    )  # fmt: skip


def op_plot(rows: Rows) -> Bars:
    """Return the plot of the memory-bound ops' share of copy bandwidth: ours and compiled."""
    groups = {}
    for op, systems in op_cases(rows).items():
        if not op.startswith(PRODUCTS):
            shares = {system: row["copy_share"] for system, row in systems.items()}
            groups[in_words(op)] = {
                name: (shares[system], f"{shares[system]:.0%}")
                for system, (name, _) in PLOTTED.items()
                if system in shares
            }
    return Bars(
        title=f"Memory-bound ops, {gpus(rows)}",
        axis="least bytes that an op has to move, in a second, as share of a plain copy",
        colours=dict(PLOTTED.values()),
        panels={"": groups},
    )


def in_words(op: str) -> str:
    """ "attention_fwd.self" -> "attention (self), forward"."""
    op, _, variant = op.partition(".")
    if variant:
        name = op.removesuffix("_fwd").removesuffix("_bwd")
        op = f"{name} ({VARIANTS.get(variant, variant)}){op[len(name) :]}"
    for name, words in WORDS.items():
        op = op.replace(name, words)
    return op
