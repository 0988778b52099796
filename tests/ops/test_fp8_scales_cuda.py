"""The kernel that computes scales from histories, compared with its reference bit for bit."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import spaced
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.ops.fp8_scales import HISTORY

COUNTS = [1, 2, 63, 64, 65, 183, 4097]  # a block has 64 threads
LARGEST = torch.finfo(torch.float32).max


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def table(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """scale, amax and history of ``count`` tensors, of all sizes and partly zero."""
    torch.manual_seed(count)
    size = torch.exp2(torch.randint(-80, 80, (count,)).float())
    history = torch.rand(HISTORY, count) * size * (torch.rand(HISTORY, count) < 0.5)
    amax = torch.rand(count) * size * (torch.rand(count) < 0.5)
    history[:, ::5] = 0
    amax[::10] = 0
    return torch.exp2(torch.randint(-60, 61, (count,)).float()), amax, history


def assert_equals_reference(
    scale: Tensor, amax: Tensor, history: Tensor, skipped: float = 0.0, forget: bool = False
) -> None:
    """The tensors are on a CPU."""
    ours = [spaced(scale.cuda()), amax.cuda(), history.cuda()]  # scales are apart, as in training
    ops.fp8_scales(*ours, number(skipped).cuda(), forget)
    ops.fp8_scales(scale, amax, history, number(skipped), forget)
    for name, a, b in zip(("scale", "amax", "history"), ours, (scale, amax, history), strict=True):
        assert torch.equal(a.cpu(), b), name


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("skipped", [0.0, 1.0, torch.nan])
@pytest.mark.parametrize("count", COUNTS)
def test_equals_the_reference(count, skipped, forget):
    assert_equals_reference(*table(count), skipped, forget)


def test_scale_of_the_largest_number():
    """Around every power of two, where rounding would double or halve the scale."""
    ties = 224 * torch.exp2(torch.arange(-140.0, 121.0))
    amax = torch.cat([ties.nextafter(ties * 0), ties, ties.nextafter(ties * 2)])
    amax = torch.cat([amax[amax.isfinite()], torch.tensor([LARGEST, 2.0**-149, 2.0**-126, -0.0])])
    assert_equals_reference(torch.full_like(amax, 8.0), amax, torch.zeros(HISTORY, len(amax)))


def test_every_place_of_the_history_counts():
    history = torch.ones(HISTORY, HISTORY).fill_diagonal_(1000.0)
    assert_equals_reference(torch.ones(HISTORY), torch.full((HISTORY,), 2.0), history)


def test_many_updates():
    scale, amax, history = table(100)
    ours = [x.cuda() for x in (scale, amax, history)]
    for update in range(2 * HISTORY + 3):
        amax.copy_(torch.randn(100).exp())
        ours[1].copy_(amax)
        skipped = number(update % 5 == 4)
        ops.fp8_scales(scale, amax, history, skipped, False)
        ops.fp8_scales(*ours, skipped.cuda(), False)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, (scale, amax, history)))


def test_no_tensors():
    assert_equals_reference(torch.ones(0), torch.zeros(0), torch.zeros(HISTORY, 0))


def test_replayed_graph_reads_anew_whether_the_update_was_skipped():
    expected = table(183)
    ours, skipped = [x.cuda() for x in expected], number(0.0).cuda()
    ops.fp8_scales(*(x.clone() for x in ours), skipped, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.fp8_scales(*ours, skipped, False)
    for update in range(4):
        expected[1].copy_(torch.rand(183))
        ours[1].copy_(expected[1])
        skipped.fill_(update % 2)
        graph.replay()
        ops.fp8_scales(*expected, skipped.cpu(), False)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, expected))


def test_refusals():
    scale, amax, history = (x.cuda() for x in table(3))
    with pytest.raises(ValueError, match="fp8_scales: skipped is on cpu, the other"):
        ops.fp8_scales(scale, amax, history, number(0.0), False)
    with pytest.raises(ValueError, match="fp8_scales: history must be contiguous"):
        ops.fp8_scales(scale, amax, history.t().contiguous().t(), number(0.0).cuda(), False)
