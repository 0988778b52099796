"""The ``ls_`` criteria: fairseq's criteria on one fused op, and their `step.objectives`.

A change of a loss changes both, ``forward`` (padded batches) and the objective (captured step).
The classes have the names of fairseq's classes, because fairseq compares the names when it resumes
a run. Flags, sample size and logged values are fairseq's, too. The criteria accept ls_ models and
native models of fairseq.

Shapes: B = sentences, L = longest sentence, T = rows (packed tokens), V = vocabulary.
"""

from __future__ import annotations

from typing import Any

from fairseq.criterions import cross_entropy as native_unsmoothed
from fairseq.criterions import label_smoothed_cross_entropy as native
from fairseq.criterions import masked_lm as native_masked
from fairseq.criterions import register_criterion
from fairseq.criterions import sentence_prediction as native_sentences
from fairseq.logging import metrics
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.layers import label_smoothed_cross_entropy
from lightseq_fairseq.step.objectives import (
    CrossEntropy,
    LabelSmoothing,
    MaskedTokens,
    SentenceClasses,
    SentenceNumbers,
)


@register_criterion(
    "ls_label_smoothed_cross_entropy", dataclass=native.LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedCrossEntropyCriterion(native.LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross entropy over packed logits."""

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Loss of a batch in nats (summed), its sample size, and the logging output.

        ``reduce=False`` gives the loss of each target, [B * (L - ignored prefix), 1], as in
        fairseq.
        """
        logits, target, segments = _logits_and_target(
            model, sample, self.padding_idx, self.ignore_prefix_size
        )
        loss, nll, correct = label_smoothed_cross_entropy(
            logits, target, self.eps, self.padding_idx, self.report_accuracy
        )
        if reduce:
            loss, nll = loss.sum(), nll.sum()
        else:
            loss, nll = (_padded(x, sample["target"], segments) for x in (loss, nll))
            loss, nll = (x[:, self.ignore_prefix_size :].reshape(-1, 1) for x in (loss, nll))
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logging_output = _logged(sample, sentences, sample_size, loss=loss.data, nll_loss=nll.data)
        if self.report_accuracy:
            logging_output["n_correct"] = correct.sum()
            logging_output["total"] = target.ne(self.padding_idx).sum()
        return loss, sample_size, logging_output

    def objective(self) -> LabelSmoothing:
        """This criterion in the form that the captured step uses."""
        return LabelSmoothing(
            self.padding_idx, self.sentence_avg, self.eps, self.report_accuracy,
            self.ignore_prefix_size,
        )  # fmt: skip


@register_criterion("ls_cross_entropy", dataclass=native_unsmoothed.CrossEntropyCriterionConfig)
class CrossEntropyCriterion(native_unsmoothed.CrossEntropyCriterion):
    """Cross entropy over packed logits."""

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Loss of a batch in nats (summed), its sample size, and the logging output.

        ``reduce=False`` gives the loss of each target, [B * L], as in fairseq.
        """
        logits, target, segments = _logits_and_target(model, sample, self.padding_idx)
        loss, _, _ = label_smoothed_cross_entropy(logits, target, 0.0, self.padding_idx)
        loss = loss.sum() if reduce else _padded(loss, sample["target"], segments).flatten()
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        return loss, sample_size, _logged(sample, sentences, sample_size, loss=loss.data)

    def objective(self) -> CrossEntropy:
        """This criterion in the form that the captured step uses."""
        return CrossEntropy(self.padding_idx, self.sentence_avg)


@register_criterion("ls_masked_lm", dataclass=native_masked.MaskedLmConfig)
class MaskedLmLoss(native_masked.MaskedLmLoss):
    """Cross entropy of the masked tokens alone."""

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Loss of a batch in nats (summed, whatever ``reduce`` is, as in fairseq), its sample size,
        and the logging output."""
        target = sample["target"]
        is_masked = target.ne(self.padding_idx)
        logits = model(**sample["net_input"], masked_tokens=is_masked)[0]
        loss, _, _ = label_smoothed_cross_entropy(logits, target[is_masked], 0.0, self.padding_idx)
        loss, sample_size = loss.sum(), is_masked.int().sum()
        logged = _logged(sample, sample["nsentences"], sample_size, loss=loss.data)
        return loss, sample_size, logged

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """As in fairseq. But if no token is masked, log loss 0; fairseq would divide by zero."""
        if sum(log["sample_size"] for log in logging_outputs) > 0:
            super().reduce_metrics(logging_outputs)
        else:
            metrics.log_scalar("loss", 0.0, 0, round=3)

    def objective(self) -> MaskedTokens:
        """This criterion in the form that the captured step uses."""
        return MaskedTokens(self.padding_idx)


@register_criterion("ls_sentence_prediction", dataclass=native_sentences.SentencePredictionConfig)
class SentencePredictionCriterion(native_sentences.SentencePredictionCriterion):
    """fairseq's loss of a classification head, which the captured step can compute as well.

    For a padded batch, fairseq's own ``forward`` computes the loss: the head has only one row for
    each sentence.
    """

    def objective(self) -> SentenceClasses | SentenceNumbers:
        """This criterion in the form that the captured step uses."""
        of = SentenceNumbers if self.regression_target else SentenceClasses
        return of(self.classification_head_name)


def _logged(sample: Any, sentences: int, sample_size: Any, **losses: Tensor) -> dict[str, Any]:
    """fairseq's logging output of a batch."""
    counts = {"ntokens": sample["ntokens"], "nsentences": sentences, "sample_size": sample_size}
    return {**losses, **counts}


def _padded(rows: Tensor, target: Tensor, segments: Any) -> Tensor:
    """Losses of all rows, padded to the shape of target [B, L]."""
    return rows.view(target.shape) if segments is None else segments.pad(rows)


def _logits_and_target(
    model: Any, sample: dict[str, Any], padding_idx: int, ignored_prefix: int = 0
) -> tuple[Tensor, Tensor, Any]:
    """Logits [T, V], targets [T] (pad where ignored), and the segments, or None if not packed."""
    segments = None
    if getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None:
        raise UserError(
            "An ls_ criterion needs every logit, but adaptive softmax does not compute all: use "
            "--criterion adaptive_loss."
        )
    if getattr(model, "packs_tokens", False):
        logits, segments = model(**sample["net_input"], packed=True)
        target = sample["target"]
    else:
        net_output = model(**sample["net_input"])
        logits = net_output[0].flatten(0, 1)
        target = model.get_targets(sample, net_output)
    if ignored_prefix > 0:
        target = target.clone()
        # As in fairseq, columns: with --left-pad-target, those of a short sentence may be pads.
        target[:, :ignored_prefix] = padding_idx
    return logits, target.flatten() if segments is None else segments.pack(target), segments
