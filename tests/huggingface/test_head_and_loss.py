"""In our Trainer's step our layers compute logits over words and their loss, for any vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_seq2seq as pairs
import torch
from helpers.accelerated import assert_ours, needs_captured_step, transformers
from torch import Tensor, nn
from torch.nn import functional

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.huggingface import head_and_loss
from lightseq_fairseq.huggingface.captured import CapturedStep
from scripts.random_models import PAIRS, build


def sizes(name: str, words: int) -> dict[str, int]:
    return {"vocab_size": words} | ({"decoder_vocab_size": words} if name == "Marian" else {})


@needs_captured_step
@pytest.mark.parametrize("words", [41, 48])
@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "Bart", "Marian"])
def test_trains_as_with_transformers(tmp_path: Path, name: str, words: int) -> None:
    prefix = "Seq2Seq" * (name in PAIRS)
    torch.manual_seed(1)
    model = build(name, **sizes(name, words))
    plain, _ = pairs.train(tmp_path, getattr(transformers, f"{prefix}Trainer"), model)
    spies = [
        mock.patch.object(head_and_loss, each, wraps=getattr(head_and_loss, each))
        for each in ("vocabulary_logits", "cross_entropy")
    ]
    with spies[0] as logits, spies[1] as loss:
        ours, trainer = pairs.train(tmp_path, getattr(lightseq, f"{prefix}Trainer"), model)
    assert ours == pytest.approx(plain, abs=1e-5)
    assert ours[-1] < ours[0]
    assert_ours(trainer.model)
    assert logits.call_count == loss.call_count == 24  # twelve updates of two micro-batches


@needs_captured_step
def test_spare_rows_stay_zero_and_are_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    clip = CapturedStep.clip

    def kept(self: CapturedStep, max_norm: float) -> Tensor:
        words = self.model.lm_head.weight
        number = [p is words for p in self._whole.parameters].index(True)
        seen.append(self._whole.data[self._whole.offsets[number] :][: 48 * 16].view(48, 16))
        return clip(self, max_norm)

    monkeypatch.setattr(CapturedStep, "clip", kept)
    torch.manual_seed(1)
    model = build("GPT2LMHeadModel", vocab_size=41)
    _, trainer = pairs.train(tmp_path, lightseq.Trainer, model)
    words = trainer.model.lm_head.weight
    assert torch.equal(seen[-1][:41], words) and not torch.equal(words, model.lm_head.weight)
    assert not seen[-1][41:].any()
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.lm_head.weight, words)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "capped": lambda logits: 3 * torch.tanh(logits / 3),
    "only capped": torch.tanh,
    "viewed": lambda logits: torch.tanh(logits).view(2, 5, 11).view(-1, 11),
    "added": lambda logits: logits + torch.arange(11.0),
    "float": lambda logits: logits.float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_result_that_another_node_reads_is_not_overwritten(change: str) -> None:
    torch.manual_seed(2)
    head, x, target = nn.Linear(6, 11), torch.randn(10, 6), torch.randint(11, (10,))
    target[3] = -100
    found = []
    for is_ours in (False, True):
        head.zero_grad()
        given = x.clone().requires_grad_()
        with head_and_loss.HeadAndLoss([head.weight] if is_ours else []):
            loss = functional.cross_entropy(CHANGES[change](head(given)), target)
            loss.backward()
        found.append([loss.detach(), given.grad, head.weight.grad, head.bias.grad])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 4}, {"reduction": "none"},
     {"weight": torch.ones(11)}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_the_loss(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    head, x, target = nn.Linear(6, 11, bias=False), torch.randn(10, 6), torch.randint(11, (10,))
    found = []
    for weights in ([], [head.weight]):
        head.zero_grad()
        with head_and_loss.HeadAndLoss(weights):
            loss = functional.cross_entropy(head(x), target, **options)
        loss.sum().backward()
        found.append([loss.detach(), head.weight.grad])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
