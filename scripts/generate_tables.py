"""The tables and the plot of what lightseq-bench generate has measured, for tables.py."""

from __future__ import annotations

from typing import Any

from bar_chart import Bar, bar_chart

Rows = list[dict[str, Any]]

GENERATE_PLOT = "scripts/results/generate-h200.svg"
SYSTEMS = {
    "ours": ("`lightseq-generate`", "#1f6fb4"),
    "ctranslate2": ("CTranslate2", "#7fb2d9"),
    "fairseq_no_cudnn": ("fairseq, cuDNN attention off", "#a8a8a8"),
}


def cases(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """case -> system -> row; cases in the order of the file, systems fast first."""
    found: dict[str, dict[str, dict[str, Any]]] = {row["case"]: {} for row in rows}
    for row in sorted(rows, key=lambda row: row["decode_s"]):
        found[row["case"]][row["system"]] = row
    return found


def generate_table(rows: Rows) -> list[str]:
    """Speed, latency and memory of each system in each case."""
    lines = [
        "| case | system | sentences/s | tokens/s | x fairseq | decode s | ms a batch p50, p99 | "
        "GiB | load s | first pass s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, systems in cases(rows).items():
        fairseq = systems.get("fairseq_no_cudnn")
        for system, row in systems.items():
            ratio = f"{row['sentences_per_s'] / fairseq['sentences_per_s']:.1f}" if fairseq else ""
            lines.append(
                f"| `{case}` | {SYSTEMS[system][0]} | {row['sentences_per_s']:.0f} | "
                f"{row['tokens_per_s']} | {ratio} | {row['decode_s']:.3f} | {row['p50_ms']:.1f}, "
                f"{row['p99_ms']:.1f} | {row['peak_gib']:.1f} | {row['load_s']:.1f} | "
                f"{row['first_s']:.2f} |"
            )
    common = {key: sorted({str(row[key]) for row in rows}) for key in ("gpu", "torch", "commit")}
    tokens = sorted({row["max_tokens"] for row in rows if "/btokens/" in row["case"]})
    by_tokens = f"; `btokens`: at most {', '.join(map(str, tokens))} source tokens" * bool(tokens)
    return [
        *lines,
        "",
        f"{', '.join(common['gpu'])}; torch {', '.join(common['torch'])}; commit "
        f"{', '.join(commit[:10] for commit in common['commit'])}; case: model, sentences of a "
        f"batch, beam, precision{by_tokens}; random weights, hypotheses as long as the longest "
        "source of their batch; medians over passes after the warm-up; not in the time: loading "
        "the model, making batches, text; in the first pass ours captures graphs and times "
        "algorithms.",
    ]


def generate_by_case(rows: Rows) -> list[str]:
    """A line for each case: sentences a second of each system, and how much faster ours is."""
    lines = [
        "| case | `lightseq-generate`, sentences/s | CTranslate2 | fairseq | times as fast as "
        "fairseq | ms a batch p50, p99 | GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, systems in cases(rows).items():
        speeds = {name: row["sentences_per_s"] for name, row in systems.items()}
        fairseq = speeds.get("fairseq_no_cudnn")
        ours = systems["ours"]
        cells = [f"{speeds[name]:.0f}" if name in speeds else "" for name in SYSTEMS]
        cells.append(f"{speeds['ours'] / fairseq:.1f}" if fairseq else "")
        cells += [f"{ours['p50_ms']:.1f}, {ours['p99_ms']:.1f}", f"{ours['peak_gib']:.1f}"]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    gpus = sorted({f"{row['gpu']}; torch {row['torch']}" for row in rows})
    return [*lines, "", f"{'; '.join(gpus)}; case: model, sentences of a batch, beam, precision."]


def generate_plot(rows: Rows) -> str:
    """SVG: sentences a second of each system, in each case as a share of the fastest."""
    groups: dict[str, list[Bar | None]] = {}
    for case, systems in cases(rows).items():
        fastest = max(row["sentences_per_s"] for row in systems.values())
        groups[case] = [
            Bar(
                row["sentences_per_s"] / fastest,
                SYSTEMS[system][1],
                f"{system} {row['sentences_per_s']:.0f}",
                f"{SYSTEMS[system][0]}: {row['sentences_per_s']}",
            )
            for system, row in systems.items()
        ]
    ticks = {percent: f"{percent}%" for percent in (0, 25, 50, 75, 100)}
    return bar_chart("sentences a second, as share of the fastest system's", groups, ticks)
