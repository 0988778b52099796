"""Layers that run again in backward (--checkpoint-activations): the same bits with less memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightseq_fairseq.layers import DecoderLayer, EncoderLayer, run_decoder, run_encoder
from lightseq_fairseq.layers.feed_forward import FeedForward
from lightseq_fairseq.layers.stack import Stack
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
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
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
        attention: list[Tensor] = []
        y = run_decoder(
            stack, None, x, memory, target, source, RNG.clone(), True, recomputed, attention, 1
        )
        (weights,) = attention
        loss = weights.square().sum() + y.sum()
        queries = [layer.encoder_attn.q_proj.weight for layer in stack]
        found.append([y, weights, *torch.autograd.grad(loss, (memory, *queries))])
    assert all(map(torch.equal, *found))


def storages() -> dict[int, int]:
    """Address -> bytes, of the memory of all tensors."""
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor)]
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}


@NORMS
def test_recomputed_layers_keep_only_their_inputs(normalize_before: bool) -> None:
    def kept(count: int, recomputed: bool) -> int:
        """Bytes of all tensors after forward, without parameters."""
        stacks = Stacks(count, normalize_before, "relu")
        x, y = torch.randn(9, 16, requires_grad=True), torch.randn(7, 8, requires_grad=True)
        gc.collect()
        before = storages()
        out = stacks(x, y, recomputed, RNG.clone())
        sizes = storages()
        out.sum().backward()
        return sum(size for place, size in sizes.items() if place not in before)

    inputs = 4 * (9 * 16 + 7 * 8)  # of one encoder and one decoder layer
    if normalize_before:  # the residual stream, and its LayerNorm
        inputs *= 2
    memory = 4 * 9 * 2 * 8  # keys and values of one decoder layer
    assert kept(3, True) - kept(2, True) == inputs + memory
    assert kept(3, False) - kept(2, False) > 3 * (inputs + memory)


def test_recomputation_is_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    run, backward = Stack._run, FeedForward.backward
    layers = [EncoderLayer(8, 16, 2, **RATES) for _ in range(3)]

    def noted(self: Stack, layer: Any, *arguments: Any) -> Any:
        runs.append(f"layer {self.layers.index(layer)}")
        return run(self, layer, *arguments)

    def finished(*arguments: Any, **named: Any) -> Any:
        gradients = backward(*arguments, **named)
        runs.append("backward")
        return gradients

    monkeypatch.setattr(Stack, "_run", noted)
    monkeypatch.setattr(FeedForward, "backward", finished)
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


@NORMS
def test_backward_frees_what_a_layer_has_saved(
    normalize_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next layer runs, not at the end of the stack."""
    live: list[int] = []
    backward = FeedForward.backward

    def noted(*arguments: Any, **named: Any) -> Any:
        live.append(sum(storages().values()))
        return backward(*arguments, **named)

    monkeypatch.setattr(FeedForward, "backward", noted)
    rows = 500
    layers = [EncoderLayer(8, 16, 2, normalize_before=normalize_before) for _ in range(3)]
    x = torch.randn(rows, 8, requires_grad=True)
    run_encoder(layers, None, x, lengths(rows), RNG.clone()).sum().backward()
    saved = 4 * rows * (3 * 8 + 2 * 8 + 16)  # at least: q, k, v, two sums, the activation
    assert live[0] - live[1] > saved and live[1] - live[2] > saved


@NORMS
@pytest.mark.parametrize("recomputed", [False, True])
def test_frozen_layers_save_nothing(normalize_before: bool, recomputed: bool) -> None:
    def gradients(frozen: int) -> list[Tensor]:
        torch.manual_seed(3)
        layers = [EncoderLayer(8, 16, 2, normalize_before=normalize_before) for _ in range(3)]
        for layer in layers[:frozen]:
            layer.requires_grad_(False)
        x, rng = torch.randn(9, 8), RNG.clone()
        y = run_encoder(layers, None, x, lengths(9), rng, checkpoint_activations=recomputed)
        kept = [x is not None for x in y.grad_fn.kept[-3:]]  # type: ignore[union-attr]
        # In a pre-norm stack, the layer before ends with the LayerNorm of a trained one.
        needed = 3 - frozen + (normalize_before and frozen > 0)
        assert kept == [False] * (3 - needed) + [True] * needed
        y.square().sum().backward()
        assert all(p.grad is None for layer in layers[:frozen] for p in layer.parameters())
        return [p.grad for p in layers[2].parameters() if p.grad is not None]

    whole, found = gradients(0), gradients(2)
    assert len(whole) == 16 and all(map(torch.equal, whole, found))
