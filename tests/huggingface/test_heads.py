"""Accelerated models of the BERT family compute what plain ones do: outputs, loss, gradients."""

from __future__ import annotations

import copy
import random
from collections import defaultdict

import pytest
import torch
from helpers.accelerated import IS_OLDEST, assert_ours, assert_same, pair
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.huggingface.copies import copies
from scripts.random_models import (
    BERT_HEADS,
    HEADS,
    batch_of,
    build,
    by_graphs,
    computed,
    mask_of,
    random_config,
    random_mask,
)

NAMES = [f"Bert{head}" for head in BERT_HEADS]
NAMES += [f"{kind}{head}" for kind in ("Roberta", "XLMRoberta", "Camembert") for head in HEADS]
UNPOOLED = ("XLMRobertaForMultipleChoice", "CamembertForMultipleChoice")


@pytest.mark.parametrize("name", NAMES)
def test_random_batches(name: str) -> None:
    if name in UNPOOLED and IS_OLDEST:
        pytest.skip("transformers 5.0 has no pooler for this head")
    source = random.Random(name)
    often = name.startswith(("Bert", "Roberta"))
    configs, batches = (10, 5) if often else (2, 3)
    for number in range(configs):
        config = random_config(source, name)
        plain = build(name, **config)
        ours = lightseq.accelerate(copy.deepcopy(plain))
        for _ in range(batches):
            mask, given = random_mask(source, name)
            batch = batch_of(plain, mask, given, types=source.random() < 0.7)
            states = source.random() < 0.3
            with by_graphs(number % 2 == 1):
                for _ in range(1 + number % 2):  # the second pass of a shape is captured
                    found = computed(ours, batch, output_hidden_states=states)
            expected = computed(plain, batch, output_hidden_states=states)
            assert len(found.states) == states * (config["num_hidden_layers"] + 1)
            try:
                assert_same(found, expected)
            except AssertionError as error:
                raise AssertionError(f"{config}, {mask.tolist()}, {given}") from error
        assert_ours(ours, batches * (1 + number % 2))


def test_of_a_sentence_without_tokens() -> None:
    plain, ours = pair("BertForTokenClassification")
    batch = batch_of(plain, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    assert_same(computed(ours, batch), computed(plain, batch))
    nothing = {name: value[1:] for name, value in batch.items() if name != "labels"}
    assert ours(**nothing).logits.isfinite().all()
    assert_ours(ours)


def test_of_layers_that_share_weights() -> None:
    plain = build("BertForSequenceClassification")
    plain.bert.encoder.layer[1] = plain.bert.encoder.layer[0]
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = batch_of(plain, mask_of([5, 3, 7]))
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForSequenceClassification"])
@pytest.mark.parametrize("mode", ["bfloat16", "autocast"])
def test_errors_of_bfloat16(name: str, mode: str) -> None:
    """At most twice those of plain models: of the outputs, and of the gradients of each layer."""
    errors: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for _ in range(3):
        plain = build(name, torch.bfloat16 if mode == "bfloat16" else torch.float32)
        exact = copy.deepcopy(plain).double()
        ours = lightseq.accelerate(copy.deepcopy(plain))
        for lengths in ((7, 12, 3), (9, 2, 4, 4, 11)):
            batch = batch_of(plain, mask_of(lengths))
            truth = computed(exact, batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                found = [computed(model, batch) for model in (ours, plain)]
            for kind in ("outputs", "gradients"):
                for key, value in getattr(truth, kind).items():
                    layer = key.partition("layer.")[2][:1] if kind == "gradients" else kind
                    wrong = [getattr(one, kind)[key].double() - value for one in found]
                    errors[layer] += torch.stack([e.square().sum() for e in wrong]).detach()
            assert all(mine.dtype == theirs.dtype for mine, theirs in zip(
                found[0].outputs.values(), found[1].outputs.values()))  # fmt: skip
        assert_ours(ours)
    ratios = {layer: float(mine / theirs) ** 0.5 for layer, (mine, theirs) in errors.items()}
    assert len(ratios) == 4 and max(ratios.values()) < 2, ratios


def test_autocast_in_bfloat16() -> None:
    """Layers compute in bfloat16, results are float32, and what is not needed has no gradient."""
    _, ours = pair("BertModel")
    batch = batch_of(ours, mask_of([4, 7, 2]))
    frozen = ours.encoder.layer[0].intermediate.dense.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        first, second = ours(**batch, output_hidden_states=True).hidden_states[1:]
    assert second.dtype == torch.float32 and second.bfloat16().float().equal(second)
    made = copies([[frozen, ours.encoder.layer[0].output.dense.weight]], torch.bfloat16)
    assert [x.requires_grad for x in made.values()] == [False, True]
    first.square().mean().backward()
    has_gradient = {name: p.grad is not None for name, p in ours.named_parameters()}
    without = ("encoder.layer.1.", "pooler.", "encoder.layer.0.intermediate.dense.weight")
    assert has_gradient == {name: not name.startswith(without) for name in has_gradient}
    assert_ours(ours, 1)
