"""The last step of a search that does not force eos: hypotheses of the greatest length are results.

As in `generate` of transformers without ``forced_eos_token_id``.

Shapes: S = slots, W = candidates per row, P = positions, R = rows and H = results of the buffers,
K = S * beam.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search_buffers import SearchBuffers
from lightseq_fairseq.ops.beam_advance import Progress, normalised


def end_all(
    memory: SearchBuffers, slots: int, options: SearchOptions, candidates: tuple[Tensor, Tensor],
    prompt: int, reports: Tensor,
) -> None:  # fmt: skip
    """Let the ``beam`` best candidates of each sentence, whatever their token, compete with its
    results so far.

    It takes the place of the last step's ``ops.beam_advance``. All sentences are at this step.

    candidates: float32 scores and int32 tokens, [K, W]. prompt, reports: see
    ``ops.beam_advance``.
    """
    beam, step = options.beam, memory.steps[: slots * options.beam].max().long()
    scores, tokens = (x.view(slots, -1) for x in candidates)
    first = torch.arange(slots, device=step.device)[:, None] * beam
    best, order = (x[:, :beam] for x in scores.sort(dim=1, descending=True, stable=True))
    parents = first + order // candidates[0].shape[1]
    words = tokens.gather(1, order)

    # The best of the results so far, then of the new ones.
    place = torch.arange(beam, device=step.device)
    columns = memory.sentences[:slots].clamp_min(0).long()[:, None] * beam + place
    lengths = memory.lengths[columns]
    old = memory.totals[columns].masked_fill(lengths == 0, -torch.inf)
    new = normalised(best, step + 1 - prompt, options.length_penalty)
    totals, order = torch.cat((old, new), 1).sort(dim=1, descending=True, stable=True)
    totals, order = totals[:, :beam], order[:, :beam]
    is_new, kept = order >= beam, order.clamp_max(beam - 1)
    which = (order - beam).clamp_min(0)
    lengths = torch.where(is_new, memory.places[first] + 1, lengths.gather(1, kept))
    lengths = lengths.masked_fill(totals == -torch.inf, 0).int()

    parent, is_new, source = (
        x.flatten() for x in (parents.gather(1, which), is_new, columns.gather(1, kept))
    )
    newest = words.gather(1, which).flatten(), best.gather(1, which).flatten()
    position = torch.arange(memory.positions, device=step.device)[:, None]
    at = memory.places[parent]
    lineage = torch.where(position < at, memory.ancestry[:, parent].long(), parent)
    has_none = memory.sentences[:slots, None] < 0
    target = columns.masked_fill(has_none, len(memory.lengths)).flatten()

    def write(results: Tensor, past: Tensor, now: Tensor, last: Tensor) -> None:
        past = torch.where(position == memory.places, now, past).gather(1, lineage)
        # Position p of a result is that of position p + 1 of the hypothesis.
        mine = torch.where(position == at, last, past.roll(-1, 0)).t()
        _put(results, target, torch.where(is_new[:, None], mine, results[source]))

    write(memory.hypothesis_tokens, memory.past_tokens, memory.tokens, newest[0])
    write(memory.hypothesis_scores, memory.past_scores, memory.scores, newest[1])
    _put(memory.lengths, target, lengths.flatten())
    _put(memory.totals, target, totals.flatten())
    memory.sentences[:slots] = -1
    memory.progress[Progress.COUNT] += 1
    reports[:1].copy_(memory.progress[Progress.COUNT, None], non_blocking=True)


def _put(to: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values [K, ...] into rows of [H, ...], int64 [K]; those of number H are dropped."""
    more = torch.cat((to, to[:1]))
    more[rows] = values
    to.copy_(more[:-1])
