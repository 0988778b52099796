"""Label-smoothed cross entropy compared with fairseq's formula, value by value."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_gradients, leaf

from lightseq_fairseq import ops

T, V, PAD = 9, 7, 1


def inputs(dtype=torch.float64, rows=T, classes=V):
    torch.manual_seed(0)
    target = torch.randint(0, classes, (rows,))
    target[::4] = PAD
    return (3 * torch.randn(rows, classes)).to(dtype), target


def formula(logits, target, smoothing):
    """(loss, nll) of each token: fairseq's label_smoothed_nll_loss without its reduction."""
    log_probabilities = logits.log_softmax(-1)
    nll = -log_probabilities[torch.arange(len(target)), target]
    smooth = -log_probabilities.sum(-1)
    share = smoothing / (logits.shape[1] - 1)
    loss = (1.0 - smoothing - share) * nll + share * smooth
    is_pad = target == PAD
    return loss.masked_fill(is_pad, 0.0), nll.masked_fill(is_pad, 0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64])
def test_equals_formula(smoothing, target_dtype):
    logits, target = inputs()
    reference = leaf(logits, torch.float64)
    expected_loss, expected_nll = formula(reference, target, smoothing)
    target = target.to(target_dtype)
    loss, nll, lse, correct = ops.cross_entropy_fwd(logits, target, smoothing, PAD, False)
    torch.testing.assert_close(loss, expected_loss.detach())
    torch.testing.assert_close(nll, expected_nll.detach())
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    assert correct.numel() == 0 and (target == PAD).any() and loss.ne(0).any()

    dloss = torch.randn(T, dtype=torch.float64)
    expected_loss.backward(dloss)
    ops.cross_entropy_bwd(dloss, logits, target, lse, smoothing, PAD)
    torch.testing.assert_close(logits, reference.grad)


@pytest.mark.parametrize("accuracy", [True, False])
def test_forward_and_backward_at_once(accuracy):
    logits, target = inputs()
    dloss = torch.randn(T, dtype=torch.float64)
    loss, nll, lse, correct = ops.cross_entropy_fwd(logits, target, 0.1, PAD, accuracy)
    gradient = logits.clone()
    ops.cross_entropy_bwd(dloss, gradient, target, lse, 0.1, PAD)
    at_once = ops.cross_entropy_fwd_bwd(dloss, logits, target, 0.1, PAD, accuracy)
    assert all(map(torch.equal, (*at_once, logits), (loss, nll, correct, gradient)))


def test_smoothing_counts_every_class_but_the_target_once():
    """V - 1, not V: the difference only shows with a small vocabulary."""
    logits = torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64)
    log_probabilities = logits.log_softmax(-1)[0]
    expected = -(
        0.8 * log_probabilities[0] + 0.1 * log_probabilities[1] + 0.1 * log_probabilities[2]
    )
    loss = ops.cross_entropy_fwd(logits, torch.tensor([0]), 0.2, PAD, False)[0]
    torch.testing.assert_close(loss, expected[None])


def test_accuracy():
    logits, target = inputs()
    best = logits.argmax(-1)
    target[2], target[3], target[4] = best[2], best[3], PAD
    logits[4, PAD] = 99.0
    loss, nll, lse, correct = ops.cross_entropy_fwd(logits, target, 0.1, PAD, True)
    assert correct.dtype == torch.bool
    assert torch.equal(correct, (best == target) & (target != PAD))
    assert correct[2] and correct[3] and not correct[4]
    same = ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)
    assert all(torch.equal(x, y) for x, y in zip((loss, nll, lse), same, strict=False))


def test_expanded_scalar_gradient():
    logits, target = inputs()
    lse = ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)[2]
    expanded, full = logits.clone(), logits.clone()
    scalar = torch.tensor(0.5, dtype=torch.float64)
    ops.cross_entropy_bwd(scalar.expand(T), expanded, target, lse, 0.1, PAD)
    ops.cross_entropy_bwd(scalar.expand(T).contiguous(), full, target, lse, 0.1, PAD)
    assert torch.equal(expanded, full)


def test_padding_rows_become_zero_whatever_they_held():
    logits, target = inputs()
    logits[0], logits[4] = torch.nan, torch.inf
    loss, nll, lse, _ = ops.cross_entropy_fwd(logits, target, 0.1, PAD, True)
    assert loss.isfinite().all() and nll.isfinite().all()
    ops.cross_entropy_bwd(torch.ones(T).double(), logits, target, lse, 0.1, PAD)
    assert logits[target == PAD].eq(0).all() and logits[target != PAD].ne(0).any()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(smoothing):
    logits, target = inputs()

    def backward(douts, saved, outputs):
        gradient = saved[0].clone()
        ops.cross_entropy_bwd(douts[0], gradient, target, outputs[2], smoothing, PAD)
        return (gradient,)

    check_gradients(
        lambda x: ops.cross_entropy_fwd(x, target, smoothing, PAD, False), backward, [logits]
    )


def test_blocks_do_not_show():
    """With more logits than one cache block, every row has the same result as alone."""
    logits, target = inputs(torch.float32, rows=900, classes=1000)
    exact = formula(logits.double(), target, 0.1)[0]
    loss, _, lse, _ = ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    gradient = logits.clone()
    ops.cross_entropy_bwd(torch.ones(900), gradient, target, lse, 0.1, PAD)
    for row in (0, 523, 524, 525, 899):
        single = logits[row : row + 1].clone()
        part = slice(row, row + 1)
        ops.cross_entropy_bwd(torch.ones(1), single, target[part], lse[part], 0.1, PAD)
        torch.testing.assert_close(gradient[part], single)


def test_large_logits():
    """The maximum is subtracted first, so nothing overflows."""
    logits = torch.tensor([[1e4, 0.0, 1e4], [-1e4, -1e4, -1e4]])
    loss, _, lse, _ = ops.cross_entropy_fwd(logits, torch.tensor([0, 2]), 0.0, -1, False)
    torch.testing.assert_close(loss, torch.tensor([2.0, 3.0]).log(), rtol=0, atol=1e-3)
    ops.cross_entropy_bwd(torch.ones(2), logits, torch.tensor([0, 2]), lse, 0.0, -1)
    assert logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype):
    logits, target = inputs(dtype, 300, 50)
    dloss = torch.randn(300)
    results = []
    for kind in (dtype, torch.float64):
        x = leaf(logits, kind)
        loss, nll = formula(x, target, 0.1)
        loss.backward(dloss.to(kind))
        results.append((loss.detach(), nll.detach(), x.grad))
    loss, nll, lse, _ = ops.cross_entropy_fwd(logits, target, 0.1, PAD, False)
    assert loss.dtype == nll.dtype == lse.dtype == torch.float32
    ops.cross_entropy_bwd(dloss, logits, target, lse, 0.1, PAD)
    for ours, plain, exact in zip((loss.to(dtype), nll.to(dtype), logits), *results, strict=True):
        assert_as_good_as(ours, plain, exact)


def test_empty():
    logits, target = inputs(rows=0)
    outputs = ops.cross_entropy_fwd(logits, target, 0.1, PAD, True)
    assert [len(x) for x in outputs] == [0, 0, 0, 0]
    ops.cross_entropy_bwd(outputs[0], logits, target, outputs[2], 0.1, PAD)


def test_one_class_is_refused():
    logits, target = inputs(torch.float32)
    with pytest.raises(ValueError, match="logits must have at least 2 classes, got 1"):
        ops.cross_entropy_fwd(logits[:, :1], target, 0.1, PAD, False)
