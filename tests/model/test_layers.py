"""The layers on packed tokens: used without fairseq, their gradients, and compared with fairseq's
layers."""

from __future__ import annotations

import copy
import io
import itertools
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.modules import SinusoidalPositionalEmbedding, transformer_layer
from fairseq.utils import make_positions
from torch import Tensor, nn
from torch.nn import functional

from lightseq_fairseq.layers import (
    DecoderLayer,
    Embedding,
    EncoderLayer,
    MultiheadAttention,
    draw_rng,
    embed,
    label_smoothed_cross_entropy,
    linear,
    run_decoder,
    run_encoder,
    sinusoidal_positions,
)
from lightseq_fairseq.layers.linear import linear_parts
from lightseq_fairseq.packing import Segments

RNG = torch.tensor([1234, 5])
RATES = {"dropout": 0.3, "attention_dropout": 0.2, "activation_dropout": 0.4}
NORMS = pytest.mark.parametrize("normalize_before", [False, True], ids=["post-norm", "pre-norm"])
RECOMPUTED = pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def lengths(*counts: int) -> Segments:
    return Segments.from_lengths(torch.tensor(counts))


def rows(segments: Segments, width: int) -> Tensor:
    return torch.randn(len(segments.index), width, dtype=torch.float64, requires_grad=True)


