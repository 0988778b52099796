"""Training objectives: map a model and a packed batch to losses and to the sums that are logged.

The captured step calls an objective; it does not handle the model's outputs or the labels itself.
A criterion declares its objective by a method ``objective`` of its own class. An inherited method
does not count. The criterion's ``forward`` computes the same loss from a padded batch: change both.

Shapes: T = rows that have labels, and those that fill up the bucket; V = vocabulary, B = sentences
of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq.layers import label_smoothed_cross_entropy
from lightseq_fairseq.memory.packing import Packed, PackedBatch, Rows


class PackedModel(Protocol):
    """A model that the captured step can train; its own class must define ``packed_logits``."""

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """Logits [T, V] of the rows that have labels; ``rng`` int64 [2], see ``draw_rng``.

        It runs inside a CUDA graph: Python must not read values of tensors on the GPU, and shapes
        depend only on the bucket. If a batch trains only a part of the model (a language pair),
        ``batch.part`` names this part, and the logits must be those of the part.
        """
        ...


class ModelWithHeads(Protocol):
    """A model that the captured step can train by any of its heads."""

    def class_outputs(self, batch: Packed, rng: Tensor, head: str) -> Tensor:
        """Outputs [B, classes] of the classification head with this name."""
        ...

    def unused_by(self, head: str | None) -> Iterable[Tensor]:
        """The parameters that do not contribute to these outputs; None: to ``packed_logits``."""
        ...


class Objective:
    """What the captured step needs from a criterion.

    Attributes:
        calls: the methods of the model that it calls.
    """

    calls: ClassVar[tuple[str, ...]] = ("packed_logits",)

    def losses(
        self, model: Any, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Losses [T], whose sum is minimised, and the tensors whose sums are logged.

        The latter are at most four tensors [T], the losses first.

        Args:
            scale: [], the factor by which the step multiplies the gradient of the losses.
        """
        raise NotImplementedError

    def sample_size(self, batches: Sequence[PackedBatch]) -> int:
        """The divisor of the gradient of all ``batches``."""
        raise NotImplementedError

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """Name -> value, as the criterion's ``reduce_metrics`` reads them.

        Args:
            sums: the sums of the tensors that ``losses`` returns for the log.
        """
        return {"loss": sums[0]}

    def unused(self, model: Any) -> Iterable[Tensor]:
        """The parameters of ``model`` on which the losses never depend, such as the language
        model's head in fine-tuning. As in fairseq, with --fp16 or --bf16 weight decay still
        changes them; in fp32 they do not change."""
        return ()


@dataclass(frozen=True)
class _OfTokens(Objective):
    """Cross entropy over the labels of a stream, perhaps smoothed.

    Attributes:
        padding_idx: label of rows that are ignored.
        by_sentence: divide the gradient by the number of sentences instead of tokens.
        accuracy: whether to count correct predictions.
        ignored_prefix: number of target tokens at the start of each sentence that are ignored.
    """

    stream: ClassVar[str] = "target"
    padding_idx: int
    by_sentence: bool = False
    smoothing: float = 0.0
    accuracy: bool = False
    ignored_prefix: int = 0

    def losses(
        self, model: PackedModel, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        target = batch[self.stream]
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
        return sum(batch.nsentences if self.by_sentence else batch.ntokens for batch in batches)


class CrossEntropy(_OfTokens):
    """Cross entropy of tokens. Source: ``fairseq.criterions.cross_entropy``."""


class LabelSmoothing(_OfTokens):
    """Its smoothed form. Source: ``fairseq.criterions.label_smoothed_cross_entropy``."""

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        names = ("loss", "nll_loss") + ("n_correct", "total") * self.accuracy
        return dict(zip(names, sums, strict=False))


class MaskedTokens(_OfTokens):
    """Cross entropy over the labels of the stream "masked", which are the tokens before masking.

    Source: ``fairseq.criterions.masked_lm``.
    """

    calls = ("packed_logits", "unused_by")
    stream = "masked"

    def sample_size(self, batches: Sequence[PackedBatch]) -> int:
        return sum(batch.count("masked") for batch in batches)

    def unused(self, model: ModelWithHeads) -> Iterable[Tensor]:
        return model.unused_by(None)


@dataclass(frozen=True)
class _OfSentences(Objective):
    """What the objectives of whole sentences share.

    Attributes:
        head: name of the model's classification head.
    """

    calls = ("class_outputs", "unused_by")
    head: str

    def sample_size(self, batches: Sequence[PackedBatch]) -> int:
        return sum(batch.count("target") for batch in batches)

    def unused(self, model: ModelWithHeads) -> Iterable[Tensor]:
        return model.unused_by(self.head)


class SentenceClasses(_OfSentences):
    """Cross entropy of each sentence's class, in float32 as in fairseq (float64 for float64).

    Source: ``fairseq.criterions.sentence_prediction``.
    """

    def losses(
        self, model: ModelWithHeads, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        labels = batch["target"]["labels"]
        logits = _fitted(_wide(model.class_outputs(batch, rng, self.head)), len(labels))
        losses = functional.cross_entropy(logits, labels, reduction="none")  # ignores -100
        correct = logits.argmax(1) == labels
        return losses, [losses.detach(), correct.to(losses.dtype)]

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        return {"loss": sums[0], "ncorrect": sums[1]}


class SentenceNumbers(_OfSentences):
    """Squared errors of the numbers that belong to each sentence, in float32 as in fairseq.

    The head has an output for each number. Source: ``fairseq.criterions.sentence_prediction`` with
    ``--regression-target``.
    """

    def losses(
        self, model: ModelWithHeads, batch: Packed, rng: Tensor, scale: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        target = batch["target"]
        numbers, is_real = target["labels"].view(torch.float64), _is_real(target)
        predicted = _wide(model.class_outputs(batch, rng, self.head)).flatten()
        predicted = _fitted(predicted, len(numbers))
        wanted = numbers.to(predicted.dtype).masked_fill(~is_real, 0.0)
        losses = (predicted - wanted).square().masked_fill(~is_real, 0.0)
        return losses, [losses.detach(), is_real.to(losses.dtype)]

    def logged(self, sums: Sequence[float]) -> dict[str, float]:
        """fairseq counts each number as a sentence."""
        return {"loss": sums[0], "nsentences": int(sums[1])}


def _is_real(rows: Rows) -> Tensor:
    """bool [T]: is it a row of a sentence, and not one that fills up the bucket?"""
    places = torch.arange(len(rows.segments.positions), device=rows.segments.positions.device)
    return places < rows.segments.cu_seqlens[-1]


def _fitted(x: Tensor, rows: int) -> Tensor:
    """x, cut to ``rows`` or filled up with zeros.

    x has the outputs for all sentences of the bucket. The bucket's number of label rows may differ.
    """
    missing = rows - len(x)
    return x[:rows] if missing <= 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def declares(thing: Any, name: str) -> bool:
    """Whether the class of ``thing`` (a model or a criterion) itself defines ``name``.

    An inherited definition does not count: a subclass may change other methods (``forward``), which
    the captured step would not call.
    """
    return name in vars(type(thing))
