"""What a model is trained for: from a packed batch and the model to losses, and what is logged.

The captured step asks an objective for these and knows neither the model's outputs nor the labels.
A criterion declares its own: its class, and not one it extends, has a method ``objective``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lightseq_fairseq.layers import label_smoothed_cross_entropy
from lightseq_fairseq.packing import Packed, PackedBatch


class PackedModel(Protocol):
    """A model that the captured step trains; its class declares it by a ``packed_logits``."""

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """Logits [T, V] of the rows that have labels; ``rng`` int64 [2], see ``draw_rng``.

        A model of several parts has to look at ``batch.part``.
        """
        ...


class Objective(Protocol):
    """What the captured step asks of a criterion."""

    def losses(
        self, model: Any, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses [T], the sum of which is to be small, and what is summed up for the log.

        What is summed up: at most four tensors [T], the losses first.

        Args:
            scale: [], what the step multiplies the losses' gradient by.
        """
        ...

    def sample_size(self, batches: Sequence[PackedBatch]) -> int:
        """What the gradient of all these batches is divided by."""
        ...

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """The sums that ``losses`` asked for, as the criterion's ``reduce_metrics`` knows them."""
        ...


@dataclass(frozen=True)
class LabelSmoothing:
    """Label-smoothed cross entropy of a stream "target" with labels.

    Source: ``fairseq.criterions.label_smoothed_cross_entropy``.

    Attributes:
        padding_idx: label of rows that count nothing.
        accuracy: whether correct labels are counted.
        ignored_prefix: first target tokens of each sentence that count nothing.
        by_sentence: the gradient is divided by sentences and not by tokens.
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
    """The same without smoothing, of which the loss alone is logged.

    Source: ``fairseq.criterions.cross_entropy``.
    """

    def __init__(self, padding_idx: int, by_sentence: bool) -> None:
        super().__init__(0.0, padding_idx, False, 0, by_sentence)

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """See ``Objective``."""
        return {"loss": sums[0]}


def declares(thing: Any, name: str) -> bool:
    """Whether the class of a model or a criterion itself has ``name``.

    Not so where it only extends one that has: what it changes would never be called.
    """
    return name in vars(type(thing))


__all__ = ["CrossEntropy", "LabelSmoothing", "Objective", "PackedModel", "declares"]
