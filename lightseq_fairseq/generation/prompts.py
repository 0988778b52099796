"""Prompts: the tokens with which a language model's hypotheses begin; forced tokens of others.

`prefill` passes all prompts that begin together through the decoder at once. Each search begins at
the end of its prompt.

* fairseq: a hypothesis consists of the first decoder input (position 0), the prompt, and the tokens
  that were found. Scores include those of the prompt's tokens.
* transformers: prompts are padded on the left, and the pads count as steps. Scores and lengths do
  not include the prompt.

The tokens that translations begin with are few, such as that of a language: `force` replaces the
candidates by them, step by step from the first.

Shapes: N = prompts, T = packed tokens of all of them, L = longest prompt, W = candidates per row,
V = vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.generation.decoder import StepDecoder, bucket
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search_buffers import SearchBuffers, power
from lightseq_fairseq.generation.source import Chunk, SearchBatch, SourcePart
from lightseq_fairseq.ops.beam_advance import normalised

_LOGITS = 1 << 27  # logits that exist at a time


def with_first(
    batches: Sequence[SearchBatch], first: int, options: SearchOptions
) -> list[SearchBatch]:
    """The batches with the first decoder input before their prompts, [B, L - 1] -> [B, L].

    Tokens after an eos become pads. Tokens after the first ``max_len``, the most that a result may
    have, are removed.
    """
    found = []
    for batch in batches:
        tokens = batch.tokens[:, : batch.max_len]
        ends = tokens == options.eos
        tokens = tokens.masked_fill(ends.cumsum(1) - ends.long() > 0, options.pad)
        tokens = torch.cat((tokens.new_full((len(tokens), 1), first), tokens), 1)
        found.append(batch._replace(tokens=tokens))
    return found


def room(longest: int, device: torch.device) -> int:
    """Positions for prompts of up to ``longest`` tokens, see `prefill`."""
    return bucket(longest, device) + 1


def finished(part: SourcePart, eos: int) -> np.ndarray:
    """Which prompts end with an eos, bool [N]: their results are the prompts."""
    return (part.lengths > 1) & (part.tokens[part.boundaries[1:] - 1] == eos)


def prefill(
    steps: StepDecoder, decoder: Any, part: SourcePart, prompts: int, options: SearchOptions,
    table: int, is_scored: bool,
) -> None:  # fmt: skip
    """Write the keys, values and tokens of the prompts in the buffers into their slots, as a
    separate graph; of fairseq's prompts also the scores, and the results of those that have ended.

    prompts: N or more, each with a slot of its own. table: rows of the table of positions.
    is_scored: whether they are fairseq's.
    """
    memory = steps.memory
    count, longest = (bucket(x, memory.device) for x in (len(part.tokens), part.longest))
    key = (*memory.layout, count, prompts, longest, options, is_scored)
    read = functools.partial(_read, steps, decoder, *key[3:])
    scores = steps.launch(("prompts", *key, table), read)
    if not is_scored:
        return
    for prompt in finished(part, options.eos).nonzero()[0].tolist():
        _keep(memory, part, prompt, scores, options)


def _read(
    steps: StepDecoder, decoder: Any, count: int, prompts: int, longest: int,
    options: SearchOptions, is_scored: bool,
) -> Tensor | None:  # fmt: skip
    """Scores of the tokens at each position of each prompt, with those before: float32 [., N]."""
    memory, beam = steps.memory, options.beam
    x = steps.prefill(decoder, count, prompts, longest, beam)
    tokens = memory.source_tokens[:count]
    places, prompt = memory.prompt_places(count, prompts)
    slots = memory.source_slots[:prompts].long()
    rows = slots[prompt] * beam
    memory.past_tokens[places, rows] = tokens
    if not is_scored:
        return None
    # Tokens after the last prompt go to a column of their own, which is dropped.
    missing = torch.arange(count, device=tokens.device) >= memory.boundaries[prompts]
    column, position = prompt.masked_fill(missing, prompts), places.masked_fill(missing, 0)
    padded = tokens.new_full((longest + 1, prompts + 1), options.pad)
    padded[position, column] = tokens
    following = padded[position + 1, column]
    scores = torch.zeros(padded.shape, device=tokens.device)
    scores[position + 1, column] = _log_probabilities(decoder, x, following, options)
    scores = scores.cumsum(0)
    memory.past_scores[places, rows] = scores[position, column]
    last = memory.boundaries[: prompts + 1].long().diff().clamp_min(1) - 1
    totals = scores.gather(0, torch.nn.functional.pad(last, (0, 1))[None])[0, :prompts]
    rows = (slots[:, None] * beam + torch.arange(beam, device=slots.device)).flatten()
    memory.scores[rows] += totals.repeat_interleave(beam)
    return scores


def _keep(
    memory: SearchBuffers, part: SourcePart, prompt: int, scores: Tensor, options: SearchOptions
) -> None:
    """Make a finished prompt the results of its sentence; scores: see `_read`."""
    start, end = part.boundaries[prompt] + 1, part.boundaries[prompt + 1]  # without the first input
    length, first = int(end - start), int(part.numbers[prompt]) * options.beam
    rows = slice(first, first + options.beam)
    tokens = torch.from_numpy(part.tokens[start:end])
    memory.hypothesis_tokens[rows, :length] = tokens.to(memory.device, torch.int32)
    memory.hypothesis_scores[rows, :length] = scores[1 : length + 1, prompt]
    memory.lengths[rows] = length
    lengths = memory.lengths[rows]
    memory.totals[rows] = normalised(scores[length, prompt], lengths, options.length_penalty)


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


def room_for_forced(memory: SearchBuffers, sentences: int, width: int) -> Tensor | None:
    """Room for the forced tokens of sentences of all numbers, int32 [., P]; None without any.

    width: P.
    """
    if width == 0:
        return None
    room = memory.take("forced", power(sentences) * width, torch.int32)
    return room[: len(room) // width * width].view(-1, width)


def keep_forced(
    memory: SearchBuffers, room: Tensor | None, chunks: Sequence[Chunk], pad: int
) -> None:
    """Write the forced tokens of adjacent chunks, then pads, into ``room``."""
    if room is None:
        return
    first, width = chunks[0].first, room.shape[1]
    tokens = np.full((chunks[-1].end - first, width), pad)
    for group, forced in [pair for x in chunks for pair in zip(x.groups, x.forced, strict=True)]:
        if forced is not None:
            its = forced[:, :width].cpu().numpy()
            start = group.first - first
            tokens[start : start + group.size, : its.shape[1]] = its
    room[first : chunks[-1].end] = memory.sent(tokens.ravel()).view(-1, width)


def force(
    memory: SearchBuffers, options: SearchOptions, logits: Tensor, scores: Tensor,
    candidates: tuple[Tensor, Tensor], forced: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The candidates [S * beam, W], replaced in sentences with a forced token at this step.

    There each row has one candidate with a finite score: that token.

    logits: [S * beam, V]. scores: float32 [S * beam], sums so far. forced: int32 [., P], the tokens
    of each sentence, then pads.
    """
    past, found = candidates
    beam, rows = options.beam, len(logits)
    sentences = memory.sentences[: rows // beam].clamp_min(0).long().repeat_interleave(beam)
    step, last = memory.places[:rows].long(), memory.last_steps[:rows]
    token = forced[sentences, step.clamp_max(forced.shape[1] - 1)]
    goes_on = (step < forced.shape[1]) & (step < last)
    token = token.where(goes_on, options.pad)[:, None]
    total = scores
    if options.early_stopping is None:
        total = scores + _log_probability(logits, token[:, 0], options)
    place = torch.arange(past.shape[1], dtype=torch.int32, device=past.device)
    alone = total[:, None].expand_as(past).masked_fill(place > 0, -torch.inf)
    is_forced = token != options.pad
    following = (token + place) % logits.shape[1]
    return torch.where(is_forced, alone, past), torch.where(is_forced, following, found)
