"""Time every op, forward and backward, against eager torch, torch.compile and library kernels.

    python -m scripts.bench_ops [--only REGEX] [--tokens 4096,16384] [--dtypes bf16,fp32]
                                [--systems ours,library] [--output scripts/results/ops-h200.json]

`bench_ops_cases` says what is compared. How it is timed:

* CUDA events enclose a few runs: as many as take a millisecond, at most eight. Before them the GPU
  spins for a millisecond. Meanwhile the host launches the runs, so that only GPU time counts.
* Before every run, a write of 256 MB evicts everything else from the L2 cache. The cache is then
  full of dirty lines, which the run must write back; the next write does the same for the run's
  lines. The time of the writes alone is measured and subtracted. So the time of an op includes its
  launch behind another kernel, as in a step, but not the overhead of the two events, some 4 us.
* All systems of a case run in turns in one process. Reported are p20, p50 and p80 of 25 turns,
  after 3 turns of warm-up.
* `gb_per_s` counts the minimum bytes of the case, whatever a system really moves. `copy_share` is
  this rate relative to a device-to-device copy of 2 GiB in the same process, counting bytes read
  and written.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from lightseq_fairseq.base import library, result_rows
from lightseq_fairseq.base.errors import UserError

from .bench_ops_cases import Case, Sizes, cases

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SYSTEMS = ("ours", "eager", "compile", "library", "library_deterministic", "cudnn", "apex")
TURNS, WARM_UP = 25, 3
MOST_REPEATS, ENOUGH_MS = 8, 1.0  # maximum runs between two events; milliseconds that suffice
SPIN_CYCLES = 2_000_000  # about a millisecond
FLUSH_BYTES, COPY_BYTES = 256 << 20, 2 << 30

Row = dict[str, Any]
Times = tuple[float, float, float]  # p20, p50, p80 in ms
Events = tuple[torch.cuda.Event, torch.cuda.Event]


def measure(
    runs: dict[str, Callable[[], object]],
    restore: Callable[[], object] = lambda: None,
    turns: int = TURNS,
) -> dict[str, Times]:
    """Return the times of every run; the runs take turns, each with a cold L2 cache.

    restore: called before every run, untimed.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def time(run: Callable[[], object], repeats: int) -> Events:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        for _ in range(repeats):
            restore()
            flush.fill_(1)
            run()
        end.record()
        return start, end

    everything = {**runs, "": lambda: None}  # "": the time of restoring and writing alone
    first = {}
    for _ in range(WARM_UP):
        first = {name: elapsed([time(run, 1)])[0] for name, run in everything.items()}
    fastest = min(first[name] for name in runs) - first[""]
    repeats = max(1, min(MOST_REPEATS, round(ENOUGH_MS / max(fastest, 1e-3))))
    events: dict[str, list[Events]] = {name: [] for name in everything}
    for _ in range(turns):
        for name, run in everything.items():
            events[name].append(time(run, repeats))
    _, without, _ = percentiles(elapsed(events.pop("")))
    return {
        name: percentiles([(ms - without) / repeats for ms in elapsed(pairs)])
        for name, pairs in events.items()
    }


def elapsed(pairs: Sequence[Events]) -> list[float]:
    """Return the milliseconds between the two events of each pair."""
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def percentiles(times: Sequence[float]) -> Times:
    """Return p20, p50 and p80."""
    ordered = sorted(times)
    low, middle, high = (ordered[round((len(ordered) - 1) * q)] for q in (0.2, 0.5, 0.8))
    return low, middle, high


