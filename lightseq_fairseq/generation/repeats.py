"""Blocks tokens that would repeat an n-gram of their hypothesis (``--no-repeat-ngram-size``).

The tokens of a hypothesis are found on the device, through the ancestry, so a captured step does
this without the host.

Shapes: N = rows, P = positions of the buffers, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq.generation.search_buffers import SearchBuffers


def block(
    memory: SearchBuffers, logits: Tensor, scores: Tensor, size: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Logits [N, V] with -inf for blocked tokens, and the scores [N] that go with them.

    fairseq blocks tokens after the softmax: the probabilities of the others stay as they are, and
    the sum is below 1. The scores are lowered by as much as the softmax of the returned logits
    raises the probabilities.

    size: n, at least 2. The n-grams include the first decoder input.
    Source: ``fairseq.ngram_repeat_block.NGramRepeatBlock``.
    """
    rows, step = len(logits), memory.step.long()
    position = torch.arange(memory.positions, device=logits.device)[:, None]
    # Entries of later positions are leftovers of other batches: their rows may not exist.
    ancestors = memory.ancestry[:, :rows].long().masked_fill(position >= step, 0)
    tokens = memory.past_tokens.gather(1, ancestors)
    tokens = torch.where(position == step, memory.tokens[:rows], tokens)
    last = size - 1
    starts = max(memory.positions - last, 0)  # of n-grams
    repeats = (position[:starts] + last <= step).expand(starts, rows)
    for offset in range(last):
        newest = tokens.index_select(0, (step - (last - 1) + offset).clamp_min(0)[None])
        repeats = repeats & (tokens[offset : offset + starts] == newest)
    blocked = torch.zeros(rows, logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    which = tokens[last : last + starts].long().masked_fill(~repeats, logits.shape[1])
    blocked = blocked.scatter_(1, which.t(), True)[:, :-1]
    kept = logits.masked_fill(blocked, -torch.inf)
    before, after = (
        torch.logsumexp(each.float() / temperature, 1).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        for each in (logits, kept)
    )
    # A row without any possible token gets the score -inf, as a row whose logits are NaN.
    return kept, (scores + (after - before)).nan_to_num(-torch.inf, torch.inf, -torch.inf)
