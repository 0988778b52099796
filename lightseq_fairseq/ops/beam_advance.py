"""What becomes of a sentence's hypotheses: candidates are merged, some end, the best go on.

Those that end are kept as the sentence's results (fairseq: SequenceGenerator._generate). Nothing is
copied when hypotheses are reordered: what stands at position p of hypothesis n lies in row
ancestry[p, n], as in `decode_attention`; only the ancestry moves.

S slots, each decoding one sentence with `beam` neighbouring rows; N = S * beam rows; W candidates
a row; P positions and R >= N rows of the memory that all steps share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .beam_search import Progress, check_slots
from .checks import check_tensor
from .registry import register


def beam_advance(
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    progress: Tensor,
    sentences: Tensor,
    tokens: Tensor,
    scores: Tensor,
    ancestry: Tensor,
    past_tokens: Tensor,
    past_scores: Tensor,
    hypothesis_tokens: Tensor,
    hypothesis_scores: Tensor,
    lengths: Tensor,
    totals: Tensor,
    reports: Tensor,
    beam: int,
    groups: int,
    diversity: float,
    eos: int,
    length_penalty: float,
) -> None:
    """Choose each sentence's next hypotheses, keep those that end, count and report the step.

    candidate_scores float32, candidate_tokens int32 [N, W]: of `beam_candidates` with W = 2 * beam,
    or of `beam_sample`, W = 1: then each row goes on with its own.
    groups > 1: diverse beam search (Vijayakumar et al. 2018), see `_merge`; divides beam.
    All that follows is written. sentences int32 [S]: becomes -1 when the sentence has beam results
    or the step is MAX_LEN; a negative one is left alone. tokens int32, scores float32 [N]: newest
    token and score of each row; -inf in rows that decode nothing. ancestry, past_tokens int32,
    past_scores float32 [P, R]: see above; tokens and scores of earlier steps.
    Results of sentence b are the columns b * beam + i of hypothesis_tokens int32 and
    hypothesis_scores float32 [P, R] (sum up to each token, eos last), lengths int32 [R] (tokens
    with eos; 0: none yet) and totals float32 [R]: score / length ** length_penalty.
    reports int32 [2, 2], contiguous, on the CPU, in pinned memory where the rest is on a GPU: when
    n steps are done, row n % 2 becomes (n, UNFINISHED), both at once. Whoever sees that, the host
    for one, may have the results read, however long the stream is busy with other things.
    An end counts only among the first `beam` candidates, and only until there are beam results.
    Raises ValueError on a wrong shape, dtype, device or layout.
    """
    op = "beam_advance"
    check_tensor(op, "candidate_scores", candidate_scores, ("N", "W"), (torch.float32,))
    rows, width = candidate_scores.shape
    like, integer, real = candidate_scores, (torch.int32,), (torch.float32,)
    check_tensor(op, "candidate_tokens", candidate_tokens, (rows, width), integer, like)
    check_tensor(op, "progress", progress, (len(Progress),), integer, like)
    check_tensor(op, "tokens", tokens, (rows,), integer, like)
    check_tensor(op, "scores", scores, (rows,), real, like)
    check_slots(op, sentences, beam, scores)
    if width not in (1, 2 * beam):
        raise ValueError(f"{op}: W must be 1 or twice the beam, {2 * beam}, got {width}")
    if groups < 1 or beam % groups:
        raise ValueError(f"{op}: {groups} groups do not divide a beam of {beam}")
    check_tensor(op, "ancestry", ancestry, ("P", "R"), integer, like)
    memory = {"past_tokens": past_tokens, "hypothesis_tokens": hypothesis_tokens}
    for name, x in memory.items():
        check_tensor(op, name, x, ancestry.shape, integer, like)
    for name, x in {"past_scores": past_scores, "hypothesis_scores": hypothesis_scores}.items():
        check_tensor(op, name, x, ancestry.shape, real, like)
    check_tensor(op, "lengths", lengths, ancestry.shape[1:], integer, like)
    check_tensor(op, "totals", totals, ancestry.shape[1:], real, like)
    check_tensor(op, "reports", reports, (2, 2), integer)
    if reports.device.type != "cpu":
        raise ValueError(f"{op}: reports must be on the CPU, is on {reports.device}")
    if rows > ancestry.shape[1]:
        raise ValueError(f"{op}: {rows} hypotheses do not fit into {ancestry.shape[1]} rows")
    _ADVANCE(
        *(candidate_scores, candidate_tokens, progress, sentences, tokens, scores, ancestry),
        *(past_tokens, past_scores, hypothesis_tokens, hypothesis_scores, lengths, totals),
        *(reports, beam, groups, diversity, eos, length_penalty),
    )


def beam_advance_reference(
    candidate_scores: Tensor,
    candidate_tokens: Tensor,
    progress: Tensor,
    sentences: Tensor,
    tokens: Tensor,
    scores: Tensor,
    ancestry: Tensor,
    past_tokens: Tensor,
    past_scores: Tensor,
    hypothesis_tokens: Tensor,
    hypothesis_scores: Tensor,
    lengths: Tensor,
    totals: Tensor,
    reports: Tensor,
    beam: int,
    groups: int,
    diversity: float,
    eos: int,
    length_penalty: float,
) -> None:
    """Reference of lightseq::beam_advance."""
    step, max_len = int(progress[Progress.STEP]), int(progress[Progress.MAX_LEN])
    slots = (sentences >= 0).nonzero()[:, 0]
    places = torch.arange(beam, device=sentences.device)
    rows = slots[:, None] * beam + places
    past_tokens[step, rows], past_scores[step, rows] = tokens[rows], scores[rows]
    best, words, parents = (
        x[slots] for x in _merge(candidate_scores, candidate_tokens, beam, groups, diversity)
    )
    parents = slots[:, None] * beam + parents

    # Those that end, as columns of the results.
    first = sentences[slots].long()[:, None] * beam
    ends = (words == eos) & (best > -torch.inf)
    counting = ends & (torch.arange(best.shape[1], device=best.device) < beam)
    result = counting.cumsum(1) - 1 + (lengths[first + places] > 0).sum(1, keepdim=True)
    kept = counting & (result < beam)
    columns, ending = (first + result)[kept], parents[kept]
    lineage = torch.cat((ancestry[1:step, ending], ending[None].int())).long()
    if step:
        positions = torch.arange(1, step + 1, device=lineage.device)[:, None]
        hypothesis_tokens[:step, columns] = past_tokens[positions, lineage]
        hypothesis_scores[:step, columns] = past_scores[positions, lineage]
    hypothesis_tokens[step, columns], hypothesis_scores[step, columns] = eos, best[kept]
    lengths[columns] = step + 1
    totals[columns] = best[kept] / (step + 1) ** length_penalty

    # Those that go on: the best that do not end; sampled rows that have ended stay, as dead ones.
    order = ends.int().argsort(dim=1, stable=True)[:, :beam]
    parents = parents.gather(1, order)
    tokens[rows] = words.gather(1, order)
    scores[rows] = best.masked_fill(ends, -torch.inf).gather(1, order)
    ancestry[:step, rows] = ancestry[:step, parents]
    ancestry[step, rows] = parents.int()

    finished = (lengths[first + places] > 0).all(1) | (step >= max_len)
    sentences[slots[finished]] = -1
    scores[rows[finished]] = -torch.inf
    progress[Progress.UNFINISHED] -= finished.sum()
    progress[Progress.STEP] += 1
    unfinished = int(progress[Progress.UNFINISHED])
    reports[(step + 1) % 2] = torch.tensor((step + 1, unfinished), dtype=torch.int32)


def _merge(
    candidate_scores: Tensor, candidate_tokens: Tensor, beam: int, groups: int, diversity: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates of each sentence in order: scores, tokens, place of the parent in the slot.

    All [S, 2 * beam], or [S, beam] where they were drawn. Group g of G owns the places g, g + G,
    ...; it takes the 2 * beam / G best of its own, after `diversity` has been taken off for each
    time that a group before it has picked the same token; the groups then take turns.
    Source: fairseq.search.BeamSearch and DiverseBeamSearch.
    """
    width = candidate_scores.shape[1]
    scores, tokens = (x.view(-1, beam, width) for x in (candidate_scores, candidate_tokens))
    parents = torch.arange(beam, device=scores.device)[:, None].expand(scores.shape)
    if width == 1:
        return scores[..., 0], tokens[..., 0], parents[..., 0]
    picks: list[tuple[Tensor, Tensor, Tensor]] = []
    for group in range(groups):
        mine = [x[:, group::groups].flatten(1) for x in (scores, tokens, parents)]
        if picks:
            picked = torch.cat([words for _, words, _ in picks], 1)
            mine[0] = mine[0] - diversity * (mine[1][..., None] == picked[:, None]).sum(-1)
        # Among equals the lowest place, then the lowest token.
        index = ((mine[2] << 32) + mine[1]).argsort(dim=1)
        ranks = mine[0].gather(1, index).argsort(dim=1, descending=True, stable=True)
        index = index.gather(1, ranks[:, : width // groups])
        picks.append((mine[0].gather(1, index), mine[1].gather(1, index), mine[2].gather(1, index)))
    merged = [torch.stack(parts, 2).flatten(1) for parts in zip(*picks, strict=True)]
    return merged[0], merged[1], merged[2]


def _advance_fake(*arguments: object) -> None:
    return None


_ADVANCE = register(
    "beam_advance(Tensor candidate_scores, Tensor candidate_tokens, Tensor(a!) progress,"
    " Tensor(b!) sentences, Tensor(c!) tokens, Tensor(d!) scores, Tensor(e!) ancestry,"
    " Tensor(f!) past_tokens, Tensor(g!) past_scores, Tensor(h!) hypothesis_tokens,"
    " Tensor(i!) hypothesis_scores, Tensor(j!) lengths, Tensor(k!) totals, Tensor(l!) reports,"
    " int beam, int groups, float diversity, int eos, float length_penalty) -> ()",
    beam_advance_reference,
    _advance_fake,
)
