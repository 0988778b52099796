"""Features in evaluation: those of graphs are the eager ones."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from helpers.accelerated import batch_of, build, mask_of, random_mask

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.huggingface.covered import Reads

READS = Reads(pads=False, first=False)


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel"])
def test_from_graph(name: str) -> None:
    """Here without a GPU: the same function runs eagerly."""
    torch.manual_seed(1)
    source, model = random.Random(2), lightseq.accelerate(build(name).eval())
    for _ in range(20):
        mask, given = random_mask(source, "ForMaskedLM")
        batch = batch_of(model, mask, given, types=source.random() < 0.5)
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        inputs = {each: batch.get(each) for each in names}
        with torch.no_grad():
            found = model._lightseq.family.from_graph(model, READS, inputs)
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
            found = each._lightseq.family.from_graph(each, READS, dict(batch))
            expected = each(**batch).last_hidden_state
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert other._lightseq.family is not model._lightseq.family
