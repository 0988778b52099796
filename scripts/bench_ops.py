"""Times every op, forward and backward, against plain torch, torch.compile and library kernels.

    python -m scripts.bench_ops [--only REGEX] [--tokens 4096,16384] [--dtypes bf16,fp32]
                                [--systems ours,library] [--output scripts/results/ops-h200.json]

What is compared is in `bench_ops_cases`. How it is timed:

* CUDA events around a few runs: as many as take a millisecond, eight at most. Before them the GPU
  spins for a millisecond, so that the host has launched enough by the time the first kernel starts:
  what counts is time on the GPU.
* Before every run a write of 256 MB takes the L2 cache. A run finds it full of lines that are not
  its own and still have to be written back, as it leaves it to the next write. What the writes
  take without the runs is subtracted. So an op pays for being launched behind another kernel, as in
  a step, and not for what lies between two events besides, some 4 us.
* All systems of a case take turns in one process; p20, p50 and p80 of 25 turns after 3 to warm up.
* `gb_per_s` counts the least bytes of the case, whatever a system really moves. `copy_share` is
  that over what a copy of 2 GiB from device to device moves in the same process, read and written.
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

from lightseq_fairseq import library, result_rows
from lightseq_fairseq.errors import UserError

from .bench_ops_cases import Case, Sizes, cases

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SYSTEMS = ("ours", "eager", "compile", "library", "apex")
TURNS, WARM_UP = 25, 3
MOST_REPEATS, ENOUGH_MS = 8, 1.0  # runs between two events
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
    """Times of every run, in turns, each on a cold L2."""
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

    everything = {**runs, "": lambda: None}  # without a run: what restoring and writing take
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
    """Milliseconds between two events each."""
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def percentiles(times: Sequence[float]) -> Times:
    """p20, p50 and p80."""
    ordered = sorted(times)
    low, middle, high = (ordered[round((len(ordered) - 1) * q)] for q in (0.2, 0.5, 0.8))
    return low, middle, high


def copy_bandwidth() -> float:
    """GB/s of a large copy on the device, bytes read plus bytes written."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_()
    _, middle, _ = measure({"copy": lambda: target.copy_(source)})["copy"]
    return 2 * COPY_BYTES / middle / 1e6


def rows_of(case: Case, name: str, systems: Sequence[str], copy: float, about: Row) -> list[Row]:
    """One row a system of the case; nothing of it is left on the GPU afterwards."""
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
    """The rows to read: a line a case, milliseconds of every system, rates of ours."""
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
        "--only", type=regex, default="", metavar="REGEX", help="cases whose name it finds"
    )
    parser.add_argument("--tokens", type=numbers, default=[4096, 16384, 65536])
    parser.add_argument("--dtypes", type=some_of(tuple(DTYPES)), default=["bf16"])
    parser.add_argument("--systems", type=some_of(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON, one row a line")
    return parser.parse_args(arguments)


def main() -> None:
    args, begin = parse(), time.monotonic()
    commit = result_rows.current_commit()
    result_rows.tabulate()
    if not torch.cuda.is_available():
        sys.exit("bench_ops: torch sees no GPU here")
    if references := library.load().references:
        message = f"bench_ops: no CUDA kernel for {', '.join(references)}"
        if args.output:
            sys.exit(f"{message}; compile them before results are written")
        print(f"{message}: `ours` is their torch reference", file=sys.stderr)
    # cuDNN plans every new shape anew; FlashAttention-2 and memory-efficient attention do not.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # A backward pass that is run again and again must not overwrite what forward saved for it.
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
                if args.output:  # at once, so that a run that is cut off leaves what it has
                    result_rows.write(rows, args.output)
    if not rows:
        sys.exit(f"bench_ops: no case is called {args.only.pattern!r}")
    print(*table(rows), sep="\n")
    print(f"{about['gpu']}, torch {about['torch']}, commit {commit[:10]}, copy {copy:.0f} GB/s")
    print("GB/s, copy (share of the copy's) and TFLOP/s are those of the first system of a line.")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_ops: {error}")
