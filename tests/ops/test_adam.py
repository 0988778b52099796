"""Flat Adam compared with fairseq's update, its two clipping rules and its skipping of
overflows."""

from __future__ import annotations

import math

import pytest
import torch

from lightseq_fairseq import ops

N = 1000
BETA1, BETA2, EPS, DECAY, LR = 0.9, 0.98, 1e-8, 0.1, 1e-3


class State:
    """One flat parameter buffer, with everything that the op changes."""

    def __init__(self, dtype=torch.float64, low=None, size=N):
        torch.manual_seed(0)
        self.param = torch.randn(size, dtype=dtype)
        self.exp_avg, self.exp_avg_sq = torch.zeros(2, size, dtype=dtype)
        self.param_low = None if low is None else torch.full((size,), 7.0, dtype=low)
        self.step = torch.tensor(0)

    def tensors(self):
        return self.param, self.exp_avg, self.exp_avg_sq, self.param_low, self.step

    def update(self, grad, multiplier=1.0, max_norm=0.0, clip_eps=1e-6, norm=None):
        norm = ops.adam_norm(grad) if norm is None else torch.tensor(norm)
        lr, factor = (torch.tensor(x, dtype=torch.float64) for x in (LR, multiplier))
        ops.adam_step(
            self.param,
            self.exp_avg,
            self.exp_avg_sq,
            grad,
            self.param_low,
            self.step,
            lr,
            factor,
            norm,
            max_norm,
            clip_eps,
            BETA1,
            BETA2,
            EPS,
            DECAY,
        )


def fairseq_step(param, exp_avg, exp_avg_sq, step, grad):
    """fairseq's Adam in its order of operations."""
    exp_avg.mul_(BETA1).add_(grad, alpha=1 - BETA1)
    exp_avg_sq.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
    denominator = exp_avg_sq.sqrt() + EPS
    size = LR * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
    param.add_(param, alpha=-DECAY * LR)
    param.addcdiv_(exp_avg, denominator, value=-size)


@pytest.mark.parametrize("clip_eps", [1e-6, 0.0])
def test_zero_gradient_is_not_clipped(clip_eps):
    state = State()
    before = state.param.clone()
    state.update(torch.zeros(N, dtype=torch.float64), max_norm=1.0, clip_eps=clip_eps)
    torch.testing.assert_close(state.param, before - LR * DECAY * before)
    assert state.step == 1


# clip_eps 1e-6: torch's clip_grad_norm_, which fairseq uses for float32 and bfloat16. 0: the rule
# of its float16 optimizer. max_norm 3 clips some of the steps.
@pytest.mark.parametrize(("max_norm", "clip_eps"), [(0.0, 1e-6), (3.0, 1e-6), (3.0, 0.0)])
@pytest.mark.parametrize("multiplier", [1.0, 1 / 2048])
def test_equals_fairseq_over_20_steps(max_norm, clip_eps, multiplier):
    ours, theirs = State(), State()
    clipped = 0
    for step in range(1, 21):
        scaled = torch.randn(N, dtype=torch.float64) * 0.02 * step
        grad = scaled.clone()
        if max_norm > 0:
            norm = scaled.norm().item()
            factor = min(1.0, max_norm / (norm + clip_eps))
            clipped += factor < 1.0
            scaled *= factor
        fairseq_step(theirs.param, theirs.exp_avg, theirs.exp_avg_sq, step, scaled)
        ours.update(grad / multiplier, multiplier, max_norm, clip_eps)
        for mine, other in zip(ours.tensors()[:3], theirs.tensors()[:3], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)
    assert ours.step.item() == 20
    assert max_norm == 0 or 0 < clipped < 20


