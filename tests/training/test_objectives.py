"""The captured step trains any model and criterion that declare its methods.

Here the model has no source."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightseq_fairseq.layers import Embedding, draw_rng, label_smoothed_cross_entropy, linear
from lightseq_fairseq.memory.packing import Bucket, Packed, PackedBatch, Stream, block_size
from lightseq_fairseq.memory.parameters import flat_buffers, flatten_parameters
from lightseq_fairseq.ops.update_scalars import KNOWN_RATES, State
from lightseq_fairseq.step.flat_adam import FlatAdam
from lightseq_fairseq.step.objectives import LabelSmoothing, declares
from lightseq_fairseq.step.training_step import Count, Ranks, TrainingStep, UpdateOptions

LAYOUT = (Stream("target", ("previous", "labels")),)
WORDS, PAD, RATE = 13, 1, 0.01


class NextWord(nn.Module):
    """Predicts a word from the word before it and its position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(WORDS, 8, PAD)
        flatten_parameters(self)

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        target = batch["target"]
        x = self.table(target["previous"], target.segments, rng, site=0)
        return linear(x, self.table.weight)


def batch_of(lengths: list[int], rows: int) -> PackedBatch:
    """Random sentences in a block with room for so many rows, and for one more sentence."""
    real, bucket = sum(lengths), Bucket((rows,), len(lengths) + 1)
    block = torch.zeros(block_size(LAYOUT, bucket), dtype=torch.int64)
    batch = PackedBatch(block, LAYOUT, bucket, len(lengths), real, (max(lengths),))
    target = batch.open()["target"]
    for column in target.columns.values():
        column.fill_(PAD)
        column[:real] = torch.randint(2, WORDS, (real,))
    target.segments.cu_seqlens[:] = real
    target.segments.cu_seqlens[: len(lengths) + 1] = torch.tensor([0, *lengths]).cumsum(0)
    target.segments.positions[:real] = torch.cat([torch.arange(n) for n in lengths])
    return batch


@pytest.mark.parametrize("by_sentence", [False, True])
@pytest.mark.parametrize("accuracy", [False, True])
def test_a_model_without_a_source_is_trained(by_sentence: bool, accuracy: bool) -> None:
    model = NextWord().double()
    flatten_parameters(model)
    expected = copy.deepcopy(model)
    objective = LabelSmoothing(PAD, by_sentence, 0.1, accuracy, 1)
    (low,) = flat_buffers(model.parameters())
    step = TrainingStep(
        model,
        low,
        FlatAdam(model.parameters(), lr=RATE),
        objective,
        UpdateOptions(1, 0.0, 1e-6),
        Ranks(),
    )
    step.set_state(0)
    adam = FlatAdam(expected.parameters(), lr=RATE)
    for count in range(4):
        batches = [batch_of([3, 1, 4], 12), batch_of([2, 5], 7)]
        size = objective.sample_size(batches)
        assert size == (5 if by_sentence else 15)
        given = [count, size, *[RATE] * KNOWN_RATES, size, 15, 5, *[0] * (len(Count) - 3)]
        values = step.update(batches, given).wait()

        adam.zero_grad()
        losses, right, total = 0.0, 0, 0
        for batch in batches:
            target = batch.open()["target"]
            labels = target["labels"].masked_fill(target.segments.positions < 1, PAD)
            logits = expected.packed_logits(batch.open(), draw_rng())
            right += int((logits.argmax(1) == labels)[labels != PAD].sum())
            total += int((labels != PAD).sum())
            loss, _, _ = label_smoothed_cross_entropy(logits, labels, 0.1, PAD)
            (loss.sum() / size).backward()
            losses += float(loss.detach().sum())
        adam.step()
        logged = objective.logged(values[State.SUM_0 :])
        assert logged["loss"] == pytest.approx(losses, rel=1e-12)
        assert set(logged) == {"loss", "nll_loss", *(("n_correct", "total") if accuracy else ())}
        if accuracy:
            assert (logged["n_correct"], logged["total"]) == (right, total)
        torch.testing.assert_close(
            model.table.weight, expected.table.weight, rtol=1e-12, atol=1e-12
        )
    assert not torch.equal(model.table.weight, NextWord().double().table.weight)


def test_what_extends_a_model_declares_for_itself() -> None:
    class Extended(NextWord):
        pass

    class Declared(NextWord):
        packed_logits = NextWord.packed_logits

    found = [declares(model(), "packed_logits") for model in (NextWord, Extended, Declared)]
    assert found == [True, False, True]
