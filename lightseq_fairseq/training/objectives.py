"""Training objectives: map a model and a packed batch to losses and to the sums that are logged.

The captured step calls an objective; it does not handle the model's outputs or the labels itself.
A criterion declares its objective by a method ``objective`` of its own class. An inherited method
does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightseq_fairseq.layers import label_smoothed_cross_entropy
from lightseq_fairseq.packing import Packed, PackedBatch


class PackedModel(Protocol):
    """A model that the captured step can train; its own class must define ``packed_logits``."""

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """Logits [T, V] of the rows that have labels; ``rng`` int64 [2], see ``draw_rng``.

        A model of several parts must check ``batch.part``.
        """
        ...


class Objective(Protocol):
    """What the captured step needs from a criterion."""

    def losses(
        self, model: Any, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses [T], whose sum is minimised, and the tensors whose sums are logged.

        The latter are at most four tensors [T], the losses first.

        Args:
            scale: [], the factor by which the step multiplies the gradient of the losses.
        """
        ...

    def sample_size(self, batches: Sequence[PackedBatch]) -> int:
        """The divisor of the gradient of all ``batches``."""
        ...

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """The sums of ``losses``, under the names of the criterion's ``reduce_metrics``."""
        ...


@dataclass(frozen=True)
class LabelSmoothing:
    """Label-smoothed cross entropy over the labels of the stream "target".

    Source: ``fairseq.criterions.label_smoothed_cross_entropy``.

    Attributes:
        padding_idx: label of rows that are ignored.
        accuracy: whether to count correct predictions.
        ignored_prefix: number of target tokens at the start of each sentence that are ignored.
        by_sentence: divide the gradient by the number of sentences instead of tokens.
    """

    smoothing: float
    padding_idx: int
    accuracy: bool
    ignored_prefix: int
    by_sentence: bool

    def losses(
        self, model: PackedModel, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """See ``Objective``."""
        target = batch["target"]
        labels = target["labels"]
        if self.ignored_prefix > 0:
            ignored = target.segments.positions < self.ignored_prefix
            labels = labels.masked_fill(ignored, self.padding_idx)
        logits = model.packed_logits(batch, rng)
        losses, nll, correct = label_smoothed_cross_entropy(
            logits, labels, self.smoothing, self.padding_idx, self.accuracy, scale
        )
        counted = [losses.detach(), nll]
        if self.accuracy:
            counted += [correct.to(nll.dtype), (labels != self.padding_idx).to(nll.dtype)]
        return losses, counted

    def sample_size(self, batches: Sequence[PackedBatch]) -> int:
        """See ``Objective``."""
        return sum(batch.nsentences if self.by_sentence else batch.ntokens for batch in batches)

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """See ``Objective``."""
        names = ("loss", "nll_loss") + ("n_correct", "total") * self.accuracy
        return dict(zip(names, sums, strict=False))


class CrossEntropy(LabelSmoothing):
    """Cross entropy without smoothing; only the loss is logged.

    Source: ``fairseq.criterions.cross_entropy``.
    """

    def __init__(self, padding_idx: int, by_sentence: bool) -> None:
        super().__init__(0.0, padding_idx, False, 0, by_sentence)

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """See ``Objective``."""
        return {"loss": sums[0]}


def declares(thing: Any, name: str) -> bool:
    """Whether the class of ``thing`` (a model or a criterion) itself defines ``name``.

    An inherited definition does not count: the captured step would never call what the subclass
    changes.
    """
    return name in vars(type(thing))


__all__ = ["CrossEntropy", "LabelSmoothing", "Objective", "PackedModel", "declares"]
