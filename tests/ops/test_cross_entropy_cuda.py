"""The cross entropy kernels compared with float64 on the CPU and with plain torch's error on the
GPU."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.ops_testing import assert_kernel_as_good_as, leaf, poison_cache

from lightseq_fairseq import ops

PAD = 1
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(rows, classes, dtype, stride=None, shift=0):
    """Logits with a row stride of `stride`, and targets, some of them pads."""
    generator = torch.Generator("cuda").manual_seed(rows + classes)
    storage = torch.full((rows * (stride or classes) + shift,), 5.0, dtype=dtype, device="cuda")
    logits = storage[shift:].view(rows, -1)[:, :classes]
    logits.copy_(3 * torch.randn(rows, classes, generator=generator, device="cuda"))
    target = torch.randint(0, classes, (rows,), generator=generator, device="cuda")
    if rows > 1:
        target[::5] = PAD
    return logits, target


def working(logits):
    return torch.promote_types(logits.dtype, torch.float32)


def formula(logits, target, smoothing):
    """(loss, nll) of each token in plain torch."""
    log_probabilities = logits.log_softmax(-1)
    nll = -log_probabilities.gather(1, target[:, None])[:, 0]
    share = smoothing / (logits.shape[1] - 1)
    loss = (1.0 - smoothing - share) * nll
    if smoothing > 0:  # the sum exceeds the range of float16
        loss = loss - (share * log_probabilities.sum(-1, dtype=working(logits))).to(loss.dtype)
    is_pad = target == PAD
    return loss.masked_fill(is_pad, 0.0), nll.masked_fill(is_pad, 0.0)


# (rows, classes, stride, shift): one row; fewer classes than a vector load; rows that start at any
# offset from 16 bytes; padded rows; more than fits into shared memory; a shifted start.
LAYOUTS = [
    (1, 2, None, 0),
    (9, 5, None, 0),
    (37, 97, None, 0),
    (64, 1032, None, 0),
    (41, 40001, None, 0),
    (40, 42999, 43008, 0),
    (11, 130001, None, 0),
    (33, 8191, None, 3),
]


@pytest.mark.parametrize(("rows", "classes", "stride", "shift"), LAYOUTS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errs_no_more_than_plain_torch(rows, classes, stride, shift, smoothing, dtype):
    logits, target = inputs(rows, classes, dtype, stride, shift)
    dloss = torch.randn(rows, device="cuda")
    results = []
    for kind in (dtype, torch.float64):
        x = leaf(logits, kind)
        loss, nll = formula(x, target, smoothing)
        loss.backward(dloss.to(kind))
        results.append((loss.detach(), nll.detach(), x.grad))
    storage_before = logits.as_strided((rows, stride or classes), (stride or classes, 1)).clone()
    at_once = inputs(rows, classes, dtype, stride, shift)[0]

    poison_cache()
    loss, nll, lse, correct = ops.cross_entropy_fwd(logits, target, smoothing, PAD, False)
    assert loss.dtype == nll.dtype == lse.dtype == torch.float32 and correct.numel() == 0
    exact_lse = logits.double().logsumexp(-1)
    assert_kernel_as_good_as(lse, logits.float().logsumexp(-1), exact_lse)
    ops.cross_entropy_bwd(dloss, logits, target.int(), lse, smoothing, PAD)
    for ours, plain, exact in zip((loss.to(dtype), nll.to(dtype), logits), *results, strict=True):
        assert_kernel_as_good_as(ours, plain, exact)
    if stride:  # memory between the rows must not be written
        after = logits.as_strided((rows, stride), (stride, 1))
        assert torch.equal(after[:, classes:], storage_before[:, classes:])

    between = at_once.as_strided((rows, stride or classes), (stride or classes, 1))
    between[:, classes:] = 7.0
    poison_cache()
    loss, nll, correct = ops.cross_entropy_fwd_bwd(dloss, at_once, target, smoothing, PAD, False)
    assert loss.dtype == nll.dtype == torch.float32 and correct.numel() == 0
    for ours, plain, exact in zip((loss.to(dtype), nll.to(dtype), at_once), *results, strict=True):
        assert_kernel_as_good_as(ours, plain, exact)
    assert between[:, classes:].eq(7.0).all()


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy(dtype, target_dtype):
    """The first class wins ties, as in torch.argmax on the CPU. Few different values, so many
    ties."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randint(-9, 9, (2000, 61), generator=generator, device="cuda").to(dtype)
    target = logits.argmax(-1)
    target[::2] = torch.randint(0, 61, (1000,), generator=generator, device="cuda")
    target = target.to(target_dtype)
    poison_cache()
    outputs = ops.cross_entropy_fwd(logits, target, 0.1, PAD, True)
    expected = ops.cross_entropy_fwd(logits.cpu(), target.cpu(), 0.1, PAD, True)[3]
    assert outputs[3].dtype == torch.bool and torch.equal(outputs[3].cpu(), expected)
    assert expected.any() and not expected.all()
    without = ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)
    assert all(map(torch.equal, outputs[:3], without[:3]))
    dloss = torch.ones(2000, device="cuda")
    at_once = ops.cross_entropy_fwd_bwd(dloss, logits, target, 0.1, PAD, True)
    assert torch.equal(at_once[2].cpu(), expected)


