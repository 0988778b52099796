"""The loss for large vocabularies has the values and gradients of torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError

CLASSES = 37


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(12,), (3, 5), (1,)])
def test_as_torch(shape: tuple[int, ...], smoothing: float, reduction: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(*shape, CLASSES)
    labels = torch.randint(CLASSES, shape)
    if labels.numel() > 1:
        labels.view(-1)[::3] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    found = []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        if ours:
            loss = lightseq.cross_entropy(leaf * 1, labels, **options)
        else:
            flat = functional.cross_entropy(leaf.flatten(0, -2), labels.flatten(), **options)
            loss = flat.view(shape) if reduction == "none" else flat
        weight = torch.arange(1.0, 1 + loss.numel()).view(loss.shape)
        (loss * weight).sum().backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*found)


def test_the_gradient_takes_the_memory_of_the_logits() -> None:
    leaf = torch.randn(8, CLASSES, dtype=torch.bfloat16, requires_grad=True)
    logits = leaf * 1
    lightseq.cross_entropy(logits, torch.zeros(8, dtype=torch.int64)).backward()
    assert torch.equal(logits.detach(), leaf.grad)


def test_only_ignored_rows_are_nan_as_in_torch() -> None:
    labels = torch.full((4,), -100)
    assert lightseq.cross_entropy(torch.randn(4, CLASSES), labels).isnan()
    assert lightseq.cross_entropy(torch.randn(4, CLASSES), labels, reduction="sum") == 0


@pytest.mark.parametrize("label", [CLASSES, -1])
def test_a_label_outside_the_classes_is_nan(label: int) -> None:
    labels = torch.tensor([3, label, 5])
    each = lightseq.cross_entropy(torch.randn(3, CLASSES), labels, reduction="none")
    assert each.isnan().tolist() == [False, True, False]


def test_bad_arguments() -> None:
    with pytest.raises(
        UserError, match=r"^The labels have the shape \[2\], but the logits \[3, 37"
    ):
        lightseq.cross_entropy(torch.randn(3, CLASSES), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match=r"^The reduction is 'max': use one of mean, sum"):
        lightseq.cross_entropy(torch.randn(3, CLASSES), torch.zeros(3, dtype=torch.int64),
                               reduction="max")  # fmt: skip
