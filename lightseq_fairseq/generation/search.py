"""Beam search, diverse beam search and sampling with one model, without the host in the loop.

A step is one CUDA graph: decoder, candidates, and selection of the next hypotheses. The host only
launches it. One step late, the host learns how many sentences are unfinished. From this it knows
when the search ends, and it reduces the number of rows when enough sentences are finished.

Shapes: B = sentences, T = packed source tokens, N = rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.generation import ends, prompts, repeats
from lightseq_fairseq.generation.decoder import StepDecoder, bucket, first_bucket
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis, Results
from lightseq_fairseq.generation.search_buffers import SearchBuffers
from lightseq_fairseq.ops.beam_search import Progress

MOST_BEAM = 64  # the largest beam that the CUDA kernels support


@torch.no_grad()
def search(
    steps: StepDecoder, encoder: Any, decoder: Any, tokens: Tensor, options: SearchOptions,
    first: int, max_len: int, positions: int, rng: Tensor | None = None,
    forced: Tensor | None = None,
) -> list[list[LazyHypothesis]]:  # fmt: skip
    """The results of each sentence, best first, as fairseq's ``SequenceGenerator`` gives them.

    Args:
        steps: the decoder's ``StepDecoder``, which also describes ``decoder``.
        encoder: see ``StepDecoder.encode``; None for a decoder without a source, such as a language
            model.
        tokens: int64 [B, S], padded sentences, at least one; on any device. Without an encoder, the
            prompts, which results begin with.
        first: the first decoder input token.
        max_len: the most tokens of a result, without eos.
        positions: positions to allocate at first; more are allocated when needed.
        rng: int64 [2], for sampling.
        forced: int64 [B, P], the tokens that results begin with. With an encoder: pads, which may
            only follow them, force nothing, and it has no eos. Without: on the CPU, the prompts as
            transformers gives them, which end together; ``first`` is not read, and ``tokens`` has
            ``decoder.padding_idx`` in place of each pad.

    Returns: a list for each sentence, see ``generation.results.LazyHypothesis``.
    """
    sentences, beam = len(tokens), options.beam
    device = next(decoder.parameters()).device
    rows = first_bucket(sentences * beam, device)
    user = _User()
    steps = steps.lent_to(user)
    positions = min(positions, max_len + 1)
    table = decoder.table_rows(max_len + 1)
    step, left, after_prompts, is_ragged = 0, sentences, 0, False
    if encoder is None and forced is None:
        tokens = prompts.with_first(tokens, first, options, max_len)
    elif encoder is not None and forced is not None:
        after_prompts = min(forced.shape[1], max_len + (not options.forces_eos))
        forced = forced[:, :after_prompts]
    if encoder is None:
        positions = max(positions, prompts.room(tokens.shape[1], device))
    positions = max(positions, after_prompts + 1)
    try:
        memory = steps.open(encoder, decoder, tokens, rows, positions)
        lengths = np.diff(memory.host["cu_seqlens"][: sentences + 1])  # without pads
        longest = max(int(lengths.max()), 1)
        _start(memory, sentences, options, first, max_len)
        if encoder is None and forced is not None:
            step, is_ragged = prompts.begin_at_end(memory, forced, beam)
        elif encoder is None:
            step, left = prompts.begin(memory, sentences, options)
            after_prompts = longest - 1
        memory.send()
        if rng is not None:
            memory.rng.copy_(rng)
        if forced is not None:
            prompts.keep(memory, forced, 0 if encoder is None else 1, beam)
        if encoder is None:
            scored = options if forced is None else None
            prompts.prefill(steps, decoder, rows // beam, longest, scored, beam, table)
        else:
            steps.encode(encoder, decoder, sentences, longest)
        results = Results(sentences, beam)  # while the GPU works
        steps.progress.begin(left, step)
        began = step
        while left and step <= max_len:
            steps.make_room(rows, step + 1, step)
            follows = step < after_prompts
            is_last = step == max_len and not options.forces_eos
            kind = rows, options, follows, is_last, is_ragged
            steps.launch((*kind, table), functools.partial(_advance, steps, decoder, *kind))
            step += 1
            if is_last:
                break
            left = steps.progress.unfinished(step - 1)
            if left and bucket(left * beam, device) < rows:
                rows = bucket(left * beam, device)
                _compact(memory, step, rows // beam, beam)
    except BaseException:
        steps.forget()
        raise
    # If no sentence is left, the step that is still running changes no results, so do not wait for
    # it. The results of the earlier steps can be read: a step writes its report only after its
    # results are visible to the whole GPU. Without a step, the results are those of the prompts.
    stream = steps.progress.beside(left > 0 or step == began)
    found = results.fetch(memory, max(step, after_prompts), stream)
    steps.end()
    return found


class _User:
    """Its lifetime marks how long a search uses a ``StepDecoder``, see ``lent_to``."""


def _start(
    memory: SearchBuffers, sentences: int, options: SearchOptions, first: int, max_len: int
) -> None:
    host = memory.host
    host["progress"][[Progress.MAX_LEN, Progress.UNFINISHED]] = max_len, sentences
    host["sentences"][:sentences] = np.arange(sentences)
    host["tokens"].fill(first)
    # At first all hypotheses of a sentence are equal: only one per group may have continuations,
    # or all of them when sampling.
    host["scores"].fill(-np.inf)
    scores = host["scores"][: sentences * options.beam].reshape(sentences, options.beam)
    scores[:, : options.beam if options.sampled else options.groups] = 0.0


def _advance(
    steps: StepDecoder, decoder: Any, rows: int, options: SearchOptions, follows: bool,
    is_last: bool, is_ragged: bool,
) -> None:  # fmt: skip
    """One step of all hypotheses, on buffers at fixed addresses.

    follows: a prompt or the forced tokens may be longer than the hypotheses. Then min_len is
    ignored, as in fairseq. is_last: all hypotheses end, see ``ends.end_all``. is_ragged: prompts
    that end together have pads.
    """
    memory, beam = steps.memory, options.beam
    x, _ = steps.features(decoder, rows, beam, is_ragged=is_ragged)
    slots = rows // beam
    logits = decoder.output_layer(x)[: slots * beam]
    scores, sentences = memory.scores[: slots * beam], memory.sentences[:slots]
    so_far = scores
    if is_last:
        memory.progress[Progress.MAX_LEN] += 1  # any token may follow
    if options.blocks:
        so_far = repeats.block(memory, logits, scores, options)
    if follows:
        options = replace(options, min_len=0)
    if options.sampled:
        if options.topk and options.topp:  # the op would read only topp
            least = logits.topk(min(options.topk, logits.shape[1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        candidates = ops.beam_sample(
            logits, so_far, sentences, memory.progress, memory.rng,
            beam=beam, topk=options.topk, topp=options.topp, **options.of_tokens(),
        )  # fmt: skip
    else:
        candidates = ops.beam_candidates(
            logits, so_far, memory.progress, count=2 * beam, **options.of_tokens()
        )
    if follows and memory.reads_source:
        # With transformers' rules a forced token adds nothing.
        sums = so_far if options.early_stopping is None else scores
        candidates = prompts.force(memory, options, logits, sums, candidates)
    elif follows:
        candidates = prompts.follow(memory, slots, options, candidates, logits.shape[1])
    if is_last:
        ends.end_all(memory, slots, options, candidates)
        return
    ops.beam_advance(
        *candidates,
        progress=memory.progress,
        sentences=sentences,
        tokens=memory.tokens[: slots * beam],
        scores=scores,
        ancestry=memory.ancestry,
        past_tokens=memory.past_tokens,
        past_scores=memory.past_scores,
        hypothesis_tokens=memory.hypothesis_tokens,
        hypothesis_scores=memory.hypothesis_scores,
        lengths=memory.lengths,
        totals=memory.totals,
        reports=steps.progress.reports,
        beam=beam,
        groups=options.groups,
        diversity=options.diversity,
        eos=options.eos,
        length_penalty=options.length_penalty,
        stopping=int(options.stopping),
    )


def _compact(memory: SearchBuffers, positions: int, slots: int, beam: int) -> None:
    """Move the unfinished sentences to the first ``slots`` slots; keys and values do not move."""
    kept = (memory.sentences < 0).int().argsort(stable=True)[:slots]
    rows = (kept[:, None] * beam + torch.arange(beam, device=kept.device)).flatten()
    memory.sentences[:slots] = memory.sentences[kept]
    memory.sentences[slots:] = -1
    for of_rows in (memory.tokens, memory.scores, memory.starts):
        of_rows[: len(rows)] = of_rows[rows]
    memory.ancestry[:positions, : len(rows)] = memory.ancestry[:positions, rows]