def test_the_two_clipping_rules_differ():
    grad = torch.full((N,), 1e-6, dtype=torch.float64)
    first, second = State(), State()
    first.update(grad, max_norm=1e-9, clip_eps=1e-6)
    second.update(grad, max_norm=1e-9, clip_eps=0.0)
    norm = grad.norm().item()
    expected = (1 - BETA1) * 1e-6 * 1e-9 / torch.tensor([norm + 1e-6, norm], dtype=torch.float64)
    torch.testing.assert_close(torch.stack((first.exp_avg[0], second.exp_avg[0])), expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_overflow_changes_nothing(bad, warm, max_norm):
    state = State(torch.float32, torch.float16)
    grad = torch.randn(N)
    if warm:
        state.update(grad)
    before = [x.clone() for x in state.tensors()]
    grad[3] = bad
    assert not ops.adam_norm(grad).isfinite()
    state.update(grad, max_norm=max_norm)
    assert all(torch.equal(x, y) for x, y in zip(state.tensors(), before, strict=True))
    grad[3] = 1.0
    state.update(grad, max_norm=max_norm)
    assert state.step.item() == before[4].item() + 1
    assert all(not torch.equal(x, y) for x, y in zip(state.tensors(), before, strict=True))
    assert all(x.isfinite().all() for x in state.tensors())


def test_overflow_is_decided_by_the_norm():
    """The gradient of this rank is finite, but another rank has an overflow: the reduced norm shows
    it."""
    state = State()
    before = state.param.clone()
    state.update(torch.randn(N).double(), norm=math.inf)
    assert torch.equal(state.param, before) and state.step.item() == 0


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_low_precision_copy(low):
    state, alone = State(torch.float32, low), State(torch.float32)
    for _ in range(3):
        grad = torch.randn(N).to(low)
        state.update(grad, 0.5, 1.0)
        alone.update(grad.float(), 0.5, 1.0)
    assert torch.equal(state.param_low, state.param.to(low))
    torch.testing.assert_close(state.param, alone.param)


def test_split_floats():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).int()
    special = [0, -(2**31), 1, 0x7F7FFFFF, 0x7F800000, 0x3F7F8000, 0x3F808000, 0x3F807FFF]
    x = torch.cat([torch.tensor(special, dtype=torch.int32), bits]).view(torch.float32)
    x = x[~x.isnan()]
    high = torch.empty(len(x), dtype=torch.bfloat16)
    rest = ops.split_floats(x, high)
    assert rest.dtype == torch.int16 and torch.equal(high, x.bfloat16())
    joined = ops.join_floats(high, rest)
    moved = joined.view(torch.int32) != x.view(torch.int32)
    assert x[moved].view(torch.int32).bitwise_and(0x1FFFF).eq(0x8000).all() and moved[6]
    assert (joined.view(torch.int32) - x.view(torch.int32))[moved].eq(-1).all()
    assert torch.equal(joined.bfloat16(), high)
    again = torch.empty_like(high)
    assert torch.equal(ops.split_floats(joined, again), rest) and torch.equal(again, high)


def test_a_split_parameter_is_updated_like_a_whole_one():
    whole, split = State(torch.float32, torch.bfloat16), State(torch.float32, torch.bfloat16)
    split.param = ops.split_floats(split.param, split.param_low)
    split.exp_avg, split.exp_avg_sq = whole.exp_avg.clone(), whole.exp_avg_sq.clone()
    for _ in range(20):
        grad = torch.randn(N).bfloat16()
        whole.update(grad, 0.5, 1.0)
        split.update(grad, 0.5, 1.0)
    joined = ops.join_floats(split.param_low, split.param)
    # The one number in 131072 that lies half-way changes.
    torch.testing.assert_close(joined, whole.param, rtol=1e-6, atol=0.0)
    assert (joined == whole.param).float().mean() > 0.99
    for mine, other in zip(split.tensors()[1:], whole.tensors()[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0.0)


def test_float32_stays_as_close_as_fairseq():
    """Errors of 20 float32 steps against float64: ours, and fairseq's order of operations in plain
    torch."""
    exact, ours, plain = State(), State(torch.float32), State(torch.float32)
    ours.param.copy_(exact.param)
    plain.param.copy_(exact.param)
    for step in range(1, 21):
        grad = torch.randn(N)
        ours.update(grad)
        fairseq_step(plain.param, plain.exp_avg, plain.exp_avg_sq, step, grad)
        fairseq_step(exact.param, exact.exp_avg, exact.exp_avg_sq, step, grad.double())
    our_error, plain_error = ((x.param.double() - exact.param).norm().item() for x in (ours, plain))
    assert our_error <= 1.1 * plain_error


@pytest.mark.parametrize("size", [0, 1, 4096, 2**18 + 1, 700_000])
def test_sizes(size):
    """Sizes around the lengths at which rows of the norm and blocks of the update end."""
    ours, theirs = State(size=size), State(size=size)
    grad = torch.randn(size, dtype=torch.float64)
    torch.testing.assert_close(ops.adam_norm(grad), grad.norm())
    ours.update(grad)
    fairseq_step(theirs.param, theirs.exp_avg, theirs.exp_avg_sq, 1, grad)
    torch.testing.assert_close(ours.param, theirs.param)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norm_precision(dtype):
    """Two million small numbers, whose squares are zero in 16 bits."""
    grad = torch.full((2_000_000,), 3e-4, dtype=dtype)
    norm = ops.adam_norm(grad)
    assert norm.dtype == torch.float32 and norm.dim() == 0
    torch.testing.assert_close(norm.double(), grad.double().norm(), rtol=1e-6, atol=0)
