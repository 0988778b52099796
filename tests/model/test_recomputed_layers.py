"""Layers that run again in backward (--checkpoint-activations): the same bits with less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightseq_fairseq.layers import (
    DecoderLayer,
    EncoderLayer,
    feed_forward,
    run_decoder,
    run_encoder,
)
from lightseq_fairseq.layers.decoder import run_decoder_with_weights
from lightseq_fairseq.memory.packing import Segments

RNG = torch.tensor([1234, 5])
RATES = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.4}
NORMS = pytest.mark.parametrize("normalize_before", [False, True], ids=["post-norm", "pre-norm"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def lengths(*counts: int) -> Segments:
    return Segments.from_lengths(torch.tensor(counts))


class Stacks(nn.Module):
    """An encoder and a decoder of another width, both with dropout and without assigned sites."""

    def __init__(self, count: int, normalize_before: bool, activation: str) -> None:
        super().__init__()
        options: dict[str, Any] = {**RATES, "activation": activation}
        options["normalize_before"] = normalize_before
        self.encoder = nn.ModuleList(EncoderLayer(16, 24, 2, **options) for _ in range(count))
        self.decoder = nn.ModuleList(
            DecoderLayer(8, 40, 2, encoder_dim=16, **options) for _ in range(count)
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if normalize_before else nn.Identity() for width in (16, 8)
        )

    def forward(self, x: Tensor, y: Tensor, recomputed: bool, rng: Tensor) -> Tensor:
        first, last = (norm if isinstance(norm, nn.LayerNorm) else None for norm in self.norms)
        source, target = lengths(5, 4), lengths(3, 4)
        again = {"checkpoint_activations": recomputed}
        memory = run_encoder(self.encoder, first, x, source, rng, **again)
        return run_decoder(self.decoder, last, y, memory, target, source, rng, **again)


@NORMS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recomputed_layers_give_the_same_bits(
    normalize_before: bool, activation: str, dtype: torch.dtype
) -> None:
    stacks = Stacks(2, normalize_before, activation).to(dtype)
    inputs = [torch.randn(rows, width, dtype=dtype) for rows, width in ((9, 16), (7, 8))]
    found = []
    for recomputed in (False, True):
        stacks.zero_grad()
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = stacks(*leaves, recomputed, RNG.clone())
        y.square().sum().backward()
        gradients = [leaf.grad for leaf in (*leaves, *stacks.parameters())]
        assert all(g is not None and g.any() for g in gradients)
        found.append([y, *gradients])
    assert all(map(torch.equal, *found))


@NORMS
def test_recomputed_attention_weights_give_the_same_gradients(normalize_before: bool) -> None:
    options: dict[str, Any] = {**RATES, "normalize_before": normalize_before}
    stack = nn.ModuleList(DecoderLayer(8, 12, 2, **options) for _ in range(3))
    target, source = lengths(3, 4), lengths(5, 4)
    x, memory = torch.randn(7, 8), torch.randn(9, 8, requires_grad=True)
    found = []
    for recomputed in (False, True):
        y, weights = run_decoder_with_weights(
            stack, None, x, memory, target, source, RNG.clone(), True, 1, recomputed
        )
        assert weights is not None
        loss = weights.square().sum() + y.sum()
        queries = [layer.encoder_attn.q_proj.weight for layer in stack]
        found.append([y, weights, *torch.autograd.grad(loss, (memory, *queries))])
    assert all(map(torch.equal, *found))


@NORMS
def test_recomputed_layers_keep_only_their_inputs(normalize_before: bool) -> None:
    def kept(count: int, recomputed: bool) -> int:
        """Bytes that autograd keeps for backward, without parameters."""
        stacks = Stacks(count, normalize_before, "relu")
        storages = {p.untyped_storage().data_ptr() for p in stacks.parameters()}
        sizes: dict[int, int] = {}

        def keep(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in storages:
                sizes[storage.data_ptr()] = storage.nbytes()
            return x  # alive, so no other storage gets its address

        x, y = torch.randn(9, 16, requires_grad=True), torch.randn(7, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = stacks(x, y, recomputed, RNG.clone())
        out.sum().backward()
        return sum(sizes.values())

    inputs = 4 * (9 * 16 + 7 * 8)  # of one encoder and one decoder layer
    if normalize_before:  # the residual stream, and its LayerNorm
        inputs *= 2
    memory = 4 * 9 * 2 * 8  # keys and values of one decoder layer
    assert kept(3, True) - kept(2, True) == inputs + memory
    assert kept(3, False) - kept(2, False) > 3 * (inputs + memory)


def test_recomputation_is_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    forward = EncoderLayer.forward_in_stack
    backward = feed_forward._FeedForward.backward
    layers = [EncoderLayer(8, 16, 2, **RATES) for _ in range(3)]
    names = {id(layer): f"layer {place}" for place, layer in enumerate(layers)}

    def counted(self: EncoderLayer, *arguments: Any) -> Any:
        runs.append(names[id(self)])
        return forward(self, *arguments)

    def noted(*arguments: Any) -> Any:
        gradients = backward(*arguments)
        runs.append("backward")
        return gradients

    monkeypatch.setattr(EncoderLayer, "forward_in_stack", counted)
    monkeypatch.setattr(feed_forward._FeedForward, "backward", noted)
    x = torch.randn(5, 8, requires_grad=True)
    y = run_encoder(layers, None, x, lengths(5), RNG.clone(), checkpoint_activations=True)
    assert runs == ["layer 0", "layer 1", "layer 2"]
    runs.clear()
    y.sum().backward()
    assert runs == ["layer 2", "backward", "layer 1", "backward", "layer 0", "backward"]
    runs.clear()
    with torch.no_grad():
        run_encoder(layers, None, x, lengths(5), RNG.clone(), checkpoint_activations=True)
    assert runs == ["layer 0", "layer 1", "layer 2"]
