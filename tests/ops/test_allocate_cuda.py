"""If kernels cannot allocate memory, the error is one sentence, with "out of memory" only if that
is why.

fairseq skips a batch if its error contains these words, and continues.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.ops_testing import make_rng

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import is_out_of_memory

# After an index out of range, all GPU work of the process fails. The memory requested then is more
# than torch's allocator holds, so it must ask CUDA.
AFTER_A_FAULT = """
import torch
from lightseq_fairseq import ops
rng = torch.tensor([1, 2], device="cuda")
x, weight = torch.zeros(2, 1 << 17, 8, dtype=torch.bfloat16, device="cuda")
table, beyond = torch.zeros(4, 8, device="cuda"), torch.tensor([9], device="cuda")
try:
    ops.embedding_fwd(beyond, table, None, None, 1.0, ops.Dropout(0.0, rng, 0))
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    ops.linear_fwd(x, weight, None)
except RuntimeError as error:
    print(error)
"""


def too_much() -> None:
    """Requests 2 TB."""
    x, weight = torch.zeros(2, 1 << 20, 8, dtype=torch.bfloat16, device="cuda")
    ops.linear_fwd(x, weight, None)


def test_memory_that_does_not_suffice(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError) as failure:
        too_much()
    assert is_out_of_memory(failure.value)
    message = str(failure.value)
    assert message.startswith("CUDA out of memory: lightseq cannot allocate 1.0")
    assert len(message.splitlines()) == 1
    assert capfd.readouterr().err == ""


def test_memory_that_does_not_suffice_while_a_graph_is_captured() -> None:
    """The capture continues and can be ended."""
    x = torch.ones(64, 8, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(8, 8, dtype=torch.bfloat16, device="cuda")
    large = torch.zeros(2, 1 << 20, 8, dtype=torch.bfloat16, device="cuda")
    ops.linear_fwd(x, weight, None)  # the algorithm is searched
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="CUDA out of memory: lightseq cannot allocate"):
            ops.linear_fwd(*large, None)
        y = ops.linear_fwd(x, weight, None)
    graph.replay()
    assert y.eq(8).all()


def test_torch_logs_as_before_when_threads_have_been_out_of_memory() -> None:
    """Each thread disables torch's logging for a moment."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    before, failures = level.value, []

    def often() -> None:
        for _ in range(20):
            try:
                too_much()
            except RuntimeError as error:
                failures.append(error)

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 80 and all(map(is_out_of_memory, failures))
    assert level.value == before


def test_more_numbers_than_can_be() -> None:
    with pytest.raises(RuntimeError, match="a tensor cannot have") as failure:
        ops.dropout_mask(make_rng(device="cuda"), 0, 2**40, 2**40, 0.5)
    assert not is_out_of_memory(failure.value)


def test_a_gpu_that_has_failed_is_not_out_of_memory() -> None:
    result = subprocess.run(
        [sys.executable, "-c", AFTER_A_FAULT], env={**os.environ, "LIGHTSEQ_CHECK_INDICES": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.stdout.startswith("lightseq: cannot allocate GPU memory: "), result.stderr
    assert "device-side assert" in result.stdout and "out of memory" not in result.stdout
    assert len(result.stdout.splitlines()) == 1
