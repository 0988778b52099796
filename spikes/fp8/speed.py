"""Speed of fp8 products and casts in t2t big's layers on a Hopper GPU, against bf16.

    python spikes/fp8/speed.py --output FOLDER      # at most 110 s; needs torch 2.11 and nvcc
    python spikes/fp8/speed.py --output FOLDER --cpu  # small sizes, to check this script

Three measurements, each written to FOLDER/fp8_speed.json when it is done:

* casts: a bf16 matrix to E4M3 (cast.cu), with and without transpose, against a copy. Buffers of
  all runs together exceed the L2 cache.
* layers: all products of t2t big's layers in turn, as one CUDA graph; bf16, fp8 with fast and fp8
  with exact accumulation alternate, a second each.
* products: the same for each product, 0.08 s each.

Timed runs follow each other without a gap, so the card is at its power limit. The first third of
each stretch is not timed.

Shapes: T = rows, N = outputs, K = inputs of a linear layer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()
HERE = Path(__file__).resolve().parent
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"


def start_nvcc(output: Path) -> tuple[subprocess.Popen[str], Path]:
    """Compile cast.cu in the background, while torch is imported."""
    library = output / "libcast.so"
    command = ["nvcc", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", ARCHITECTURE]
    command += [str(HERE / "cast.cu"), "-o", str(library)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True), library


PARSER = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
PARSER.add_argument("--output", type=Path, required=True)
PARSER.add_argument("--cpu", action="store_true")
PARSER.add_argument("--seconds", type=float, default=100, help="no new measurement after these")
OPTIONS = PARSER.parse_args()
OPTIONS.output.mkdir(parents=True, exist_ok=True)
NVCC = None if OPTIONS.cpu else start_nvcc(OPTIONS.output)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

DEVICE = "cpu" if OPTIONS.cpu else "cuda"
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
WIDTH, FFN, LAYERS = (16, 32, 1) if OPTIONS.cpu else (1024, 4096, 6)
ROWS = (16, 32, 48) if OPTIONS.cpu else (3712, 15232, 7424)
# Linear layers of t2t big: (N, K), how many. Decoder layers have three more than encoder layers'
# four, but the keys and values of all cross attentions are one product.
LINEAR = {
    "qkv": (3 * WIDTH, WIDTH, 2 * LAYERS),
    "out, q": (WIDTH, WIDTH, 4 * LAYERS),
    "fc1": (FFN, WIDTH, 2 * LAYERS),
    "fc2": (WIDTH, FFN, 2 * LAYERS),
    "cross_kv": (2 * LAYERS * WIDTH, WIDTH, 1),
}
SYSTEMS = ("bf16", "fp8_fast", "fp8_exact")
KINDS = ("forward", "dx", "dw")
MOST = 448.0
WRONG = 0.08  # relative error
CACHE = 1 << (14 if OPTIONS.cpu else 28)  # bytes that no cache has
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
Call = Callable[[], object]


def left() -> float:
    return float(OPTIONS.seconds - (time.monotonic() - BEGIN))


def log(*words: object) -> None:
    print(f"[{time.monotonic() - BEGIN:5.1f} s]", *words, flush=True)


# --- Operands ---------------------------------------------------------------------------------


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    """The rule of cast.cu in torch."""
    x = x.float()
    values = (x / scale).clamp(-MOST, MOST).masked_fill(~x.isfinite(), torch.nan)
    return values.to(E4M3)


def with_scale(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, transpose and scale of x [R, C]; the scale leaves room for amax to double."""
    scale = torch.exp2(torch.ceil(torch.log2(2 * x.float().abs().max() / MOST)))
    values = quantised(x, scale)
    # Copied as bytes: not every device copies transposed fp8 tensors.
    return values, values.view(torch.uint8).t().contiguous().view(E4M3), scale


