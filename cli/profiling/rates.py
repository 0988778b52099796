"""The rates that this machine sustains, measured: products of matrices, and copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_SECONDS = {"cuda": 1.0, "cpu": 0.3}  # of load before and while it is measured: a GPU's clock falls
_SIZE = {"cuda": 8192, "cpu": 1024}  # of square matrices
_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}


class Rates(NamedTuple):
    """flop: of products, a second; fp8: of products of E4M3, None if they are not measured.
    bytes: read and written by a copy, a second."""

    flop: float
    bytes: float
    fp8: float | None = None


def measure(device: torch.device, dtype: torch.dtype, fp8: bool = False) -> Rates:
    """The sustained rates for products of ``dtype``, and of E4M3 if ``fp8``."""
    size, kind = _SIZE[device.type], device.type
    a, b, c = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    source = torch.empty(_BYTES[kind] // 2, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    flop, product = 2 * size**3, _seconds(lambda: torch.mm(a, b, out=c), device)
    copy, fast = _seconds(lambda: target.copy_(source), device), None
    if fp8:
        one = torch.ones((), device=device)
        a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
        fast = flop / _seconds(
            lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16), device
        )
    return Rates(flop / product, 2 * source.nbytes / copy, fast)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of one run, after and within so many seconds of load."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    runs, passed = 1, 0.0
    for _ in range(2):
        target = _SECONDS[device.type]
        while True:
            wait()
            began = time.perf_counter()
            for _ in range(runs):
                work()
            wait()
            passed = time.perf_counter() - began
            if passed >= target:
                break
            runs = max(runs + 1, int(runs * 1.2 * target / max(passed, 1e-6)))
    return passed / runs
