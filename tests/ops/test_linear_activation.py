"""A GEMM with activation and dropout, and its slope, compared with autograd."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_as_good_as, check_op, leaf, make_rng, poisoned
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.ops.linear_activation import read_slope, store_slope

T, C, F, SITE = 7, 5, 9, 2
ACTIVATIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_accurate": lambda x: functional.gelu(x, approximate="tanh"),
}
GELUS = ["gelu", "gelu_accurate"]


def inputs(dtype=torch.float64, rows=T, c=C, f=F):
    """x, weight, bias"""
    torch.manual_seed(0)
    return [torch.randn(*s, dtype=torch.float64).to(dtype) for s in ((rows, c), (f, c), (f,))]


def run(operands, activation, p=0.0, need_slope=True):
    return ops.linear_activation_fwd(*operands, activation, p, make_rng(), SITE, need_slope)


def composed(operands, activation, p, dtype=None):
    """y and the slope."""
    x, weight, bias = (t if dtype is None else t.to(dtype) for t in operands)
    z = leaf(functional.linear(x, weight, bias), x.dtype)
    y = ACTIVATIONS[activation](z)
    if p > 0:
        y = y * ops.keep_mask(make_rng(), SITE, torch.arange(len(x)), y.shape[1], p)
    y.sum().backward()
    return y.detach() / (1 - p), z.grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_equals_torch(activation, p):
    y, slope = run(inputs(), activation, p)
    expected = composed(inputs(), activation, p)
    torch.testing.assert_close(y, expected[0])
    if activation == "relu":
        assert slope.numel() == 0
    else:
        torch.testing.assert_close(slope, expected[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_backward_gives_autograds_gradients(activation, p):
    """With `activation_linear_bwd` of the next product."""
    leaves = [t.requires_grad_() for t in inputs()]
    x, weight, bias = leaves
    other, dy = torch.randn(4, F, dtype=torch.float64), torch.randn(T, 4, dtype=torch.float64)
    y = ACTIVATIONS[activation](functional.linear(x, weight, bias))
    if p > 0:
        y = y * ops.keep_mask(make_rng(), SITE, torch.arange(T), F, p) / (1 - p)
    functional.linear(y, other).backward(dy)
    ours, slope = run([t.detach() for t in leaves], activation, p)
    dbias = poisoned(F)
    slope = None if activation == "relu" else slope
    dz = ops.activation_linear_bwd(dy, ours, other, slope, p, None, dbias, False)
    torch.testing.assert_close(dbias, bias.grad)
    torch.testing.assert_close(dz.t() @ x, weight.grad)
    torch.testing.assert_close(dz @ weight, x.grad)


def test_the_two_gelus_differ():
    for one, other in zip(run(inputs(), "gelu"), run(inputs(), "gelu_accurate"), strict=True):
        assert (one - other).abs().max() > 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_y_is_the_same_without_slope(activation):
    y, slope = run(inputs(), activation, 0.3, need_slope=False)
    assert torch.equal(y, run(inputs(), activation, 0.3)[0]) and slope.numel() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", GELUS)
def test_16_bits(activation, dtype):
    operands = inputs(dtype, 300, 64, 72)
    plain, exact = (composed(operands, activation, 0.1, kind) for kind in (dtype, torch.float64))
    y, slope = run(operands, activation, 0.1)
    for three in zip((y, read_slope(slope).to(dtype)), plain, exact, strict=True):
        assert_as_good_as(*three, activation)


def test_bytes_of_a_slope():
    """Only of bfloat16. 0 and 1 are exact, and nothing is off by more than half a step."""
    slope = torch.linspace(-0.13, 1.13, 10001, dtype=torch.float64)
    stored = store_slope(slope, torch.bfloat16)
    assert stored.dtype == torch.uint8 and (read_slope(stored) - slope).abs().max() < 1 / 399
    exact = torch.tensor([0.0, 1.0])
    assert torch.equal(read_slope(store_slope(exact, torch.bfloat16)), exact)
    assert store_slope(torch.tensor([torch.nan]), torch.bfloat16).item() == 255
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert torch.equal(store_slope(slope, dtype), slope.to(dtype))
        assert read_slope(slope.to(dtype)).dtype == dtype


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_stays_visible(activation):
    for place in range(3):
        operands = inputs()
        operands[place].view(-1)[0] = torch.nan
        y, slope = run(operands, activation, 0.3)
        assert y[0, 0].isnan()
        assert activation == "relu" or torch.equal(slope.isnan(), y.isnan())


@pytest.mark.parametrize("activation", GELUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_of_infinities_is_its_limit(activation, dtype):
    z = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 200, -200, torch.nan, 0], dtype=dtype)
    y, slope = run((z[:, None], torch.ones(1, 1, dtype=dtype), z[-1:]), activation)
    assert torch.equal(y[:6, 0], z[:6].clamp_min(0)) and y[6].isnan()
    assert read_slope(slope)[:6, 0].tolist() == [1, 0, 1, 0, 1, 0]
    assert slope[6] == 255 if dtype == torch.bfloat16 else slope[6].isnan()


def test_inputs_are_not_written():
    operands = inputs()
    copies = [t.clone() for t in operands]
    for activation in ACTIVATIONS:
        run(operands, activation, 0.3)
    assert all(torch.equal(t, c) for t, c in zip(operands, copies, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("need_slope", [True, False])
def test_opcheck(activation, need_slope):
    for p in (0.0, 0.3):
        settings = activation, p, make_rng(), SITE, need_slope
        check_op("linear_activation_fwd", *inputs(), *settings)


def test_refusals():
    x, weight, bias = inputs()
    with pytest.raises(
        ValueError, match=r"linear_activation_fwd: activation must be one of .*'swi"
    ):
        run((x, weight, bias), "swish")
    with pytest.raises(ValueError, match=r"linear_activation_fwd: weight must have shape \[N, 5\]"):
        run((x, weight.t(), bias), "gelu")
    with pytest.raises(ValueError, match=r"linear_activation_fwd: bias must have shape \[9\]"):
        run((x, weight, bias[1:]), "gelu")
    with pytest.raises(
        ValueError, match="linear_activation_fwd: bias must be float64, got float32"
    ):
        run((x, weight, bias.float()), "gelu")
    with pytest.raises(ValueError, match="linear_activation_fwd: p must be at least 0 and below 1"):
        run((x, weight, bias), "gelu", 1.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_rows(activation):
    x, weight, bias = inputs()
    y, slope = run((x[:0], weight, bias), activation, 0.3)
    assert y.shape == (0, F) and slope.shape == ((0,) if activation == "relu" else (0, F))