WITHOUT_FAIRSEQ = """
import sys, torch
from lightseq_fairseq import layers
from lightseq_fairseq.packing import Segments

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


# Packing


def random_masks() -> list[Tensor]:
    right = torch.arange(6) < torch.tensor([[6], [1], [3], [2]])
    scattered = torch.rand(5, 7) < 0.6
    return [right, right.flip(1), scattered, torch.ones(2, 3, dtype=torch.bool)]


@pytest.mark.parametrize("mask", random_masks(), ids=["right", "left", "scattered", "none"])
def test_packing_round_trip(mask: Tensor) -> None:
    segments = Segments.from_mask(mask)
    padded = torch.randn(*mask.shape, 4, dtype=torch.float64, requires_grad=True)
    packed = segments.pack(padded)
    assert torch.equal(packed, padded[mask])
    assert torch.equal(segments.pad(packed), padded * mask[..., None])
    assert segments.cu_seqlens.dtype == torch.int32
    assert segments.cu_seqlens.diff().tolist() == mask.sum(1).tolist()
    assert segments.max_len >= mask.sum(1).max()
    assert torch.autograd.gradcheck(segments.pack, (padded,))
    assert torch.autograd.gradcheck(segments.pad, (packed.detach().requires_grad_(),))


@pytest.mark.parametrize("mask", random_masks(), ids=["right", "left", "scattered", "none"])
def test_positions_are_fairseqs(mask: Tensor) -> None:
    tokens = torch.where(mask, 7, 1)
    expected = make_positions(tokens, padding_idx=1)[mask]
    assert torch.equal(Segments.from_mask(mask).positions + 2, expected)


def test_lengths_say_the_same_as_a_mask() -> None:
    a, b = lengths(2, 0, 3), Segments.from_mask(torch.arange(3) < torch.tensor([[2], [0], [3]]))
    assert a.cu_seqlens.tolist() == b.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert a.positions.tolist() == b.positions.tolist() == [0, 1, 0, 1, 2]
    assert a.index.tolist() == b.index.tolist() == [0, 1, 6, 7, 8]


# Gradients


def check_gradients(
    module: nn.Module, inputs: tuple[Tensor, ...], call: Callable[..., Tensor], fast: bool = False
) -> None:
    """gradcheck with respect to inputs and all parameters; fast: only along random directions."""
    module = module.double()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    values = [module.get_parameter(name).detach().requires_grad_() for name in names]

    def function(*tensors: Tensor) -> Tensor:
        parameters = dict(zip(names, tensors[len(inputs) :], strict=True))
        holder = _Call(module, call)
        return torch.func.functional_call(
            holder, {f"module.{n}": p for n, p in parameters.items()}, tensors[: len(inputs)]
        )

    assert torch.autograd.gradcheck(
        function, (*inputs, *values), check_undefined_grad=False, fast_mode=fast
    )


class _Call(nn.Module):
    def __init__(self, module: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.module, *inputs)


@NORMS
def test_encoder_layer_gradients(normalize_before: bool) -> None:
    segments = lengths(2, 1, 3)
    layer = EncoderLayer(
        4, 6, 2, **RATES, activation="gelu", normalize_before=normalize_before, site=8
    )
    check_gradients(layer, (rows(segments, 4),), lambda layer, x: layer(x, segments, RNG))


@NORMS
def test_decoder_layer_gradients(normalize_before: bool) -> None:
    target, source = lengths(2, 3), lengths(3, 1)
    layer = DecoderLayer(
        4, 6, 2, encoder_dim=6, **RATES, activation="gelu_accurate",
        normalize_before=normalize_before, site=8,
    )  # fmt: skip
    inputs = (rows(target, 4), rows(source, 6))
    check_gradients(layer, inputs, lambda layer, *x: layer(*x, target, source, RNG))


@NORMS
def test_stack_gradients(normalize_before: bool) -> None:
    target, source = lengths(2, 1), lengths(1, 2)
    options: dict[str, Any] = {**RATES, "normalize_before": normalize_before, "activation": "gelu"}
    stack = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(EncoderLayer(4, 5, 2, **options, site=8 * i) for i in (1, 2)),
            "decoder": nn.ModuleList(DecoderLayer(4, 5, 2, **options, site=8 * i) for i in (3, 4)),
            "encoder_norm": nn.LayerNorm(4),
            "decoder_norm": nn.LayerNorm(4),
        }
    )
    if not normalize_before:
        stack["encoder_norm"] = stack["decoder_norm"] = None  # type: ignore[assignment]

    def call(stack: Any, x: Tensor, y: Tensor) -> Tensor:
        memory = run_encoder(stack["encoder"], stack["encoder_norm"], x, source, RNG)
        return run_decoder(stack["decoder"], stack["decoder_norm"], y, memory, target, source, RNG)

    check_gradients(stack, (rows(source, 4), rows(target, 4)), call, fast=True)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_embedding_gradients(normalized: bool, projected: bool, p: float) -> None:
    tokens, positions = torch.tensor([3, 4, 3, 1, 5]), torch.tensor([2, 3, 2, 3, 4])
    width = 6 if projected else 4
    module = nn.Module()
    module.table = nn.Parameter(torch.randn(7, 4))
    module.places = nn.Parameter(torch.randn(6, width))
    module.project = nn.Linear(4, width, bias=False) if projected else None
    module.norm = nn.LayerNorm(width) if normalized else None

    def call(module: Any) -> Tensor:
        # The look-up of the pad token has a value but no gradient: mask it out.
        x = embed(
            tokens, module.table, positions, module.places, scale=2.0, padding_idx=1, p=p,
            rng=RNG, site=3, project=module.project, norm=module.norm,
        )  # fmt: skip
        return x[tokens != 1]

    check_gradients(module, (), call)


def test_looking_up_pads_teaches_nothing() -> None:
    table = Embedding(7, 4, padding_idx=1, learned=True).double()
    table(torch.tensor([1, 3, 1]), lengths(3), RNG).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.any(1).tolist() == [i == 3 for i in range(7)]


def test_linear_gradients() -> None:
    weights = [torch.randn(4, 3), torch.randn(4, 3)]
    biases = [torch.randn(4), torch.randn(4)]
    x, *leaves = (t.double().requires_grad_() for t in (torch.randn(5, 3), *weights, *biases))

    def parts(x: Tensor, *leaves: Tensor) -> Any:
        return linear_parts(x, 2, list(leaves[:2]), list(leaves[2:]))

    assert torch.autograd.gradcheck(parts, (x, *leaves))
    assert torch.autograd.gradcheck(lambda x, w: linear(x, w), (x, leaves[0]))
    for part, weight, bias in zip(parts(x, *leaves), leaves[:2], leaves[2:], strict=True):
        torch.testing.assert_close(part, functional.linear(x, weight, bias))


def test_a_part_that_is_not_used() -> None:
    # Two outputs of one GEMM; one of them is not used.
    weights, biases = (
        [torch.randn(4, 3, requires_grad=True) for _ in range(2)],
        [torch.randn(4, requires_grad=True) for _ in range(2)],
    )
    x = torch.randn(5, 3, requires_grad=True)
    linear_parts(x, 2, weights, biases)[0].sum().backward()
    assert weights[0].grad is not None and weights[0].grad.any()
    assert weights[1].grad is None or not weights[1].grad.any()


# Cross entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_and_its_gradient(smoothing: float) -> None:
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([3, 1, 8, 0, 1, 2])
    weight = torch.rand(6, dtype=torch.float64)
    loss, nll, correct = label_smoothed_cross_entropy(
        logits.clone(), target, smoothing, 1, accuracy=True
    )
    (gradient,) = torch.autograd.grad((loss * weight).sum(), logits)

    log_probs = logits.log_softmax(1)
    share = smoothing / 8
    others = functional.one_hot(target, 9).logical_not()
    expected_nll = -log_probs.gather(1, target[:, None])[:, 0]
    expected = (1 - smoothing) * expected_nll - share * (log_probs * others).sum(1)
    real = target != 1
    torch.testing.assert_close(loss, expected * real)
    torch.testing.assert_close(nll, expected_nll * real)
    assert torch.equal(correct, (logits.argmax(1) == target) & real)
    (wanted,) = torch.autograd.grad((expected * real * weight).sum(), logits)
    torch.testing.assert_close(gradient, wanted)


def test_cross_entropy_where_the_gradient_of_the_loss_is_known_beforehand() -> None:
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    target, dloss = torch.tensor([3, 1, 8, 0, 1, 2]), torch.tensor(0.3, dtype=torch.float64)
    found = []
    for known in (None, dloss):
        results = label_smoothed_cross_entropy(logits.clone(), target, 0.1, 1, True, known)
        found.append((*results, *torch.autograd.grad(results[0].sum() * dloss, logits)))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_through_overwritten_logits_is_refused(retain_graph: bool) -> None:
    logits = torch.randn(3, 5, requires_grad=True) * 1
    loss, _, _ = label_smoothed_cross_entropy(logits, torch.tensor([2, 3, 4]), 0.1, 1)
    loss.backward(torch.ones(3), retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match=r"overwritten the logits.*compute the loss again"):
        loss.backward(torch.ones(3))


@NORMS
@RECOMPUTED
def test_a_second_backward_through_layers_gives_the_same(
    normalize_before: bool, recomputed: bool
) -> None:
    options = {**RATES, "normalize_before": normalize_before}
    segments, rng = lengths(3, 4), RNG.clone()
    x = torch.randn(7, 16, requires_grad=True)
    again = {"checkpoint_activations": recomputed}
    memory = run_encoder([EncoderLayer(16, 32, 2, **options)], None, x, segments, rng, **again)
    stack = [DecoderLayer(16, 32, 2, **options)]
    y = run_decoder(stack, None, x, memory, segments, segments, rng, **again).square().sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


# Against fairseq's layers


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


@pytest.mark.parametrize("width", [8, 9])
def test_sinusoidal_positions_are_fairseqs(width: int) -> None:
    expected = SinusoidalPositionalEmbedding.get_embedding(50, width, 1)
    assert torch.equal(sinusoidal_positions(50, width, 1), expected)


# Small batches, dropout, misuse


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


def test_dropout_follows_mode_and_counter() -> None:
    layer = EncoderLayer(16, 32, 2, **RATES, site=8)
    x, segments = torch.randn(9, 16), lengths(4, 5)
    a, b = layer(x, segments, RNG), layer(x, segments, RNG)
    assert torch.equal(a, b)
    assert not torch.equal(a, layer(x, segments, RNG + torch.tensor([0, 1])))
    layer.site = 16
    assert not torch.equal(a, layer(x, segments, RNG))
    layer.eval()
    assert torch.equal(layer(x, segments, RNG), layer(x, segments, RNG + 1))


@RECOMPUTED
@pytest.mark.parametrize("learned", [False, True])
def test_backward_with_another_rng_than_forwards_is_refused(
    learned: bool, recomputed: bool
) -> None:
    """Each dropout would draw other masks."""
    segments, rng = lengths(3, 2), draw_rng()
    table = Embedding(20, 8, 1, dropout=0.3, learned=learned).double()
    layer = EncoderLayer(8, 16, 2, **RATES).double()
    x = rows(segments, 8)
    outputs = [
        table(torch.arange(2, 7), segments, rng, site=0),
        run_encoder([layer], None, x, segments, rng, checkpoint_activations=recomputed),
    ]
    rng.add_(1)
    for output in outputs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_drawn_counters_follow_torchs_seed() -> None:
    torch.manual_seed(3)
    first, second = draw_rng(), draw_rng()
    torch.manual_seed(3)
    assert torch.equal(first, draw_rng())
    assert not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,)


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


def dropping(count: int) -> nn.ModuleList:
    """Layers with equal weights, and without assigned dropout sites."""
    torch.manual_seed(3)
    first = EncoderLayer(16, 32, 2, dropout=0.5).double()
    return nn.ModuleList(copy.deepcopy(first) for _ in range(count))


def outputs_of(layers: Iterable[EncoderLayer], rng: Tensor) -> list[Tensor]:
    """The output of each layer for the same rows. The weights are equal, so outputs are equal if
    masks are."""
    segments = lengths(3, 4)
    x = torch.ones(7, 16, dtype=torch.float64)
    return [layer(x, segments, rng) for layer in layers]


def assert_all_differ(outputs: list[Tensor]) -> None:
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outputs, 2))


def test_layers_without_sites_draw_masks_of_their_own() -> None:
    layers = dropping(3)
    rng = RNG.clone()
    outputs = outputs_of(layers, rng)
    assert_all_differ(outputs)
    # The same layers with the same rng, as in a recomputed pass; in the next pass; then new equal
    # layers.
    for again, counter in ((layers, rng), (layers, RNG.clone()), (dropping(3), RNG.clone())):
        assert all(map(torch.equal, outputs_of(again, counter), outputs))


def test_copies_draw_masks_of_their_own() -> None:
    layers = dropping(2)
    alone = outputs_of(layers, RNG.clone())
    copies = copy.deepcopy(layers)
    assert all(map(torch.equal, outputs_of(copies, RNG.clone()), alone))
    assert_all_differ(outputs_of([*layers, *copies], RNG.clone()))


def test_layers_may_be_left_out_of_a_pass() -> None:
    first, second, third = dropping(3)
    for used in ([second, third], [third], [first, second, third]):
        assert_all_differ(outputs_of(used, RNG.clone()))


def test_layers_that_first_met_in_different_passes_draw_masks_of_their_own() -> None:
    one, other = dropping(2)
    for layer in (one, other):
        outputs_of([layer], RNG.clone())
    rng = RNG.clone()
    met = outputs_of([one, other], rng)
    assert_all_differ(met)
    for again in (rng, RNG.clone()):
        assert all(map(torch.equal, outputs_of([other, one], again), reversed(met)))


@pytest.mark.parametrize("site", range(0, 33, 8))
def test_sites_that_are_given_meet_no_others(site: int) -> None:
    layers = dropping(3)
    layers[1].site = site
    assert_all_differ(outputs_of(layers, RNG.clone()))


def test_a_counter_that_layers_have_used_can_be_saved() -> None:
    rng, file = RNG.clone(), io.BytesIO()
    expected = outputs_of(dropping(2), rng)
    torch.save(rng, file)
    file.seek(0)
    assert all(map(torch.equal, outputs_of(dropping(2), torch.load(file)), expected))


def test_both_sides_draw_masks_of_their_own() -> None:
    segments = lengths(5)
    rng = RNG.clone()
    tables = [Embedding(9, 16, 1, dropout=0.5) for _ in range(2)]
    layers = [EncoderLayer(16, 32, 2, dropout=0.5), DecoderLayer(16, 32, 2, dropout=0.5)]
    tokens = torch.arange(5)
    dropped = [table(tokens, segments, rng) == 0 for table in tables]
    assert not torch.equal(*dropped)
    memory = layers[0](torch.randn(5, 16), segments, rng)
    layers[1](torch.randn(5, 16), memory, segments, segments, rng)
    sites = [module._own_site for module in (*tables, *layers)]
    assert all(b - a >= 6 for a, b in itertools.pairwise(sites))


def test_lengths_may_be_a_list() -> None:
    by_list, by_tensor = Segments.from_lengths([3, 0, 2]), lengths(3, 0, 2)
    assert torch.equal(by_list.cu_seqlens, by_tensor.cu_seqlens)
    assert torch.equal(by_list.positions, by_tensor.positions)
    assert len(Segments.from_lengths([]).positions) == 0


@pytest.mark.parametrize("wrong", [[-1, 3], [2.5, 1.0], [[1, 2]], 3])
def test_lengths_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match="lengths must be whole numbers from 0 on, one for each"):
        Segments.from_lengths(wrong)


def test_segments_on_another_device() -> None:
    there = lengths(3, 2).to("meta")
    assert {x.device.type for x in (there.cu_seqlens, there.positions, there.index)} == {"meta"}
    assert (there.max_len, there.shape) == (3, (2, 3))
    assert Segments.from_lengths([3, 2], "cpu").cu_seqlens.tolist() == [0, 3, 5]


def test_training_without_an_rng_says_how_to_get_one() -> None:
    layer = EncoderLayer(16, 32, 2, dropout=0.1)
    with pytest.raises(ValueError, match=r"layers need an rng.*draw_rng"):
        layer(torch.ones(3, 16), lengths(3), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_linear", [False, True])
@pytest.mark.parametrize("what", ["layer", "linear", "embedding", "loss"])
def test_a_gradient_of_a_gradient_is_refused(what: str, is_linear: bool) -> None:
    segments, rng = lengths(3), RNG.clone()
    x = torch.randn(3, 16, requires_grad=True)
    weight = torch.randn(16, 16, requires_grad=True)
    if what == "layer":
        y = EncoderLayer(16, 32, 2, dropout=0.1)(x, segments, rng)
    elif what == "linear":
        y = linear(x, weight)
    elif what == "embedding":
        table = Embedding(9, 16, 1)
        x, y = table.weight, table(torch.arange(3), segments, rng)
    else:
        y = label_smoothed_cross_entropy(linear(x, weight), torch.arange(3), 0.1, 1)[0]
    loss = (torch.randn_like(y) * y if is_linear else y.square()).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked"):
        gradient.square().sum().backward()


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
