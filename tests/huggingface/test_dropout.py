"""Dropout of accelerated models: rates, masks, seeds, and rates that change at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, assert_same, pair
from torch import Tensor, nn

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq import ops
from scripts.random_models import batch_of, build, computed, mask_of

LENGTHS = (4, 7, 2)


def dropouts(model: nn.Module) -> Iterator[nn.Dropout]:
    return (module for module in model.modules() if isinstance(module, nn.Dropout))


def off(model: Any) -> None:
    for module in dropouts(model):
        module.p = 0.0


def evaluated(model: Any) -> None:
    model.bert.eval()


def evaluated_one_by_one(model: Any) -> None:
    """All that drop; attention asks its own module whether it trains."""
    for module in model.bert.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "BertSelfAttention":
            module.eval()


@pytest.mark.parametrize("change", [off, evaluated, evaluated_one_by_one])
def test_rates_that_become_0(change: Callable[[Any], None]) -> None:
    rates = {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.4}
    plain, ours = pair("BertForMaskedLM", **rates)
    batch = batch_of(plain, mask_of(LENGTHS))
    assert not computed(ours, batch).loss.equal(computed(ours, batch).loss)
    for model in (plain, ours):
        change(model)
    state = torch.get_rng_state()
    assert_same(computed(ours, batch), computed(plain, batch))
    assert torch.get_rng_state().equal(state)  # as Hugging Face, we draw nothing in vain
    assert_ours(ours)


def embedding(model: Any) -> Iterator[nn.Module]:
    yield model.bert.embeddings.dropout


def attention(model: Any) -> Iterator[nn.Module]:
    yield model.bert.encoder.layer[1].attention.self.dropout


def behind_attention(model: Any) -> Iterator[nn.Module]:
    yield model.bert.encoder.layer[1].attention.output.dropout


def behind_feed_forward(model: Any) -> Iterator[nn.Module]:
    yield model.bert.encoder.layer[1].output.dropout


PLACES = [embedding, attention, behind_attention, behind_feed_forward]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_rates_that_become_greater(place: Callable[[Any], Any], mode: str) -> None:
    """A single place drops, also in a model in evaluation (Monte Carlo dropout)."""
    _, ours = pair("BertForMaskedLM")
    ours.train(mode == "train")
    ours.bert.encoder.layer[1].attention.self.train()  # which attention asks
    batch = batch_of(ours, mask_of(LENGTHS))
    real = batch["attention_mask"].bool()
    exact = ours(**batch).logits[real]
    assert ours(**batch).logits[real].equal(exact)
    for module in place(ours):
        module.train().p = 0.5
    first, second = (ours(**batch).logits[real] for _ in range(2))
    assert not first.equal(second) and not first.equal(exact)
    assert_ours(ours)


def test_attention_drops_though_its_dropout_is_evaluated() -> None:
    """As in Hugging Face, where the module that owns the rate decides."""
    plain, ours = pair("BertForMaskedLM", attention_probs_dropout_prob=0.5)
    batch = batch_of(ours, mask_of(LENGTHS))
    for model in (plain, ours):
        for module in dropouts(model):
            module.eval()
        assert not computed(model, batch).loss.equal(computed(model, batch).loss)
    assert_ours(ours)


def test_share_of_zeros() -> None:
    """Of the embedding, whose LayerNorm is without zeros; of the layers, by their mean."""
    _, ours = pair("BertModel", hidden_dropout_prob=0.3, num_hidden_layers=1)
    batch = batch_of(ours, mask_of([12] * 40))
    embedded = ours(**batch, output_hidden_states=True).hidden_states[0]
    assert float((embedded == 0).float().mean()) == pytest.approx(0.3, abs=0.02)
    assert_ours(ours)


@pytest.mark.parametrize("place", PLACES)
def test_mean_over_masks(place: Callable[[Any], Any]) -> None:
    """Mean and variance over many masks are those of a plain model."""
    plain, ours = pair("BertForSequenceClassification", num_labels=8)
    sentence = batch_of(plain, mask_of([5]))
    batch = {
        name: value.expand(1500, *value.shape[1:])
        for name, value in sentence.items()
        if name != "labels"
    }
    found: list[Tensor] = []
    for model in (ours, plain):
        for module in place(model):
            module.p = 0.3
        with torch.no_grad():
            found.append(model(**batch).logits)
    (mean, expected), (spread, wanted) = (
        [getattr(x, name)(0) for x in found] for name in ("mean", "std")
    )
    error = wanted / 1500**0.5
    assert float(((mean - expected) / error).abs().max()) < 6
    torch.testing.assert_close(spread, wanted, rtol=0.15, atol=0)
    assert_ours(ours)


def test_each_place_has_its_own_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair("BertForMaskedLM", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    sites: list[int] = []

    def watched(op: Any, *given: Any, **options: Any) -> Any:
        masks = [x for x in (*given, *options.values()) if isinstance(x, ops.Dropout)]
        sites.extend(mask.site for mask in masks)
        return op(*given, **options)

    for name in ("embedding_layer_norm_fwd", "attention_fwd", "dropout_residual_layer_norm_fwd"):
        monkeypatch.setattr(ops, name, functools.partial(watched, getattr(ops, name)))
    ours(**batch_of(ours, mask_of(LENGTHS)))
    assert len(sites) == len(set(sites)) == 1 + 2 * 3  # the embedding's, and those of each layer


def test_masks_follow_the_seed() -> None:
    _, ours = pair("RobertaForMaskedLM", hidden_dropout_prob=0.1)
    batch = batch_of(ours, mask_of(LENGTHS))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append([computed(ours, batch) for _ in range(2)])
    for mine, same in zip(results[0], results[1]):
        assert mine.loss.equal(same.loss)
        assert all(g.equal(same.gradients[name]) for name, g in mine.gradients.items())
    different = [result.loss.item() for pair in results[1:] for result in pair]
    assert len(set(different)) == 4


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_with_dropout(recomputes: bool) -> None:
    """Backward drops as forward has: gradients agree with differences of losses."""
    rates = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    ours = lightseq.accelerate(build("BertForMaskedLM", torch.float64, **rates))
    if recomputes:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(ours, mask_of(LENGTHS))
    batch["input_ids"].clamp_(min=1)  # the pad's row has no gradient
    steps = {name: torch.randn_like(p) for name, p in ours.named_parameters()}

    def loss_at(distance: float) -> Tensor:
        torch.manual_seed(2)
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                parameter += distance * steps[name]
        return computed(ours, batch).loss

    loss_at(0.0)
    slope = sum((p.grad * steps[name]).sum() for name, p in ours.named_parameters())
    after, before = loss_at(1e-5), loss_at(-2e-5)
    torch.testing.assert_close((after - before).detach() / 2e-5, slope, rtol=1e-5, atol=1e-7)
    assert_ours(ours)