class Linear:
    """A linear layer with operands in bf16 and fp8, and its three products in each system."""

    def __init__(self, name: str, rows: int) -> None:
        outputs, inputs, self.count = LINEAR[name]
        x = torch.randn(rows, inputs, device=DEVICE, dtype=BF16)
        w = torch.randn(outputs, inputs, device=DEVICE, dtype=BF16) * inputs**-0.5
        dy = torch.randn(rows, outputs, device=DEVICE, dtype=BF16) * 1e-3
        # Zeros need less power, so they are where ReLU and dropout write them.
        if name == "fc2":
            x.relu_().mul_(torch.rand_like(x) >= 0.1)
        if name == "fc1":
            dy.mul_(torch.rand_like(dy) >= 0.55)
        self.bf16 = x, w, dy
        self.fp8 = with_scale(x), with_scale(w), with_scale(dy)
        y, dx, dw = (t.new_empty(t.shape) for t in (dy, x, w))
        self.results = {"forward": y, "dx": dx, "dw": dw}
        self.flops = 2 * rows * outputs * inputs

    def call(self, system: str, kind: str) -> Call:
        result = self.results[kind]
        if system == "bf16":
            x, w, dy = self.bf16
            a, b = {"forward": (x, w.t()), "dx": (dy, w), "dw": (dy.t(), x)}[kind]
            return lambda: torch.mm(a, b, out=result)
        (x, xt, x_scale), (w, wt, w_scale), (dy, dyt, dy_scale) = self.fp8
        a, b, scale_a, scale_b = {
            "forward": (x, w, x_scale, w_scale),
            "dx": (dy, wt, dy_scale, w_scale),
            "dw": (dyt, xt, dy_scale, x_scale),
        }[kind]
        fast = system == "fp8_fast"
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a, scale_b, out_dtype=BF16, use_fast_accum=fast, out=result
        )

    def check(self, kind: str) -> dict[str, float]:
        """Relative errors of the fp8 products; operands of 3 bits give 3 to 5 %."""
        results = {}
        for system in SYSTEMS:
            self.results[kind].fill_(torch.nan)
            self.call(system, kind)()
            results[system] = self.results[kind].float()

        def error(of: str, against: str) -> float:
            return float((results[of] - results[against]).norm() / results[against].norm())

        errors = {system: error(system, "bf16") for system in SYSTEMS[1:]}
        if not max(errors.values()) < WRONG:
            log("WRONG products", kind, errors)
        return {**errors, "fast_against_exact": error("fp8_fast", "fp8_exact")}


# --- Timing -----------------------------------------------------------------------------------


def captured(calls: list[Call]) -> Call:
    """All calls as one CUDA graph; on a CPU as a loop."""
    if OPTIONS.cpu:
        return lambda: [call() for call in calls]
    for call in dict.fromkeys(calls):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


class Mark:
    """A moment on the device."""

    def __init__(self) -> None:
        self.time = time.perf_counter()
        if not OPTIONS.cpu:
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def until(self, end: Mark) -> float:
        """Milliseconds."""
        if OPTIONS.cpu:
            return 1e3 * (end.time - self.time)
        end.event.synchronize()
        return float(self.event.elapsed_time(end.event))


