"""Checks of values; tensors without values pass, so that the ops' shape functions can be called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers.ops_testing import make_rng
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightseq_fairseq import ops

T, V, H, D = 6, 7, 2, 4
BOUNDARIES = torch.tensor([0, 4, T], dtype=torch.int32)


def embedding(tokens: Tensor, weight: Tensor, rng: Tensor) -> Tensor:
    return ops.embedding_fwd(tokens, weight, None, None, 1.0, ops.Dropout(0.1, rng, 0))[0]


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    return ops.cross_entropy_fwd(logits, target, 0.1, 1, False)[0]


def attention(cu: Tensor, q: Tensor, rng: Tensor) -> Tensor:
    return ops.attention_fwd(q, q, q, cu, cu, 4, 4, False, 0.5, ops.Dropout(0.1, rng, 0))[0]


def self_attention(step: Tensor, qkv: Tensor, cache: Tensor, ancestry: Tensor) -> Tensor:
    return ops.decode_self_attention(qkv, cache, cache.clone(), ancestry, step, H, 0.5)


def cross_attention(cu: Tensor, q: Tensor, sentences: Tensor) -> Tensor:
    return ops.decode_cross_attention(q, q, q, cu, sentences, 1, H, 0.5)


def quantised(scale: Tensor, x: Tensor, amax: Tensor, saturated: Tensor) -> Tensor:
    return ops.fp8_quantise(x, ops.Cast(scale, amax, saturated))[0]


CASES = {
    "embedding": (embedding, (torch.arange(T), torch.randn(V, D), make_rng())),
    "cross_entropy": (cross_entropy, (torch.arange(T), torch.randn(T, V))),
    "attention": (attention, (BOUNDARIES, torch.randn(T, H, D), make_rng())),
    "self_attention": (
        self_attention,
        (torch.tensor(1), torch.randn(2, 3 * D), torch.randn(3, 2, D), torch.zeros(3, 2).int()),
    ),
    "cross_attention": (cross_attention, (BOUNDARIES, torch.randn(T, D), torch.arange(2).int())),
    "fp8_quantise": (
        quantised,
        (torch.tensor(2.0), torch.randn(T, 16), torch.tensor(0.0), torch.tensor(0)),
    ),
}  # the values of the first tensor are checked


@pytest.mark.parametrize("asked", ["", "1"])
@pytest.mark.parametrize("name", CASES)
def test_tensors_without_values(name: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTSEQ_CHECK_INDICES", asked)
    call, arguments = CASES[name]
    expected = call(*arguments)
    with FakeTensorMode() as mode:
        fake = call(*map(mode.from_tensor, arguments))
    meta = call(*(x.to("meta") for x in arguments))
    assert fake.shape == meta.shape == expected.shape

    compiled: Callable[..., Tensor] = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), expected)
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_values_are_checked_without_being_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    call, (values, *others) = CASES[name]
    with pytest.raises(ValueError, match="must"):
        call(values + V, *others)
