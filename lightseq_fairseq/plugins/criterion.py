"""``ls_label_smoothed_cross_entropy``: fairseq's criterion on one fused op.

Letters: B sentences, L longest sentence, T rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from fairseq.criterions import label_smoothed_cross_entropy as native
from fairseq.criterions import register_criterion
from torch import Tensor

from lightseq_fairseq.errors import UserError
from lightseq_fairseq.layers import label_smoothed_cross_entropy
from lightseq_fairseq.training.objectives import LabelSmoothing


@register_criterion(
    "ls_label_smoothed_cross_entropy",
    dataclass=native.LabelSmoothedCrossEntropyCriterionConfig,
)
class LabelSmoothedCrossEntropyCriterion(native.LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross entropy over packed logits, for ls and for native models.

    The class bears fairseq's name because a resumed run asserts that the names are equal.
    Flags, sample size and logged values are those of
    ``fairseq.criterions.label_smoothed_cross_entropy``.
    """

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Loss of a batch in nats, its sample size, and what is logged.

        ``reduce=False`` gives the loss of every target, [B * (L - ignored prefix), 1], as fairseq
        does.
        """
        logits, target, segments = self._logits_and_target(model, sample)
        loss, nll, correct = label_smoothed_cross_entropy(
            logits, target, self.eps, self.padding_idx, self.report_accuracy
        )
        if reduce:
            loss, nll = loss.sum(), nll.sum()
        else:
            loss, nll = (self._padded(x, sample["target"], segments) for x in (loss, nll))
        sentences = sample["target"].size(0)
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "nll_loss": nll.data,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            logging_output["n_correct"] = correct.sum()
            logging_output["total"] = target.ne(self.padding_idx).sum()
        return loss, sample_size, logging_output

    def objective(self) -> LabelSmoothing:
        """The same for the captured step."""
        return LabelSmoothing(
            self.eps, self.padding_idx, self.report_accuracy, self.ignore_prefix_size,
            self.sentence_avg,
        )  # fmt: skip

    def _padded(self, rows: Tensor, target: Tensor, segments: Any) -> Tensor:
        """Losses of all rows in the places of target [B, L], without its prefix: [B * L', 1]."""
        losses = rows.view(target.shape) if segments is None else segments.pad(rows)
        return losses[:, self.ignore_prefix_size :].reshape(-1, 1)

    def _logits_and_target(self, model: Any, sample: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
        """Logits [T, V], targets [T] with ignored ones set to pad, and the segments if packed."""
        segments = None
        if getattr(model, "packs_tokens", False):
            logits, segments = model(**sample["net_input"], packed=True)
            target = segments.pack(sample["target"])
            prefix = segments.positions < self.ignore_prefix_size
        else:
            net_output = model(**sample["net_input"])
            if getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None:
                raise UserError(
                    "ls_label_smoothed_cross_entropy needs every logit: use fairseq's "
                    "--criterion adaptive_loss with --adaptive-softmax-cutoff."
                )
            logits = net_output[0].flatten(0, 1)
            target = model.get_targets(sample, net_output)
            prefix = target.new_zeros(target.shape, dtype=bool)
            prefix[:, : self.ignore_prefix_size] = True
            prefix, target = prefix.flatten(), target.flatten()
        if self.ignore_prefix_size > 0:
            target = target.masked_fill(prefix, self.padding_idx)
        return logits, target, segments