def stretch(replay: Call, count: int, while_busy: Call | None = None) -> float:
    """Milliseconds of a replay, the mean of the last two thirds of `count` in a row.

    while_busy: called when all are launched, but not done.
    """
    for _ in range(count // 3):
        replay()
    begin = Mark()
    for _ in range(count - count // 3):
        replay()
    end = Mark()
    if while_busy is not None:
        while_busy()
    return begin.until(end) / (count - count // 3)


def interleaved(
    replays: dict[str, Call], seconds: float, rounds: int, while_busy: Call | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each system's replay in each round; the systems alternate."""
    if OPTIONS.cpu:
        seconds, rounds = 0, 1
    counts = {}
    for system, replay in replays.items():
        stretch(replay, 1)
        counts[system] = max(3, int(1e3 * seconds / stretch(replay, 2)))
    times: dict[str, list[float]] = {system: [] for system in replays}
    for _ in range(rounds):
        for system, replay in replays.items():
            times[system].append(stretch(replay, counts[system], while_busy))
    return times


def sensors() -> dict[str, float]:
    """Clock in MHz and power in W, if NVML is there."""
    found = {}
    if not OPTIONS.cpu:
        for name, read in (("mhz", torch.cuda.clock_rate), ("watts", torch.cuda.power_draw)):
            try:
                found[name] = float(read())
            except Exception as error:
                log("no sensor", name, error)
        if "watts" in found:
            found["watts"] /= 1e3
    return found


# --- Casts ------------------------------------------------------------------------------------


class Cast:
    """cast.cu's function on one set of buffers."""

    def __init__(self, library: Any, x: Tensor, scale: Tensor) -> None:
        self.library, self.x, self.scale = library, x, scale
        rows, columns = x.shape
        self.values = torch.full((rows, columns), 85, dtype=torch.uint8, device=DEVICE)
        self.transpose = torch.full(
            (columns, -(-rows // 16) * 16), 85, dtype=torch.uint8, device=DEVICE
        )
        self.amax = torch.zeros((), device=DEVICE)
        self.saturated = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.copy = torch.empty_like(x)

    def run(self, transposes: bool = True) -> None:
        pointers = [self.values.data_ptr(), self.transpose.data_ptr() if transposes else None]
        pointers += [self.amax.data_ptr(), self.saturated.data_ptr()]
        pointers.append(torch.cuda.current_stream().cuda_stream)
        rows, columns = map(ctypes.c_int64, self.x.shape)
        error = self.library.cast_to_e4m3(
            ctypes.c_void_p(self.x.data_ptr()), rows, columns,
            ctypes.c_void_p(self.scale.data_ptr()), *map(ctypes.c_void_p, pointers),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"cast_to_e4m3: CUDA error {error}")

    def without_transpose(self) -> None:
        self.run(transposes=False)

    def expected(self) -> list[Tensor]:
        """Values, transpose, amax and saturation count, from torch."""
        values = quantised(self.x, self.scale).view(torch.uint8)
        transpose = torch.zeros_like(self.transpose)
        transpose[:, : len(values)] = values.t()
        x = self.x.float().abs()
        x = x.masked_fill(~x.isfinite(), 0)
        return [values, transpose, x.max(), (x / self.scale > MOST).sum()]

    def check(self) -> None:
        self.run()
        names = ("values", "transpose", "amax", "saturated")
        ours = (self.values, self.transpose, self.amax, self.saturated)
        for name, mine, other in zip(names, ours, self.expected()):
            if not torch.equal(mine, other):
                wrong = int((mine != other).sum())
                raise RuntimeError(
                    f"cast.cu: {name} of {list(self.x.shape)}: {wrong} numbers differ"
                )


def wild(rows: int, columns: int) -> Tensor:
    """Numbers of all sizes, with infinities, NaN and negative zero."""
    x = torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))
    x[0, :6] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 3e38, -(2.0**-11)])
    return x.to(BF16).to(DEVICE)


def measure_casts(library: Any) -> list[dict[str, object]]:
    for rows, columns in ((200, 192), (3, 64), (128, 128), (3712, 1024)):
        for scale in (0.25, 2.0**-20, 2.0**9):
            Cast(library, wild(rows, columns), torch.tensor(scale, device=DEVICE)).check()
    log("cast.cu equals torch bit for bit")
    found: list[dict[str, object]] = []
    for rows in ROWS:
        for columns in (WIDTH, 3 * WIDTH, FFN, 2 * LAYERS * WIDTH):
            bytes_moved = 4 * rows * columns
            sets = max(2, -(-CACHE // bytes_moved))
            unit = torch.tensor(2.0**-6, device=DEVICE)
            x = torch.randn(rows, columns, device=DEVICE, dtype=BF16)
            casts = [Cast(library, x.clone(), unit) for _ in range(sets)]
            replays = {
                "cast": captured([cast.run for cast in casts]),
                "cast_without_transpose": captured([c.without_transpose for c in casts]),
                "copy": captured([lambda c=c: c.copy.copy_(c.x) for c in casts]),  # type: ignore[misc]
            }
            times = interleaved(replays, 0.01, 5)
            row: dict[str, object] = {"rows": rows, "columns": columns}
            for system, each in times.items():
                row[f"us_{system}"] = 1e3 * statistics.median(each) / sets
            row["cast_gb_s"] = bytes_moved / 1e3 / float(row["us_cast"])  # type: ignore[arg-type]
            found.append(row)
            print(
                f"{rows:6} x {columns:5}: cast {row['us_cast']:7.1f} us, without transpose "
                f"{row['us_cast_without_transpose']:7.1f}, copy {row['us_copy']:7.1f}; "
                f"cast {row['cast_gb_s']:6.0f} GB/s",
                flush=True,
            )
    return found


# --- Products ---------------------------------------------------------------------------------


def measure_layers(linears: dict[str, Linear], rows: int) -> dict[str, object]:
    replays = {
        system: captured([
            call
            for linear in linears.values()
            for kind in KINDS
            for call in [linear.call(system, kind)] * linear.count
        ])
        for system in SYSTEMS
    }  # fmt: skip
    sensed: list[dict[str, float]] = []
    times = interleaved(replays, 1.0, 3, lambda: sensed.append(sensors()))
    flops = sum(linear.flops * linear.count * len(KINDS) for linear in linears.values())
    # A reading of clock and power for each system in turn, near the end of its second.
    row: dict[str, object] = {"rows": rows, "flops": flops, "rounds_ms": times, "sensors": sensed}
    print(f"{rows:6} rows, all layers, ms a pass:", end="")
    for system, each in times.items():
        row[f"ms_{system}"] = ms = statistics.median(each)
        print(f"  {system} {ms:.2f} ({flops / ms / 1e9:.0f} TFLOP/s)", end="")
    print("", sensed[-len(SYSTEMS) :], flush=True)
    return row


def measure_product(linear: Linear, name: str, kind: str, rows: int) -> dict[str, object]:
    row: dict[str, object] = {"rows": rows, "layer": name, "kind": kind, "count": linear.count}
    calls = 20
    replays = {system: captured([linear.call(system, kind)] * calls) for system in SYSTEMS}
    times = interleaved(replays, 0.08, 2)
    print(f"{rows:6} {name:9} {kind:8}", end="")
    for system, each in times.items():
        row[f"us_{system}"] = us = 1e3 * statistics.mean(each) / calls
        print(f"  {system} {us:7.1f} us ({linear.flops / us / 1e6:5.0f})", end="")
    print(flush=True)
    return row


def main() -> None:
    torch.manual_seed(0)
    gc.freeze()  # torch.cuda.graph collects garbage, 180 times
    device = "cpu" if OPTIONS.cpu else torch.cuda.get_device_name()
    report: dict[str, object] = {"torch": torch.__version__, "device": device}

    def save(name: str, found: object) -> None:
        report[name] = found
        report["seconds"] = time.monotonic() - BEGIN
        (OPTIONS.output / "fp8_speed.json").write_text(json.dumps(report, indent=1) + "\n")

    log(device, torch.__version__)
    if NVCC is not None:
        try:
            process, path = NVCC
            _, said = process.communicate(timeout=40)
            if process.returncode:
                raise RuntimeError(f"nvcc: {said}")
            save("casts", measure_casts(ctypes.CDLL(str(path))))
        except Exception as error:  # the products do not depend on it
            log("no casts:", error)
            save("casts", str(error))
    layers: list[dict[str, object]] = []
    products: list[dict[str, object]] = []
    errors_of: list[dict[str, object]] = []
    for rows in ROWS:
        if left() < 15:
            log("no time for the layers at", rows)
            break
        try:
            linears = {name: Linear(name, rows) for name in LINEAR}
            for name, linear in linears.items():
                for kind in KINDS:
                    errors = linear.check(kind)
                    errors_of.append({"rows": rows, "layer": name, "kind": kind, **errors})
            layers.append(measure_layers(linears, rows))
            save("layers", layers)
            for name, linear in linears.items():
                for kind in KINDS:
                    if left() > 2:
                        products.append(measure_product(linear, name, kind, rows))
        except Exception as error:  # other sizes may work
            log(f"{rows} rows:", error)
        save("products", products)
        save("relative_errors", errors_of)
        log(f"{rows} rows are done")
    log("end", sensors())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
