"""The Adam kernels give the same bits as the reference in eager torch on the same GPU."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.ops_testing import poison_cache

from lightseq_fairseq import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLIP_EPS, BETAS, EPS, DECAY = 1e-6, (0.9, 0.98), 1e-8, 0.01


def gradient(size, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda").to(dtype)


class State:
    """The parameters, and everything that an update changes or reads, on the GPU."""

    def __init__(self, size, low=torch.bfloat16, decay=DECAY, betas=BETAS):
        self.param = gradient(size, torch.float32, 1)
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.param), torch.zeros_like(self.param)
        self.param_low = None if low is None else torch.full((size,), 7.0, dtype=low).cuda()
        self.step = torch.tensor(0, device="cuda")
        self.lr = torch.tensor(1e-3, dtype=torch.float64, device="cuda")
        self.multiplier = torch.tensor(0.5, device="cuda")
        self.decay, self.betas = decay, betas

    def split(self):
        self.param = ops.split_floats(self.param, self.param_low)
        return self

    def tensors(self):
        tensors = (self.param, self.exp_avg, self.exp_avg_sq, self.param_low, self.step)
        return [x for x in tensors if x is not None]

    def update(self, grad, run=ops.adam_step, max_norm=0.0, norm=None):
        norm = ops.adam_norm(grad) if norm is None else norm
        run(
            self.param, self.exp_avg, self.exp_avg_sq, grad, self.param_low, self.step, self.lr,
            self.multiplier, norm, max_norm, CLIP_EPS, *self.betas, EPS, self.decay,
        )  # fmt: skip


def reference(*arguments):
    ops.REFERENCES["adam_step"](*arguments)


def assert_same(ours: State, theirs: State):
    for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(mine, other)


# 1023: an incomplete block; 1_000_003: more than the blocks of one wave, and an incomplete block.
@pytest.mark.parametrize("size", [0, 1, 3, 8, 1023, 1_000_003])
@pytest.mark.parametrize("low", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_have_the_bits_of_eager_torch(size, low, dtype):
    ours, theirs = State(size, low), State(size, low)
    for step in range(4):  # clipped and not clipped
        grad = gradient(size, dtype, step) * 0.1 * step
        max_norm = 0.03 * math.sqrt(size)
        ours.update(grad, max_norm=max_norm)
        theirs.update(grad, reference, max_norm=max_norm)
        assert_same(ours, theirs)
    assert ours.step.item() == 4


@pytest.mark.parametrize("size", [0, 1, 3, 8, 1023, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_of_split_parameters_have_the_bits_of_eager_torch(size, dtype):
    """Of a million numbers, about thirty lie half-way between two bfloat16 numbers."""
    ours, theirs = State(size).split(), State(size).split()
    for step in range(4):
        grad = gradient(size, dtype, step) * 0.1 * step
        ours.update(grad)
        theirs.update(grad, reference)
        assert_same(ours, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.0, 0.999), (0.3, 0.4), (0.9, 0.999)])
@pytest.mark.parametrize("scalars", [torch.float32, torch.float64])
def test_coefficients(decay, betas, scalars):
    """lerp has two formulas; learning rate, multiplier and norm have two precisions."""
    ours, theirs = State(5000, None, decay, betas), State(5000, None, decay, betas)
    for step in range(20):
        grad = gradient(5000, torch.float32, step)
        norm = ops.adam_norm(grad).to(scalars)
        for state, run in ((ours, ops.adam_step), (theirs, reference)):
            state.lr, state.multiplier = state.lr.to(scalars), state.multiplier.to(scalars)
            state.update(grad, run, 10.0, norm)
    assert_same(ours, theirs)


def test_many_blocks_see_one_step():
    """One block increments the step; other blocks do not wait for it, and must all use the same
    step."""
    ours, theirs = State(2**24 + 1), State(2**24 + 1)
    grad = gradient(2**24 + 1, torch.bfloat16)
    for _ in range(10):
        ours.update(grad)
        theirs.update(grad, reference)
    assert_same(ours, theirs)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_overflow_changes_nothing(bad, max_norm):
    state = State(100_003, torch.float16)
    grad = gradient(100_003, torch.float16)
    state.update(grad)
    before = [x.clone() for x in state.tensors()]
    for place in (0, 50_000, 100_002):
        broken = grad.clone()
        broken[place] = bad
        assert not ops.adam_norm(broken).isfinite()
        state.update(broken, max_norm=max_norm)
        assert all(map(torch.equal, state.tensors(), before))
    state.update(grad, max_norm=max_norm)
    assert state.step.item() == 2
    assert not any(map(torch.equal, state.tensors(), before))


@pytest.mark.parametrize("size", [0, 1, 7, 1023, 1_000_003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(size, dtype):
    grad = gradient(size, dtype)
    exact = grad.double().norm()
    plain = torch.linalg.vector_norm(grad, dtype=torch.float32)
    poison_cache()
    norm = ops.adam_norm(grad)
    assert norm.dtype == torch.float32 and norm.shape == ()
    rounding = 2 * exact * torch.finfo(torch.float32).eps
    assert (norm - exact).abs() <= torch.maximum(2 * (plain - exact).abs(), rounding)
    assert torch.equal(norm, ops.adam_norm(grad))


@pytest.mark.large
def test_more_elements_than_32_bits_count():
    size = 2**31 + 5
    grad = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    grad[-1], grad[2**31] = 3.0, 4.0
    norm = ops.adam_norm(grad)
    assert norm.item() == 5.0
    state, last = State(size), State(5)
    last.param.copy_(state.param[-5:])
    state.update(grad, norm=norm)
    last.update(grad[-5:].clone(), reference, norm=norm)
    for whole, part in zip(state.tensors()[:4], last.tensors()[:4], strict=True):
        assert torch.equal(whole[-5:], part)


def test_replayed_graph_goes_on():
    """Every replay reads learning rate, multiplier and step on the device."""
    grad = gradient(100_001, torch.bfloat16)
    ours, theirs = State(100_001), State(100_001)
    for state in (ours, theirs):
        state.update(grad, max_norm=1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.update(grad, max_norm=1.0)
    for step in range(3):
        grad.copy_(gradient(100_001, torch.bfloat16, step + 5))
        for state in (ours, theirs):
            state.lr.fill_(1e-3 / (step + 1))
            state.multiplier.fill_(0.1 * step)
        graph.replay()
        theirs.update(grad, reference, max_norm=1.0)
        assert_same(ours, theirs)


def test_refusals():
    grad = gradient(1001, torch.float32)
    with pytest.raises(RuntimeError, match="adam_norm: grad must be float32, float16 or bfloat16"):
        ops.adam_norm(grad.double())
    with pytest.raises(RuntimeError, match="adam_norm: grad must be aligned to 16 bytes"):
        ops.adam_norm(grad[1:])
    state = State(1000)
    with pytest.raises(RuntimeError, match="adam_step: grad must be aligned to 16 bytes"):
        state.update(grad[1:], norm=grad.norm())
    with pytest.raises(RuntimeError, match="adam_step: grad must be float32, float16 or bfloat16"):
        state.update(grad[1:].double(), norm=grad.norm())
    state.param_low = torch.zeros(1002, dtype=torch.float16, device="cuda")[2:]
    with pytest.raises(RuntimeError, match="adam_step: param_low must be aligned to 8 bytes"):
        state.update(grad[:1000], norm=grad.norm())
    state = State(1000)
    state.param, state.exp_avg, state.exp_avg_sq = (x.double() for x in state.tensors()[:3])
    with pytest.raises(RuntimeError, match="adam_step: param must be float32 on a GPU"):
        state.update(grad[:1000], norm=grad.norm())
