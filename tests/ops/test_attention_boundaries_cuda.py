"""Boundaries of sentences that attention on a GPU refuses: before a launch, and in the kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.attention_cases import LENGTHS, SITE, Case, check

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.memory.packing import Segments


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_q": 10_000}, r"cu_q must ascend within \[0, 532\], sentence 0 is rows 0 to 10000"),
        ({"cu_k": -1}, r"cu_k must ascend within \[0, 656\], sentence 0 is rows 0 to -1"),
        ({"lengths_q": [259]}, "max_q is 259, but sentence 6 of cu_q has 260 rows"),
    ],
)
def test_wrong_boundaries(changed, message, monkeypatch):
    """They are refused before a launch, so the GPU can still be used afterwards."""
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    case, wrong = Case(LENGTHS["cross"], torch.bfloat16), Case(LENGTHS["cross"], torch.bfloat16)
    for name, value in changed.items():
        if isinstance(value, int):
            getattr(wrong, name)[1] = value
        else:
            setattr(wrong, name, value)
    with pytest.raises(ValueError, match=f"attention_fwd: {message}"):
        ops.attention_fwd(*wrong.qkv, *wrong.settings())
    out, lse, *gradients = case.kernel()
    with pytest.raises(ValueError, match=f"attention_bwd: {message}"):
        ops.attention_bwd(case.dout, *case.qkv, out, lse, *wrong.settings(), *gradients)
    check(case)


def test_boundaries_are_read_once(monkeypatch):
    """Reading them waits for the GPU. A second call does not read them, unless they have been
    modified."""
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    case = Case(LENGTHS["cross"], torch.bfloat16)
    arguments = (*case.qkv, *case.settings())
    out, lse, *gradients = case.kernel()
    mask = torch.ones(4, 30, dtype=torch.bool, device="cuda")
    segments = Segments.from_mask(mask)
    q = torch.randn(120, 3, 64, device="cuda")
    cu, longest = segments.cu_seqlens, segments.max_len
    own = (q, q, q, cu, cu, longest, longest, False, 0, 0.125, ops.Dropout(0.0, case.rng, SITE))
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.attention_fwd(*arguments)
        ops.attention_bwd(case.dout, *case.qkv, out, lse, *case.settings(), *gradients)
        ops.attention_fwd(*own)  # boundaries made by our own code are never read
        case.cu_k[1] += 0
        with pytest.raises(RuntimeError, match="synchronizing"):
            ops.attention_fwd(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match=r"cu_q must ascend within \[0, 119\]"):
        ops.attention_fwd(q[:119], *own[1:])
    with pytest.raises(ValueError, match="max_k is 29, but sentence 0 of cu_k has 30 rows"):
        ops.attention_fwd(*own[:6], 29, *own[7:])


# Runs in a separate process, because an assertion makes its GPU context unusable. The boundaries
# are wrong when the captured graph is replayed, where no check on the host can see them. Prints
# "done" if nothing stops it.
PROGRAM = """
import sys, torch
from pathlib import Path
from lightseq_fairseq import ops
from lightseq_fairseq.base import library
library.DIRECTORY = Path(sys.argv[1])
from helpers.attention_cases import Case
pass_, name, place, value = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
case = Case(([30, 40, 0, 0], [30, 40, 0, 0]), torch.bfloat16)  # cu_k is a tensor of its own
out, lse, _ = ops.attention_fwd(*case.qkv, *case.settings())
gradients = [torch.empty_like(x) for x in case.qkv]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    if pass_ == "forward":
        ops.attention_fwd(*case.qkv, *case.settings())
    else:
        ops.attention_bwd(case.dout, *case.qkv, out, lse, *case.settings(), *gradients)
graph.replay()
getattr(case, name)[place] = value
torch.cuda.synchronize()
print("begun", flush=True)
graph.replay()
torch.cuda.synchronize()
print("done", flush=True)
"""


@pytest.mark.large  # compute-sanitizer would report the assertion as an error
@pytest.mark.parametrize(
    ("pass_", "name", "place", "value"),
    [
        ("forward", "cu_q", 1, 100),
        ("forward", "cu_k", 1, -5),
        ("backward", "cu_k", 1, 100),
        ("backward", "cu_q", 2, 10_000),
        ("forward", "cu_q", 0, 1),
        ("backward", "cu_k", 3, 65),  # a slot after the last sentence
    ],
)
def test_wrong_boundaries_stop_the_kernel(pass_, name, place, value):
    """The kernel ends with an assertion that names them."""
    command = [sys.executable, "-c", PROGRAM, str(library.DIRECTORY)]
    command += [pass_, name, str(place), str(value)]
    search = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": search, "LIGHTSEQ_CHECK_INDICES": ""}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0 and ran.stdout == "begun\n", ran.stdout + ran.stderr
    assert "device-side assert" in ran.stderr
    assert re.search(f"Assertion .*{name}", ran.stderr), ran.stderr
