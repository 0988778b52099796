"""The layers on packed tokens: without fairseq, against fairseq's layers, and misused."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

import helpers.parity as parity
import pytest
import torch
from fairseq.modules import SinusoidalPositionalEmbedding, transformer_layer
from helpers.layer_inputs import NORMS, RATES, RNG, lengths, rows
from helpers.mutations import change_op
from torch import nn

from lightseq_fairseq.layers import (
    DecoderLayer,
    Embedding,
    EncoderLayer,
    MultiheadAttention,
    label_smoothed_cross_entropy,
    linear,
    run_decoder,
    run_encoder,
    sinusoidal_positions,
)
from lightseq_fairseq.memory.packing import Segments

WITHOUT_FAIRSEQ = """
import sys, torch
from lightseq_fairseq import layers
from lightseq_fairseq.memory.packing import Segments

source = Segments.from_lengths(torch.tensor([3, 5]))
target = Segments.from_lengths(torch.tensor([4, 2]))
rng = layers.draw_rng()
table = layers.Embedding(11, 8, padding_idx=1, dropout=0.1)
rates = dict(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1)
encoder = layers.EncoderLayer(8, 16, 2, **rates, site=8)
decoder = layers.DecoderLayer(8, 16, 2, **rates, site=16)
memory = encoder(table(torch.randint(2, 11, (8,)), source, rng, 0), source, rng)
x = decoder(table(torch.randint(2, 11, (6,)), target, rng, 1), memory, target, source, rng)
logits = layers.linear(x, table.weight)
loss, nll, correct = layers.label_smoothed_cross_entropy(logits, torch.randint(2, 11, (6,)), 0.1, 1)
loss.sum().backward()
for module in (table, encoder, decoder):
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None or not parameter.requires_grad, name
assert all(p.grad.isfinite().all() and p.grad.any() for p in encoder.parameters() if p.dim() > 1)
assert "fairseq" not in sys.modules
"""


def test_layers_need_no_fairseq() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_FAIRSEQ], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def native_args(normalize_before: bool) -> Namespace:
    return Namespace(
        encoder_embed_dim=8, encoder_ffn_embed_dim=12, encoder_attention_heads=2,
        decoder_embed_dim=8, decoder_ffn_embed_dim=12, decoder_attention_heads=2,
        encoder_normalize_before=normalize_before, decoder_normalize_before=normalize_before,
        dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, activation_fn="relu",
    )  # fmt: skip


def assert_same_gradients(ours: nn.Module, native: nn.Module) -> None:
    expected = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-12)


@NORMS
def test_encoder_layer_is_fairseqs(normalize_before: bool) -> None:
    native = transformer_layer.TransformerEncoderLayer(native_args(normalize_before)).double()
    ours = EncoderLayer(8, 12, 2, normalize_before=normalize_before).double()
    ours.load_state_dict(native.state_dict(), strict=True)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    segments = Segments.from_mask(mask)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    expected = native(x.transpose(0, 1), encoder_padding_mask=~mask).transpose(0, 1)[mask]
    found = ours(segments.pack(x), segments, RNG)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(found)
    (wanted,) = torch.autograd.grad((expected * direction).sum(), x, retain_graph=True)
    (gradient,) = torch.autograd.grad((found * direction).sum(), x, retain_graph=True)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-12)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    assert_same_gradients(ours, native)


@NORMS
def test_decoder_layer_is_fairseqs(normalize_before: bool) -> None:
    native = transformer_layer.TransformerDecoderLayer(native_args(normalize_before)).double()
    ours = DecoderLayer(8, 12, 2, normalize_before=normalize_before).double()
    ours.load_state_dict(native.state_dict(), strict=True)
    source_mask = torch.arange(4) < torch.tensor([[2], [4]])
    target_mask = torch.arange(3) < torch.tensor([[3], [1]])
    source, target = Segments.from_mask(source_mask), Segments.from_mask(target_mask)
    x, memory = (torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    with parity.native_in_float64():
        expected = native(
            x.transpose(0, 1),
            memory.transpose(0, 1),
            ~source_mask,
            self_attn_mask=torch.full((3, 3), -torch.inf, dtype=torch.float64).triu(1),
            self_attn_padding_mask=~target_mask,
        )[0].transpose(0, 1)[target_mask]
    found = ours(target.pack(x), source.pack(memory), target, source, RNG)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad((found * direction).sum(), (x, memory), retain_graph=True),
        torch.autograd.grad((expected * direction).sum(), (x, memory), retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    assert_same_gradients(ours, native)


def test_no_derivative_of_gelu_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    change_op(monkeypatch, "linear_activation_fwd", lambda a: wanted.append(a["need_slope"]))
    segments, layer = lengths(3, 5), EncoderLayer(8, 12, 2, activation="gelu").double()
    x = rows(segments, 8)
    found = layer(x, segments, RNG)
    with torch.no_grad():
        assert torch.equal(layer(x, segments, RNG), found)
    assert wanted == [True, False]


@pytest.mark.parametrize("width", [8, 9])
def test_sinusoidal_positions_are_fairseqs(width: int) -> None:
    expected = SinusoidalPositionalEmbedding.get_embedding(50, width, 1)
    assert torch.equal(sinusoidal_positions(50, width, 1), expected)


@NORMS
def test_sentences_of_one_token(normalize_before: bool) -> None:
    # Attention over one token returns its value for any query, so a batch of such sentences gives
    # the same as each sentence alone.
    layer = EncoderLayer(8, 12, 2, normalize_before=normalize_before).double()
    x = torch.randn(3, 8, dtype=torch.float64)
    together = layer(x, lengths(1, 1, 1), RNG)
    alone = [layer(row[None], lengths(1), RNG)[0] for row in x]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)
    memory = torch.randn(3, 8, dtype=torch.float64)
    layer = DecoderLayer(8, 12, 2, normalize_before=normalize_before).double()
    together = layer(x, memory, lengths(1, 1, 1), lengths(1, 1, 1), RNG)
    alone = [
        layer(row[None], m[None], lengths(1), lengths(1), RNG)[0]
        for row, m in zip(x, memory, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-12, atol=1e-12)


def test_sentences_do_not_see_each_other() -> None:
    layer = EncoderLayer(8, 12, 2).double()
    x = torch.randn(7, 8, dtype=torch.float64)
    before = layer(x, lengths(3, 4), RNG)
    x[3:] += 1
    assert torch.equal(layer(x, lengths(3, 4), RNG)[:3], before[:3])


def test_causal_attention_does_not_look_ahead() -> None:
    layer, memory = DecoderLayer(8, 12, 2).double(), torch.randn(2, 8, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    before = layer(x, memory, lengths(5), lengths(2), RNG)
    x[3:] += 1
    after = layer(x, memory, lengths(5), lengths(2), RNG)
    assert torch.equal(after[:3], before[:3])
    assert not torch.equal(after[3:], before[3:])


@pytest.mark.parametrize("last_norm", [None, nn.LayerNorm(8)], ids=["plain", "norm"])
def test_empty_stacks(last_norm: nn.LayerNorm | None) -> None:
    # --encoder-layerdrop may drop all layers: the final LayerNorm is still applied.
    x = torch.randn(3, 8)
    expected = x if last_norm is None else last_norm(x)
    torch.testing.assert_close(run_encoder([], last_norm, x, lengths(3), RNG), expected)
    found = run_decoder([], last_norm, x, x, lengths(3), lengths(3), RNG)
    torch.testing.assert_close(found, expected)


def test_width_that_no_head_count_divides() -> None:
    with pytest.raises(ValueError, match="embed_dim 10 is not a multiple of num_heads 4"):
        MultiheadAttention(10, 4)


@NORMS
@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_empty_batches(normalize_before: bool, counts: list[int]) -> None:
    segments, rng = Segments.from_lengths(counts), RNG.clone()
    table = Embedding(9, 16, 1, dropout=0.5)
    encoder = EncoderLayer(16, 32, 2, normalize_before=normalize_before, **RATES)
    decoder = DecoderLayer(16, 32, 2, normalize_before=normalize_before, **RATES)
    tokens = torch.empty(0, dtype=torch.int64)
    x = encoder(table(tokens, segments, rng), segments, rng)
    y = decoder(table(tokens, segments, rng, site=1), x, segments, segments, rng)
    loss, _, _ = label_smoothed_cross_entropy(linear(y, table.weight), tokens, 0.1, 1)
    (loss.sum() + linear(y, table.weight).sum()).backward()
    assert y.shape == (0, 16) and loss.shape == (0,)
    for parameter in (*encoder.parameters(), *decoder.parameters(), table.weight):
        assert parameter.grad is None or not parameter.grad.any()


def test_autocast_says_what_to_do() -> None:
    segments = lengths(3)
    layer = EncoderLayer(16, 32, 2)
    x = torch.randn(3, 16)
    expected = layer(x, segments, RNG)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"autocast does not convert.*convert the layers"):
            layer(x.bfloat16(), segments, RNG)
        found = layer(x, segments, RNG)
        y = layer.bfloat16()(x.bfloat16(), segments, RNG)
    assert torch.equal(found, expected)
    assert y.dtype == torch.bfloat16


def test_a_layer_alone_moves_to_another_type() -> None:
    layer, segments = EncoderLayer(16, 32, 2), lengths(4)
    names = [name for name, _ in layer.named_parameters()]
    values = [p.detach().clone() for p in layer.parameters()]
    layer.to(torch.float64)
    assert [name for name, _ in layer.named_parameters()] == names
    for parameter, value in zip(layer.parameters(), values, strict=True):
        assert parameter.dtype == torch.float64 and torch.equal(parameter, value.double())
    layer(rows(segments, 16), segments, RNG).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
