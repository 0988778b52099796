"""Passes by graphs are the eager ones: features, and in training their gradients.

Here without a GPU: the same functions run, but nothing is captured.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.huggingface import reader
from lightseq_fairseq.huggingface.calls import Options, rates_of
from lightseq_fairseq.huggingface.covered import Reads
from lightseq_fairseq.huggingface.reader import Call
from scripts.random_models import batch_of, build, mask_of, random_mask

READS = Reads(pads=False, first=False)
NAMES = ("input_ids", "token_type_ids", "position_ids")


def by_graph(model: Any, batch: dict[str, Tensor], rng: Tensor | None = None) -> Tensor:
    """Features of an accelerated model without a head; rng: if there are gradients."""
    family, ids = model._lightseq.family, batch["input_ids"]
    call = Call((len(ids), ids.shape[1]), ids.device, Options(True, False), model.encoder.layer,
                {name: batch[name] for name in NAMES if name in batch},
                batch.get("attention_mask"))  # fmt: skip
    rates = rates_of(family.layers(model), family.rate(model))
    return family.by_graph(model, call, family.on_host(model, READS, call), rng, rates)


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel"])
def test_from_graph(name: str) -> None:
    torch.manual_seed(1)
    source, model = random.Random(2), lightseq.accelerate(build(name).eval())
    for _ in range(20):
        mask, given = random_mask(source, "BertForMaskedLM")
        batch = batch_of(model, mask, given, types=source.random() < 0.5)
        with torch.no_grad():
            found = by_graph(model, batch)
            expected = model(**batch).last_hidden_state
        if lightseq.report(model).fallbacks:  # the first row of a sentence is a pad
            model._lightseq.report.fallbacks.clear()
            real = mask.bool()[:, :, None]
            found, expected = found.masked_fill(~real, 0.0), expected.masked_fill(~real, 0.0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_of_now_and_copies() -> None:
    torch.manual_seed(3)
    model = lightseq.accelerate(build("BertModel").eval())
    batch = batch_of(model, mask_of((5, 3)))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each, factor in ((model, 1.0), (other, 2.0), (model, 3.0)):
            for parameter in each.parameters():
                parameter *= factor
            found = by_graph(each, batch)
            expected = each(**batch).last_hidden_state
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert other._lightseq.family is not model._lightseq.family


def rng(seed: int) -> Tensor:
    return torch.tensor([seed, 7])


def gradients_of(model: Any, features: Tensor, weight: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    (features * weight).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients(rate: float, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, too: a pass has the masks of an eager one with the same rng."""
    torch.manual_seed(4)
    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    source, model = random.Random(5), lightseq.accelerate(build("RobertaModel", **rates))
    model.embeddings.token_type_embeddings.weight.requires_grad_(False)
    for seed in range(6):
        batch = batch_of(model, mask_of([source.randint(1, 12) for _ in range(4)]))
        weight = torch.randn(*batch["input_ids"].shape, 16)
        given = rng(seed)
        monkeypatch.setattr(reader, "rng_of", lambda *_, given=given: given)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            eager = model(**batch).last_hidden_state
            expected = gradients_of(model, eager, weight)
            # The second pass of a shape is another one on a GPU: it is captured.
            for _ in range(2):
                found = by_graph(model, batch, given)
                assert found.dtype == torch.float32
                torch.testing.assert_close(found, eager)
                torch.testing.assert_close(gradients_of(model, found, weight), expected)
    assert not lightseq.report(model).fallbacks


def test_one_pass_waits_for_its_backward() -> None:
    """The next one must not overwrite what it has kept."""
    model = lightseq.accelerate(build("BertModel"))
    batch = batch_of(model, mask_of((5, 3)))
    by_graph(model, batch, rng(1))  # the first one of a shape is eager
    first = by_graph(model, batch, rng(1))
    assert by_graph(model, batch, rng(2)) is None
    loss = first.sum()
    loss.backward(retain_graph=True)
    assert by_graph(model, batch, rng(2)) is None
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    twice = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(twice, [2 * x for x in once])
    second = by_graph(model, batch, rng(2))  # although ``loss`` still exists
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    del second
    third = by_graph(model, batch, rng(3))  # its predecessor is gone
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        third.sum().backward()
    assert by_graph(model, batch, rng(4)) is not None
