"""A language model as our search reads it.

Shapes: B = sentences, N = B * num_beams, L = longest prompt, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis
from lightseq_fairseq.generation.source import SearchBatch
from lightseq_fairseq.huggingface.asked import Asked
from lightseq_fairseq.huggingface.covered import NotCovered
from lightseq_fairseq.huggingface.searched import Searched, real_tokens


class SearchedText(Searched):
    """A language model."""

    reads_source, kind = False, "DecoderOnly"
    reads = ("attention_mask", "position_ids", "logits_to_keep")
    padding_idx = -1  # of the prompts

    @staticmethod
    def modules_of(model: Any) -> tuple[Any, ...]:
        return model, model.transformer

    @torch.no_grad()
    @torch.inference_mode(False)  # else only calls in inference mode could write the buffers
    def results(
        self, input_ids: Tensor, given: Mapping[str, Any], asked: Asked, options: SearchOptions,
        bias: Tensor | None,
    ) -> list[list[LazyHypothesis]]:  # fmt: skip
        ids = input_ids[:: options.beam].cpu()
        if asked.forced is not None and ids.shape[1] == 1:
            raise NotCovered("the first token is forced")
        if ids.shape[1] > asked.max_len + 1:
            raise NotCovered("a prompt is as long as max_length")
        real = real_tokens(given.get("attention_mask"), ids.shape, options.beam)
        if not bool(real[:, -1].all()):
            raise NotCovered("a prompt ends with a pad")
        if options.no_repeat_ngram and _may_repeat_pads(ids, real, options.eos):
            raise NotCovered("n-grams with pads are not to be repeated (no_repeat_ngram_size)")
        places, positions = real.cumsum(1) - 1, given.get("position_ids")
        if positions is not None:
            rows = positions.expand(input_ids.shape)[:: options.beam].cpu()
            if not torch.equal(rows * real, places * real):
                raise NotCovered("the position_ids do not count the tokens of the mask")
        length = asked.max_len + 1 - int((real == 0).sum(1).min())
        device = self.family.weight(self.decoder).device
        with self._turns.turn(device):
            self._read(length, bias)
            prompts = ids.masked_fill(real == 0, self.padding_idx)
            batch = SearchBatch(prompts, asked.max_len, end_together=True)
            found = self._found(batch, options, 0)
        for hypotheses, count in zip(found, real.sum(1).tolist(), strict=True):
            for hypothesis in hypotheses:  # without the prompt
                hypothesis["tokens"] = hypothesis["tokens"][count - 1 :]
        return found


def _may_repeat_pads(ids: Tensor, real: Tensor, eos: int) -> bool:
    """Whether a hypothesis may have an n-gram that has a pad in its prompt, or two tokens of the
    prompt with a pad between them: in transformers pads are tokens, in our search there are none.

    ids: prompts int64 [B, L]. real: 1 at real tokens, 0 at pads.
    """
    pads = real == 0
    has_holes = bool((real.diff(dim=1) < 0).any())
    # An eos as pad is no other token of a hypothesis, if it is none of the prompt.
    return has_holes or bool(
        (pads & (ids != eos)).any() or (pads.any() and ids[~pads].eq(eos).any())
    )
