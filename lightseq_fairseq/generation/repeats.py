"""Blocks tokens that would repeat an n-gram of their hypothesis (``--no-repeat-ngram-size``), and
those that are always blocked.

The tokens of a hypothesis are found on the device, through the ancestry, so a captured step does
this without the host.

Shapes: N = rows, P = positions of the buffers, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search_buffers import SearchBuffers


def block(memory: SearchBuffers, logits: Tensor, scores: Tensor, options: SearchOptions) -> Tensor:
    """Write -inf into the logits [N, V] for blocked tokens; the scores [N] that go with them.

    fairseq blocks tokens after the softmax: the probabilities of the others stay as they are, and
    the sum is below 1. The scores are lowered by as much as the softmax of the new logits raises
    the probabilities, unless the options ask for that. pad, which no search selects, is blocked in
    all rows.

    Source: ``fairseq.ngram_repeat_block.NGramRepeatBlock``.
    """
    size, temperature = options.no_repeat_ngram, options.temperature
    if options.renormalizes and options.min_len:
        last = logits[:, options.eos]
        last.masked_fill_(memory.steps[: len(logits)] < options.min_len, -torch.inf)
    before = None if options.renormalizes else _log_sum(logits, temperature)
    if size:
        logits.scatter_(1, _repeats(memory, len(logits), size, options.pad).t(), -torch.inf)
    for token in options.blocked:
        logits[:, token] = -torch.inf
    if before is None:
        return scores
    after = _log_sum(logits, temperature)
    # A row without any possible token gets the score -inf, as a row whose logits are NaN.
    return (scores + (after - before)).nan_to_num(-torch.inf, torch.inf, -torch.inf)


def _repeats(memory: SearchBuffers, rows: int, size: int, pad: int) -> Tensor:
    """Tokens that would repeat an n-gram, in any order and with pads between them, int64 [P, N].

    size: n, at least 2. The n-grams include the first decoder input.
    """
    step = memory.places[:rows].long()
    position = torch.arange(memory.positions, device=step.device)[:, None]
    # Entries of later positions are leftovers of other searches: their rows may not exist.
    ancestors = memory.ancestry[:, :rows].long().masked_fill(position >= step, 0)
    tokens = memory.past_tokens.gather(1, ancestors)
    tokens = torch.where(position == step, memory.tokens[:rows], tokens)
    last = size - 1
    starts = max(memory.positions - last, 0)  # of n-grams
    repeats = (position[:starts] + last <= step).expand(starts, rows)
    for offset in range(last):
        newest = tokens.gather(0, (step - (last - 1) + offset).clamp_min(0)[None])
        repeats = repeats & (tokens[offset : offset + starts] == newest)
    return tokens[last : last + starts].long().masked_fill(~repeats, pad)


def _log_sum(logits: Tensor, temperature: float) -> Tensor:
    """log(sum(exp(logits / temperature))) of each row, float32 [N]; without temperature, no copy of
    the logits is made, which are large if V is."""
    if temperature != 1.0:
        logits = logits.float() / temperature
    no_labels = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    lse = ops.cross_entropy_fwd(logits, no_labels, 0.0, 0, False)[2]
    return lse.float().nan_to_num(-torch.inf, torch.inf, -torch.inf)
