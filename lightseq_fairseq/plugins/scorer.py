"""The scores of given text by our language models, for fairseq's ``SequenceScorer``.

Shapes: B = blocks of text, L = longest block, T = packed tokens, S = scored rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq import utils
from fairseq.models import FairseqLanguageModel
from fairseq.modules import LearnedPositionalEmbedding
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.layers import label_smoothed_cross_entropy
from lightseq_fairseq.plugins.dropout import dropout_rng
from lightseq_fairseq.plugins.generator import is_searched

_MOST_LOGITS = 1 << 28  # that exist at a time; 1 GiB in float32


def generate(
    original: Callable[..., Any], self: Any, models: Any, sample: dict[str, Any], **options: Any
) -> Any:
    """fairseq's ``SequenceScorer.generate``, packed for one language model of ours.

    The results are the same, except that their tensors are on the CPU: fairseq-eval-lm reads
    numbers of each block, and would wait for the GPU at each.
    """
    model, target = models[0], sample["target"]
    is_ours = is_searched(model) and isinstance(model, FairseqLanguageModel)
    if len(models) > 1 or not is_ours or model.decoder.adaptive_softmax is not None:
        return original(self, models, sample, **options)
    model.eval()
    with torch.no_grad():
        scores = _scores(model, sample["net_input"]["src_tokens"], target, self.softmax_batch)
    scores, target = scores.cpu(), target.cpu()
    starts = sample.get("start_indices", [0] * len(target))
    return [[_hypothesis(*block, self.pad)] for block in zip(scores, target, starts)]


def _scores(model: FairseqLanguageModel, tokens: Tensor, target: Tensor, most_rows: int) -> Tensor:
    """Log-probabilities [B, L] of ``target`` int64 [B, L], 0 at its pads; float32 or float64.

    Logits are computed only for rows with a target, at most ``most_rows`` rows at a time: with
    --context-window most rows are context, without a target.
    """
    pad, most = model.decoder.padding_idx, model.decoder.max_positions()
    longest = int(tokens.ne(pad).sum(1).max())
    if longest > most and isinstance(model.decoder.embed_positions, LearnedPositionalEmbedding):
        raise UserError(
            f"A block has {longest} tokens (--tokens-per-sample, and one more with "
            f"--add-bos-token), but the model has only {most} learned positions: lower "
            "--tokens-per-sample."
        )
    rng = dropout_rng(model, tokens.device)
    features, segments, _ = model.decoder.packed(tokens, None, None, rng)
    labels = segments.pack(target)
    scored = labels.ne(pad).nonzero().squeeze(1)  # [S]
    size = min(most_rows, max(_MOST_LOGITS // model.decoder.output_projection.out_features, 1))
    found = []
    for rows in scored.split(size):
        logits = model.decoder.output_layer(features[rows])
        found.append(-label_smoothed_cross_entropy(logits, labels[rows], 0.0, pad)[0])
    scores = torch.cat(found) if found else features.new_zeros(0)
    return segments.pad(scores.new_zeros(len(labels)).index_copy(0, scored, scores))


def _hypothesis(scores: Tensor, target: Tensor, start: int, pad: int) -> dict[str, Any]:
    """fairseq's result for a block: ``scores`` and ``target`` [L], counted from ``start`` on."""
    tokens = utils.strip_pad(target[start:], pad)
    scores = scores[start : start + len(tokens)]
    return {
        "tokens": tokens,
        "score": scores.sum() / len(tokens),
        "attention": None,
        "alignment": None,
        "positional_scores": scores,
    }
