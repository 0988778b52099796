"""Prompts: the tokens with which a language model's hypotheses begin; forced tokens of others.

`prefill` passes all prompts of a batch through the decoder at once. All hypotheses are at the same
position.

* fairseq's prompts begin together. The search begins at the end of the shortest one. So until a
  longer prompt ends, `follow` replaces the candidates of its sentence by the prompt's next token.
  A hypothesis consists of the first decoder input (position 0), the prompt, and the tokens that
  were found. Scores include those of the prompt's tokens.
* transformers' prompts end together, at the search's first step: before a shorter prompt are pads,
  which no token attends to. Scores and lengths do not include the prompt.

The tokens that translations begin with are few, such as that of a language: `force` replaces the
candidates by them, step by step from the first.

Shapes: B = sentences, S = slots (B or more), T = packed tokens of all prompts, L = longest prompt,
W = candidates per row, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.generation.decoder import StepDecoder, bucket
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search_buffers import SearchBuffers
from lightseq_fairseq.ops.beam_advance import normalised
from lightseq_fairseq.ops.beam_search import Progress

_LOGITS = 1 << 27  # logits that exist at a time


def with_first(tokens: Tensor, first: int, options: SearchOptions, max_len: int) -> Tensor:
    """tokens int64 [B, L - 1] -> the prompts with the first decoder input, int64 [B, L].

    Tokens after an eos become pads. Tokens after the first ``max_len``, the most that a result may
    have, are removed.
    """
    tokens = tokens[:, :max_len]
    ends = tokens == options.eos
    tokens = tokens.masked_fill(ends.cumsum(1) - ends.long() > 0, options.pad)
    return torch.cat((tokens.new_full((len(tokens), 1), first), tokens), 1)


def room(longest: int, device: torch.device) -> int:
    """Positions for prompts of up to ``longest`` tokens, see `prefill`."""
    return bucket(longest, device) + 1


def begin(memory: SearchBuffers, sentences: int, options: SearchOptions) -> tuple[int, int]:
    """Write into ``memory.host`` where the search begins, after ``search`` has filled in the rest.

    Returns:
        (first step, number of sentences to search). A prompt with an eos is finished: its results
        are the prompt.
    """
    host, beam = memory.host, options.beam
    starts = host["cu_seqlens"][: sentences + 1]
    counts = np.diff(starts) - 1  # without the first decoder input
    newest = host["source_tokens"][starts[1:] - 1]
    finished = (counts > 0) & (newest == options.eos)
    step = int(counts[~finished].min(initial=counts.max()))
    # A shorter prompt is finished, so its tokens are not read.
    newest = host["source_tokens"][starts[:-1] + np.minimum(counts, step)]
    host["tokens"][: sentences * beam] = newest.repeat(beam)
    host["sentences"][:sentences][finished] = -1
    scores = host["scores"][: sentences * beam].reshape(sentences, beam)
    scores[finished] = -np.inf
    lengths = host["lengths"][: sentences * beam].reshape(sentences, beam)
    lengths[finished] = counts[finished, None]
    unfinished = sentences - int(finished.sum())
    host["progress"][[Progress.STEP, Progress.UNFINISHED]] = step, unfinished
    return step, unfinished


def begin_at_end(memory: SearchBuffers, prompts: Tensor, beam: int) -> tuple[int, bool]:
    """As `begin`, for prompts that end together.

    prompts: int64 [B, L], with pads. The packed ones have at least one token each.

    Returns: (first step, whether there are pads).
    """
    host, (sentences, width) = memory.host, prompts.shape
    rows, step = sentences * beam, width - 1
    host["tokens"][:rows] = prompts[:, -1].numpy().repeat(beam)
    starts = width - np.diff(host["cu_seqlens"][: sentences + 1])
    host["starts"].fill(starts.min())  # so that the positions of unused rows exist
    host["starts"][:rows] = starts.repeat(beam)
    host["progress"][[Progress.STEP, Progress.PROMPT]] = step
    return step, bool(starts.any())


def prefill(
    steps: StepDecoder, decoder: Any, slots: int, longest: int,
    scored: SearchOptions | None, beam: int, table: int,
) -> None:  # fmt: skip
    """Write the prompts' keys and values into the buffers, as a separate graph.

    longest: the length of the longest prompt, with the first decoder input. scored: the options
    of a search whose prompts begin together: write their tokens and scores, too. table: rows of the
    table of positions.
    """
    longest = bucket(longest, steps.memory.device)

    def read() -> None:
        x = steps.prefill(decoder, slots, longest, beam)
        if scored is not None:
            _score(steps.memory, decoder, x, slots, longest, scored)

    key = ("prompts", len(steps.memory.source_tokens), slots, longest, scored, beam, table)
    steps.launch(key, read)


def _score(
    memory: SearchBuffers, decoder: Any, x: Tensor, slots: int, longest: int,
    options: SearchOptions,
) -> None:  # fmt: skip
    """Write the tokens and scores of the prompts, whose features are x [T, C]."""
    tokens, beam = memory.source_tokens, options.beam
    places, slot = memory.prompt_places(slots, beam)
    # Rows after the last prompt go to a column of their own, which is dropped.
    missing = torch.arange(len(tokens), device=tokens.device) >= memory.cu_seqlens[slots]
    column, places = slot.masked_fill(missing, slots), places.masked_fill(missing, 0)
    padded = tokens.new_full((longest + 1, slots + 1), options.pad)
    padded[places, column] = tokens
    following = padded[places + 1, column]
    scores = torch.zeros(padded.shape, device=tokens.device)
    scores[places + 1, column] = _log_probabilities(decoder, x, following, options)
    padded, scores = padded[:, :slots], scores.cumsum(0)[:, :slots]
    rows = slots * beam
    memory.past_tokens[:longest, :rows:beam] = padded[:-1]
    memory.past_scores[:longest, :rows:beam] = scores[:-1]
    memory.scores[:rows] += scores.index_select(0, memory.step[None])[0].repeat_interleave(beam)
    # The results of the prompts that are finished. Those of others are overwritten.
    memory.hypothesis_tokens[:longest, :rows] = padded[1:].repeat_interleave(beam, 1)
    memory.hypothesis_scores[:longest, :rows] = scores[1:].repeat_interleave(beam, 1)
    lengths = memory.lengths[:rows]
    last = scores.repeat_interleave(beam, 1).gather(0, lengths[None].long())[0]
    memory.totals[:rows] = normalised(last, lengths, options.length_penalty)


def _log_probabilities(
    decoder: Any, x: Tensor, following: Tensor, options: SearchOptions
) -> Tensor:
    """Log-probability, float32 [T], of the token that follows each of the features x [T, C].

    Computed as in ``ops.beam_candidates``, but 0 for a pad.
    """
    size = max(_LOGITS // decoder.output_projection.weight.shape[0], 1)
    logs = []
    for features, labels in zip(x.split(size), following.split(size), strict=True):
        logs.append(_log_probability(decoder.output_layer(features), labels, options))
    return torch.cat(logs)


def _log_probability(logits: Tensor, labels: Tensor, options: SearchOptions) -> Tensor:
    """As `_log_probabilities`, from the logits [T, V]."""
    if options.temperature != 1.0:
        logits = logits.float() / options.temperature
    logs = -ops.cross_entropy_fwd(logits, labels, 0.0, options.pad, False)[1].float()
    logs = logs.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    return logs - options.unk_penalty * (labels == options.unk)


def follow(
    memory: SearchBuffers, slots: int, options: SearchOptions, candidates: tuple[Tensor, Tensor],
    classes: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The candidates [S * beam, W], replaced for sentences whose prompt goes on.

    Then only one hypothesis of a sentence, or all when sampling, has a finite score: it
    continues with the prompt's next token.

    classes: V. It is above W, so that the tokens of a row are all different.
    """
    scores, tokens = (each.unflatten(0, (slots, options.beam)) for each in candidates)
    beam, width = scores.shape[1:]
    sentences = memory.sentences[:slots].clamp_min(0).long()
    step = memory.step
    ends = memory.cu_seqlens[sentences + 1] - memory.cu_seqlens[sentences]
    goes_on = ((step + 1 < ends) & (step < memory.progress[Progress.MAX_LEN]))[:, None, None]
    at = (step + 1).clamp_max(memory.positions - 1)[None]
    token, total = (
        past.index_select(0, at)[0].index_select(0, sentences * beam)[:, None, None]
        for past in (memory.past_tokens, memory.past_scores)
    )
    place = torch.arange(width, dtype=torch.int32, device=tokens.device)
    alive = place == 0
    if not options.sampled:
        alive = alive & (torch.arange(beam, device=tokens.device) == 0)[:, None]
    total = total.expand(scores.shape).masked_fill(~alive, -torch.inf)
    scores = torch.where(goes_on, total, scores)
    tokens = torch.where(goes_on, (token + place) % classes, tokens)
    return scores.flatten(0, 1), tokens.flatten(0, 1)


