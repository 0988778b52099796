"""The kernel's bits are the reference's, see also tests/ops/test_philox.py."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import make_rng
from test_philox import CASES

from lightseq_fairseq import ops


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (9, 8), (1000, 513), (4096, 1024)])
@pytest.mark.parametrize(("seed", "micro_batch", "site", "p"), CASES)
def test_kernel_draws_the_reference_bits(seed, micro_batch, site, p, rows, columns):
    mask = ops.dropout_mask(make_rng(seed, micro_batch, "cuda"), site, rows, columns, p)
    expected = ops.dropout_mask(make_rng(seed, micro_batch), site, rows, columns, p)
    assert mask.device.type == "cuda" and mask.dtype == torch.bool
    assert torch.equal(mask.cpu(), expected)


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    rows, columns = 2**22 + 1, 1024
    mask = ops.dropout_mask(make_rng(3, 4, "cuda"), 5, rows, columns, 0.5)
    last = torch.tensor([0, 2**21, rows - 1])
    expected = ops.keep_mask(make_rng(3, 4), 5, last, columns, 0.5)
    assert torch.equal(mask[last.cuda()].cpu(), expected)


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (8, 0), (0, 0)])
def test_empty(rows, columns):
    assert ops.dropout_mask(make_rng(1, 1, "cuda"), 1, rows, columns, 0.5).shape == (rows, columns)


def test_runs_on_the_current_stream():
    """The kernel waits only for earlier work on its stream."""
    side = torch.cuda.Stream()
    rng = make_rng(0, 0, "cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        rng.copy_(make_rng(7, 8))
        mask = ops.dropout_mask(rng, 1, 64, 64, 0.5)
    side.synchronize()
    assert torch.equal(mask.cpu(), ops.dropout_mask(make_rng(7, 8), 1, 64, 64, 0.5))


def test_replayed_graph_draws_anew():
    """Every replay reads the micro-batch number of the rng on the device."""
    rng = make_rng(1, 0, "cuda")
    ops.dropout_mask(rng, 2, 32, 256, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = ops.dropout_mask(rng, 2, 32, 256, 0.5)
    for micro_batch in (1, 2):
        rng[1] = micro_batch
        graph.replay()
        assert torch.equal(mask.cpu(), ops.dropout_mask(make_rng(1, micro_batch), 2, 32, 256, 0.5))


@pytest.mark.parametrize(
    ("rng", "rows", "p"),
    [
        (torch.tensor([1, 2, 3]), 4, 0.5),
        (torch.tensor([1, 2], dtype=torch.int32), 4, 0.5),
        (torch.tensor([1, 0, 2])[::2], 4, 0.5),
        (torch.tensor([1, 2]), -1, 0.5),
        (torch.tensor([1, 2]), 4, 1.0),
    ],
)
def test_launcher_refuses_what_the_kernel_cannot_read(rng, rows, p):
    on_gpu = torch.empty_strided(rng.shape, rng.stride(), dtype=rng.dtype, device="cuda")
    with pytest.raises(RuntimeError, match="dropout_mask"):
        torch.ops.lightseq.dropout_mask(on_gpu.copy_(rng), 1, rows, 8, p)
