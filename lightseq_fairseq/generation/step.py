"""One step of a search: decoder, candidates, and selection of the next hypotheses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.generation import ends, prompts
from lightseq_fairseq.generation.decoder import StepDecoder
from lightseq_fairseq.generation.options import SearchOptions


@dataclass(frozen=True)
class Step:
    """What a step computes, on buffers at fixed addresses.

    Attributes:
        rows: see ``SearchBuffers``; those of all slots, and perhaps more.
        options: of the search.
        min_len_from: see ``ops.beam_candidates``.
        prompt: see ``ops.beam_advance``.
        follows: sentences may have forced tokens at this step.
        ends_all: all hypotheses end, see ``ends.end_all``.
    """

    rows: int
    options: SearchOptions
    min_len_from: int
    prompt: int
    follows: bool
    ends_all: bool

    def run(self, steps: StepDecoder, decoder: Any, forced: Tensor | None) -> None:
        """Run the step of all hypotheses.

        forced: if the step ``follows``, the forced tokens, see ``prompts.force``.
        """
        memory, options, beam = steps.memory, self.options, self.options.beam
        x, _ = steps.features(decoder, self.rows, beam)
        slots = self.rows // beam
        rows = slots * beam
        logits = decoder.output_layer(x)[:rows]
        scores, sentences = memory.scores[:rows], memory.sentences[:slots]
        now, last_steps = memory.steps[:rows], memory.last_steps[:rows]
        so_far, reports = scores, steps.progress.reports
        if self.ends_all:
            last_steps += 1  # any token may follow
        if options.blocks:
            if options.renormalizes and options.min_len:
                early = now < options.min_len
                logits[:, options.eos].masked_fill_(early, -torch.inf)
            so_far = ops.block_repeats(
                logits, scores, memory.blocked, memory.tokens[:rows], memory.places[:rows],
                memory.ancestry, memory.past_tokens, options.no_repeat_ngram, options.temperature,
                options.renormalizes,
            )  # fmt: skip
        of_tokens = {**options.of_tokens(), "min_len_from": self.min_len_from}
        if options.sampled:
            if options.topk and options.topp:  # the op would read only topp
                least = logits.topk(min(options.topk, logits.shape[1])).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            candidates = ops.beam_sample(
                logits, so_far, sentences, now, last_steps, memory.rng,
                beam=beam, topk=options.topk, topp=options.topp, **of_tokens,
            )  # fmt: skip
        else:
            candidates = ops.beam_candidates(
                logits, so_far, now, last_steps, count=2 * beam, **of_tokens
            )
        if forced is not None:
            # With transformers' rules a forced token adds nothing.
            sums = so_far if options.early_stopping is None else scores
            candidates = prompts.force(memory, options, logits, sums, candidates, forced)
        if self.ends_all:
            ends.end_all(memory, slots, options, candidates, self.prompt, reports)
            return
        ops.beam_advance(
            *candidates,
            last_steps=last_steps,
            progress=memory.progress,
            sentences=sentences,
            steps=now,
            places=memory.places[:rows],
            tokens=memory.tokens[:rows],
            scores=scores,
            ancestry=memory.ancestry,
            past_tokens=memory.past_tokens,
            past_scores=memory.past_scores,
            hypothesis_tokens=memory.hypothesis_tokens,
            hypothesis_scores=memory.hypothesis_scores,
            lengths=memory.lengths,
            totals=memory.totals,
            reports=reports,
            beam=beam,
            groups=options.groups,
            diversity=options.diversity,
            eos=options.eos,
            length_penalty=options.length_penalty,
            stopping=int(options.stopping),
            prompt=self.prompt,
        )