@pytest.mark.parametrize("classes", [5, 1000, 4001])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities(classes, smoothing, dtype):
    """Infinities give the same as in the reference; a NaN anywhere in a row must show in its
    loss."""
    logits, target = inputs(12, classes, dtype)
    target[:] = torch.arange(12, device="cuda") % 3 + 2
    inf = math.inf
    logits[0] = -inf
    logits[1, 4], logits[2, 4] = inf, -inf
    logits[3, target[3]], logits[4, target[4]] = inf, -inf
    logits[5, : classes - 1] = -inf
    logits[6, 0], logits[7, classes - 1], logits[8, target[8]] = math.nan, math.nan, math.nan
    logits[10, ::2], logits[11, 1:] = -inf, inf
    reference = logits.cpu()
    ours = ops.cross_entropy_fwd(logits, target, smoothing, PAD, True)
    expected = ops.cross_entropy_fwd(reference, target.cpu(), smoothing, PAD, True)
    for mine, other in zip(ours[:3], expected[:3], strict=True):
        torch.testing.assert_close(mine.cpu(), other, equal_nan=True)
    assert ours[0][6:9].isnan().all() and not ours[3][6:9].any()
    whole = [i for i in range(12) if i not in (6, 7, 8)]
    assert torch.equal(ours[3].cpu()[whole], expected[3][whole])
    dloss = torch.ones(12)
    at_once = logits.clone()
    results = ops.cross_entropy_fwd_bwd(dloss.cuda(), at_once, target, smoothing, PAD, True)
    for mine, other in zip(results[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine.cpu(), other, equal_nan=True)
    assert torch.equal(results[2], ours[3])
    ops.cross_entropy_bwd(dloss.cuda(), logits, target, ours[2], smoothing, PAD)
    ops.cross_entropy_bwd(dloss, reference, target.cpu(), expected[2], smoothing, PAD)
    # Values are finite if and only if they are in the reference.
    assert torch.equal(logits.cpu().isfinite(), reference.isfinite())
    assert torch.equal(at_once.cpu().isfinite(), reference.isfinite())


@pytest.mark.parametrize("size", [-6e4, 6e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits(dtype, size):
    """The maximum is subtracted first; the error is only that of rounding lse."""
    logits = torch.full((3, 4001), size, dtype=dtype, device="cuda")
    target = torch.tensor([0, 7, 4000], device="cuda")
    loss, _, lse, _ = ops.cross_entropy_fwd(logits, target, 0.0, PAD, False)
    expected = torch.full_like(loss, math.log(4001))
    torch.testing.assert_close(loss, expected, rtol=0.0, atol=6e4 * 2**-23)
    ops.cross_entropy_bwd(torch.ones_like(loss), logits, target, lse, 0.0, PAD)
    assert logits.isfinite().all() and (logits.sum(1).abs() < 0.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_become_zero_whatever_they_held(dtype):
    logits, target = inputs(50, 1003, dtype)
    logits[::5], logits[5] = math.nan, math.inf
    is_pad, dloss, at_once = target == PAD, torch.full((50,), math.nan).cuda(), logits.clone()
    loss, nll, lse, correct = ops.cross_entropy_fwd(logits, target, 0.1, PAD, True)
    ops.cross_entropy_bwd(dloss, logits, target, lse, 0.1, PAD)
    results = ops.cross_entropy_fwd_bwd(dloss, at_once, target, 0.1, PAD, True)
    for of_loss, of_nll, is_correct, gradient in (
        (loss, nll, correct, logits),
        (*results, at_once),
    ):
        assert of_loss[is_pad].eq(0).all() and of_nll[is_pad].eq(0).all()
        assert not is_correct[is_pad].any()
        assert gradient[is_pad].eq(0).all() and not gradient[is_pad].signbit().any()


@pytest.mark.parametrize("dloss_dtype", [*DTYPES, torch.float64])
def test_gradients_of_the_loss(dloss_dtype):
    """Expanded scalars, strided vectors and every float type."""
    logits, target = inputs(30, 500, torch.float32)
    lse = ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)[2]
    scalar = torch.tensor(0.3, dtype=dloss_dtype, device="cuda")
    results = []
    full = scalar.expand(30).contiguous()
    for dloss in (scalar.expand(30), full, full.repeat_interleave(2)[::2]):
        results.append(logits.clone())
        ops.cross_entropy_bwd(dloss, results[-1], target, lse, 0.1, PAD)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    expected = logits.cpu()
    ops.cross_entropy_bwd(full.cpu(), expected, target.cpu(), lse.cpu(), 0.1, PAD)
    torch.testing.assert_close(results[0].cpu(), expected)


@pytest.mark.large
def test_65k_tokens_of_43k_classes():
    """More logits than fit into a 32-bit number."""
    torch.manual_seed(0)
    rows, classes = 65536, 43000
    logits = torch.empty(rows, classes, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.randint(2, classes, (rows,), device="cuda")
    # Sums are split at cache lines of 128 bytes, so rows give the same bits alone only if they
    # start at the same offset. Eight rows are 5375 lines, and row i of these has an index that is i
    # modulo 8.
    places = [0, 1, 49946, 49947, 60004, 60005, rows - 2, rows - 1]
    chosen = torch.tensor(places, device="cuda")
    some, some_target = logits[chosen], target[chosen]
    loss, nll, lse, correct = ops.cross_entropy_fwd(logits, target, 0.1, PAD, True)
    alone = ops.cross_entropy_fwd(some, some_target, 0.1, PAD, True)
    for whole, part in zip((loss, nll, lse, correct), alone, strict=True):
        assert torch.equal(whole[chosen], part)
    torch.testing.assert_close(lse, logits.logsumexp(-1).float(), rtol=0.02, atol=0.0)
    one, at_once = torch.ones((), device="cuda"), some.clone()
    ops.cross_entropy_bwd(one.expand(rows), logits, target, lse, 0.1, PAD)
    ops.cross_entropy_bwd(one.expand(8), some, some_target, alone[2], 0.1, PAD)
    assert torch.equal(logits[chosen], some)
    logits[chosen] = at_once
    whole = ops.cross_entropy_fwd_bwd(one.expand(rows), logits, target, 0.1, PAD, True)
    part = ops.cross_entropy_fwd_bwd(one.expand(8), at_once, some_target, 0.1, PAD, True)
    assert torch.equal(logits[chosen], at_once)
    assert all(torch.equal(x[chosen], y) for x, y in zip(whole, part, strict=True))


def test_deterministic_and_replayable():
    logits, target = inputs(300, 4001, torch.bfloat16)
    dloss = torch.ones(300, device="cuda")

    def run():
        gradient = logits.clone()
        outputs = ops.cross_entropy_fwd(gradient, target, 0.1, PAD, True)
        ops.cross_entropy_bwd(dloss, gradient, target, outputs[2], 0.1, PAD)
        at_once = logits.clone()
        results = ops.cross_entropy_fwd_bwd(dloss, at_once, target, 0.1, PAD, True)
        return *outputs, gradient, *results, at_once

    first = run()
    assert all(map(torch.equal, first, run()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(map(torch.equal, first, captured))


def test_empty():
    logits, target = inputs(3, 40, torch.float16)
    outputs = ops.cross_entropy_fwd(logits[:0], target[:0], 0.1, PAD, True)
    assert [len(x) for x in outputs] == [0, 0, 0, 0]
    ops.cross_entropy_bwd(outputs[0], logits[:0], target[:0], outputs[2], 0.1, PAD)
    at_once = ops.cross_entropy_fwd_bwd(outputs[0], logits[:0], target[:0], 0.1, PAD, True)
    assert [len(x) for x in at_once] == [0, 0, 0]


def test_refusals():
    logits, target = inputs(3, 40, torch.float64)
    with pytest.raises(RuntimeError, match="cross_entropy_fwd: logits must be float32, float16 or"):
        ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)
    with pytest.raises(RuntimeError, match="cross_entropy_bwd: logits must be float32, float16 or"):
        lse = torch.zeros(3, dtype=torch.float64, device="cuda")
        ops.cross_entropy_bwd(lse, logits, target, lse, 0.1, PAD)
    with pytest.raises(
        RuntimeError, match="cross_entropy_fwd_bwd: logits must be float32, float16"
    ):
        ops.cross_entropy_fwd_bwd(lse, logits, target, 0.1, PAD, False)
    with pytest.raises(
        ValueError, match="cross_entropy_fwd: logits must be contiguous in its last"
    ):
        ops.cross_entropy_fwd(logits.half().t()[:3, :3], target, 0.1, PAD, False)
    with pytest.raises(ValueError, match="cross_entropy_fwd: target is on cpu"):
        ops.cross_entropy_fwd(logits.half(), target.cpu(), 0.1, PAD, False)


def test_range_check(monkeypatch):
    monkeypatch.setenv("LIGHTSEQ_CHECK_INDICES", "1")
    logits, target = inputs(3, 40, torch.float16)
    target[1] = 40
    with pytest.raises(ValueError, match=r"cross_entropy_fwd: target must be in .* got 40"):
        ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)