def keep(memory: SearchBuffers, tokens: Tensor, first: int, beam: int) -> None:
    """Write tokens int64 [B, P] as those of the hypotheses, from position ``first`` on.

    `force` reads them there, and so do repeated n-grams and results. They are in the first row of
    their sentence. A step writes its own position, so it overwrites only tokens that were read.
    """
    sentences, count = tokens.shape
    values = tokens.t().to(memory.device, torch.int32, non_blocking=True)
    memory.past_tokens[first : first + count, : sentences * beam : beam] = values


def force(
    memory: SearchBuffers, options: SearchOptions, logits: Tensor, scores: Tensor,
    candidates: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The candidates [S * beam, W], replaced in sentences with a forced token at this step.

    There each row has one candidate with a finite score: that token.

    logits: [S * beam, V]. scores: float32 [S * beam], sums so far.
    """
    past, found = candidates
    slots = len(logits) // options.beam
    sentences = memory.sentences[:slots].clamp_min(0).long()
    at = (memory.step + 1).clamp_max(memory.positions - 1)[None]
    token = memory.past_tokens.index_select(0, at)[0].index_select(0, sentences * options.beam)
    is_forced = (token != options.pad) & (memory.step < memory.progress[Progress.MAX_LEN])
    # Of a slot without a sentence, and after the last forced token, any number may be there.
    token = token.where(is_forced, options.pad).repeat_interleave(options.beam)[:, None]
    total = scores
    if options.early_stopping is None:
        total = scores + _log_probability(logits, token[:, 0], options)
    place = torch.arange(past.shape[1], dtype=torch.int32, device=past.device)
    alone = total[:, None].expand_as(past).masked_fill(place > 0, -torch.inf)
    goes_on = token != options.pad
    following = (token + place) % logits.shape[1]
    return torch.where(goes_on, alone, past), torch.where(goes_on, following, found)
