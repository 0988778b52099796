"""Gradients of the layers and of their parts, and backward passes that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_inputs import NORMS, RATES, RECOMPUTED, RNG, lengths, rows
from torch import Tensor, nn
from torch.nn import functional

from lightseq_fairseq.layers import (
    DecoderLayer,
    Embedding,
    EncoderLayer,
    embed,
    label_smoothed_cross_entropy,
    linear,
    run_decoder,
    run_encoder,
)


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
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, 3), (4, 3), (4,))
    )
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    assert torch.autograd.gradcheck(linear, (x, weight))
    torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias))


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