def copy_bandwidth() -> float:
    """Return the GB/s of a large copy on the device: bytes read plus bytes written."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    _, middle, _ = measure({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * COPY_BYTES / middle / 1e6


def rows_of(case: Case, name: str, systems: Sequence[str], copy: float, about: Row) -> list[Row]:
    """Return one row for each system of the case. The systems' tensors are freed afterwards."""
    runs = {s: make() for s, make in case.systems.items() if s in systems}
    rows = []
    for system, (low, middle, high) in measure(runs, case.restore).items():
        rate = case.least_bytes / middle / 1e6
        row = {
            **about,
            "case": name,
            "system": system,
            "ms": round(middle, 5),
            "ms_p20": round(low, 5),
            "ms_p80": round(high, 5),
            "gb_per_s": round(rate, 1),
            "copy_share": round(rate / copy, 4),
        }
        if case.flops:
            row["tflops"] = round(case.flops / middle / 1e9, 1)
        rows.append(row)
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Return a text table: one line per case, with the time of every system and our rates."""
    present = [system for system in SYSTEMS if any(row["system"] == system for row in rows)]
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["system"]] = row
    lines = []
    for name, systems in by_case.items():
        first = next(iter(systems.values()))
        times = [f"{systems[s]['ms']:.4f}" if s in systems else "" for s in present]
        rate = f"{first['gb_per_s']:.0f}", f"{first['copy_share']:.0%}"
        lines.append([name, *times, *rate, str(first.get("tflops", ""))])
    head = ["case", *(f"{system} ms" for system in present), "GB/s", "copy", "TFLOP/s"]
    return result_rows.table(head, lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def some_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
        def check(text: str) -> list[str]:
            words = text.split(",")
            if unknown := [word for word in words if word not in allowed]:
                raise argparse.ArgumentTypeError(
                    f"{', '.join(unknown)} is none of {', '.join(allowed)}"
                )
            return words

        return check

    def regex(text: str) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except re.error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", type=regex, default="", metavar="REGEX", help="only cases whose name matches"
    )
    parser.add_argument(
        "--tokens", type=numbers, default=[4096, 16384, 65536],
        help="tokens of a batch, separated by commas (default: 4096,16384,65536)",
    )  # fmt: skip
    parser.add_argument(
        "--dtypes", type=some_of(tuple(DTYPES)), default=["bf16"],
        help=f"some of {','.join(DTYPES)} (default: bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--systems", type=some_of(SYSTEMS), default=list(SYSTEMS),
        help=f"some of {','.join(SYSTEMS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="JSON file for the result rows (default: none)"
    )
    return parser.parse_args(arguments)


def main() -> None:
    args, begin = parse(), time.monotonic()
    commit = result_rows.current_commit()
    result_rows.tabulate()
    if not torch.cuda.is_available():
        sys.exit("bench_ops: torch finds no GPU; run it on a machine with a GPU")
    if references := library.load().references:
        message = f"bench_ops: no CUDA kernel for {', '.join(references)}"
        if args.output:
            sys.exit(f"{message}; compile them before results are written")
        print(f"{message}: `ours` is their torch reference", file=sys.stderr)
    # cuDNN makes a new plan for every new shape; FlashAttention-2 and memory-efficient attention
    # do not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The backward pass runs many times, so it must not overwrite the tensors that forward saved.
    torch._functorch.config.donated_buffer = False

    copy = copy_bandwidth()
    about = {
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    rows: list[Row] = []
    for dtype in args.dtypes:
        for case in cases(Sizes(), args.tokens, DTYPES[dtype], "cuda"):
            name = f"{case.name}/{dtype}"
            if args.only.search(name):
                print(f"{time.monotonic() - begin:6.1f} s {name}", file=sys.stderr, flush=True)
                rows += rows_of(case, name, args.systems, copy, about)
                if args.output:  # after every case, so that an interrupted run keeps its results
                    result_rows.write(rows, args.output)
    if not rows:
        sys.exit(f"bench_ops: no case matches --only {args.only.pattern!r}")
    print(*table(rows), sep="\n")
    print(f"{about['gpu']}, torch {about['torch']}, commit {commit[:10]}, copy {copy:.0f} GB/s")
    print("GB/s, copy (share of the copy's rate) and TFLOP/s: of the first system in the line.")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_ops: {error}")
