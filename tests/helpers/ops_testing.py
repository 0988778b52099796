"""Common code of the tests of ops: random bits, gradient checks of op pairs, 16-bit error
bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from lightseq_fairseq import ops
from lightseq_fairseq.base import library
from lightseq_fairseq.ops.casting import quantise

Grads = tuple[Tensor | None, ...]


def make_rng(
    seed: int = 0x1234_5678_9ABC, micro_batch: int = 3, device: str | torch.device = "cpu"
) -> Tensor:
    """The rng of dropout: (seed, micro-batch number)."""
    return torch.tensor([seed, micro_batch], dtype=torch.int64, device=device)


def poisoned(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A buffer of NaN that an op must overwrite; reading it makes the result NaN."""
    return torch.full(shape, torch.nan, dtype=dtype)


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x in ``dtype`` that collects a gradient."""
    return x.detach().to(dtype, copy=True).requires_grad_()


def check_op(name: str, *arguments: Any) -> None:
    """torch's checks of schema, mutations, aliasing and shape function of lightseq::name.

    With fp8 arguments only of the shape function: torch cannot compare fp8 tensors.
    """
    given = tuple(flat(arguments))
    has_fp8 = any(isinstance(x, Tensor) and x.dtype.itemsize == 1 for x in given)
    checks = {"test_utils": "test_faketensor"} if has_fp8 else {}
    opcheck(getattr(torch.ops.lightseq, name).default, given, **checks)


def flat(arguments: Iterable[Any]) -> list[Any]:
    """The arguments as ``torch.ops.lightseq`` and references take them: without groups."""
    return [x for y in arguments for x in (y if isinstance(y, tuple) else (y,))]


def make_cast(scale: float = 2.0**-6, device: str | torch.device = "cpu") -> ops.Cast:
    """A cast that has noted numbers before."""
    return ops.Cast(*(torch.tensor(x, device=device) for x in (scale, 0.5 * scale, 3)))


def assert_cast_of(x: Tensor, operand: Iterable[Tensor], cast: ops.Cast) -> None:
    """The values, and the transpose if the operand has one, are bit for bit those of x [T, C], and
    so is what the cast, a result of `make_cast`, has noted."""
    expected = make_cast(cast.scale.item())
    for mine, other in zip(operand, quantise(x.cpu(), expected)):
        assert mine.shape == other.shape and mine.is_contiguous()
        assert torch.equal(mine.view(torch.uint8).cpu(), other.view(torch.uint8))
    assert [x.item() for x in cast] == [x.item() for x in expected]


class _Pair(torch.autograd.Function):
    """A forward op and its backward op as one differentiable function."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, forward: Callable[..., Any], backward: Callable[..., Grads], *inputs: Tensor
    ) -> Any:
        outputs = forward(*inputs)
        ctx.call_backward = backward
        ctx.save_for_backward(*inputs, *outputs)
        ctx.number_of_inputs = len(inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> Any:  # type: ignore[override]
        inputs = ctx.saved_tensors[: ctx.number_of_inputs]
        outputs = ctx.saved_tensors[ctx.number_of_inputs :]
        return None, None, *ctx.call_backward(douts, inputs, outputs)


def check_gradients(
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Grads],
    inputs: Sequence[Tensor],
    differentiable: int = 1,
) -> None:
    """float64 gradcheck of `forward` against `backward`.

    forward(*inputs) returns a tuple whose first `differentiable` tensors have gradients.
    backward(douts, inputs, outputs) returns one gradient (or None) per input.
    """
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]

    def function(*arguments: Tensor) -> tuple[Tensor, ...]:
        return _Pair.apply(forward, backward, *arguments)[:differentiable]

    assert torch.autograd.gradcheck(function, leaves, raise_exception=True)


def assert_as_good_as(ours: Tensor, plain: Tensor, exact: Tensor, what: str = "") -> None:
    """The error of ours is at most twice that of plain 16-bit torch, both measured against
    float64."""
    assert ours.dtype == plain.dtype and exact.dtype == torch.float64
    our_error = (ours.double() - exact).abs().max()
    plain_error = (plain.double() - exact).abs().max()
    assert our_error.isfinite()
    assert our_error <= 2 * plain_error, f"{what}: {our_error:.3e} against {plain_error:.3e}"


def spaced(x: Tensor) -> Tensor:
    """The numbers of x, with three NaNs behind each."""
    wide = x.new_full((*x.shape, 4), torch.nan)
    wide[..., 0] = x
    return wide[..., 0]


# For kernels on a GPU


def poison_cache() -> None:
    """Makes the next torch.empty return memory of NaN, or of -1 if read as integers."""
    blocks = [torch.full((2**k,), -1, dtype=torch.int32, device="cuda") for k in range(6, 24)]
    del blocks


def on_gpu(x: Tensor) -> Tensor:
    """x on the GPU with the same strides."""
    whole = x.new_empty(0).set_(x.untyped_storage())
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


def assert_replays_draw_anew(run: Callable[[], list[Tensor]], rng: Tensor) -> None:
    """Each replay of a captured run() has its results for the rng of that moment; the first result
    has other dropout then."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    seen = []
    for micro_batch in (1, 2):
        rng[1] = micro_batch
        graph.replay()
        seen.append([t.clone() for t in captured])
        assert all(map(torch.equal, seen[-1], run()))
    assert not torch.equal(seen[0][0], seen[1][0])


def skip_without_fp8() -> None:
    """Skips a test of fp8 kernels on GPUs before compute capability 8.9, after a test of the
    refusal."""
    if has_fp8():
        return
    x = torch.zeros(1, 16, device="cuda")
    with pytest.raises(RuntimeError, match="fp8_quantise: fp8 needs a GPU of compute capability 8"):
        ops.fp8_quantise(x, make_cast(device="cuda"))
    pytest.skip("the GPU has no fp8")


def has_fp8() -> bool:
    major, minor = torch.cuda.get_device_capability()
    return (library.load().acts_as or 10 * major + minor) >= 89


def assert_kernel_as_good_as(
    ours: Tensor, plain: Tensor, exact: Tensor, what: str = "", half_roundings: float = 0.0
) -> None:
    """The error of ours is at most twice that of plain torch, plus a few roundings.

    A rounding is that of the largest number. In float32 four are allowed, because there the order
    of a sum matters about as much; in 16 bits ``half_roundings``.
    """
    error, allowed = ((x.double().cpu() - exact.cpu()).abs().max() for x in (ours, plain))
    roundings = 4.0 if ours.dtype == torch.float32 else half_roundings
    bound = max(2 * allowed, roundings * torch.finfo(ours.dtype).eps * exact.abs().max().cpu())
    assert error <= bound, f"{what}: {error:.3e}, plain torch {allowed:.3e}"


def adam_arguments(weights: Tensor) -> dict[str, Any]:
    """The arguments of ``ops.adam_step`` for parameters near the bfloat16 weights [N]; they are
    split, and their moments are not zero."""

    def normal() -> Tensor:
        return torch.randn(weights.shape).to(weights.device)

    low = torch.empty_like(weights)
    return {
        "param": ops.split_floats(weights.float() + normal() * 2.0**-10, low),
        "exp_avg": normal() / 64,
        "exp_avg_sq": normal().abs() / 64,
        "grad": normal().bfloat16(),
        "param_low": low,
        **{
            name: torch.tensor(value, device=weights.device)
            for name, value in {"step": 7, "lr": 1e-2, "multiplier": 0.5, "norm": 2.0}.items()
        },
        "max_norm": 0.7,
        "clip_eps": 1e-6,
        "beta1": 0.9,
        "beta2": 0.98,
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
