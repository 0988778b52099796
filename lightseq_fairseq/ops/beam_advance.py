"""Advance beam search by one step: merge candidates, store finished hypotheses, keep the best.

Finished hypotheses become the sentence's results (fairseq: SequenceGenerator._generate;
transformers: GenerationMixin._beam_search).
Reordering hypotheses copies no cache, tokens or scores: position p of hypothesis n is stored in row
ancestry[p, n], as in `decode_attention`, and only ancestry is reordered.

Shapes: S = slots, each of which decodes one sentence in `beam` adjacent rows; N = S * beam rows;
W = candidates per row; P = positions and R >= N rows of the buffers that all steps share; H = room
for results, `beam` for each sentence.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .beam_search import check_slots
from .checks import check_tensor
from .registry import Written, define


class Progress(IntEnum):
    """Indices into the progress of a search, int32 [len(Progress)] on the device."""

    COUNT = 0  # steps since the search began
    SCRATCH = 1  # scratch space of a kernel, zero between launches


class Stopping(IntEnum):
    """When a sentence has ended, besides at its last step, and which hypotheses are its results.

    FIRST is fairseq's rule. The others are those of transformers: a sentence's results are the
    `beam` best of all that finished, and at the last step eos counts as 0 in a score.
    """

    FIRST = 0  # `beam` hypotheses have finished; the first ones are the results
    FULL = 1  # `beam` hypotheses have finished
    CURRENT = 2  # and the best running score, as the total of a result of this length, is no better
    LONGEST = 3  # the same, as the total of a result of the greatest length


class BeamAdvance(NamedTuple):
    """Choose each sentence's next hypotheses, store finished ones, count the step and report it.

    candidate_scores float32, candidate_tokens int32 [N, W]: from `beam_candidates` (W = 2 * beam)
    or from `beam_sample` (W = 1: each row continues with its own token).
    last_steps int32 [N]: the step at which the hypotheses of the slot must end.
    groups: must divide beam; above 1, diverse beam search (Vijayakumar et al. 2018), see `_merge`.
    The op writes progress (see `Progress`) and the following tensors.
    sentences int32 [S]: sentence of each slot. Set to -1 when the sentence has ended (`stopping`, a
    `Stopping`). Slots with a negative number are skipped.
    steps, places int32 [N]: the step, and the position of the newest tokens in the buffers, from 0;
    the same in all rows of a slot. They stay where they are when the sentence has ended.
    tokens int32, scores float32 [N]: newest token and score of each row; the score is -inf in rows
    that decode nothing.
    ancestry, past_tokens int32, past_scores float32 [P, R]: ancestry as above; tokens and scores
    of earlier steps.
    Results of sentence b are the rows b * beam + i of hypothesis_tokens int32 and
    hypothesis_scores float32 [H, P] (cumulative score at each token, eos last), lengths int32 [H]
    (tokens with eos; 0: no result yet) and totals float32 [H]: score / (step + 1 - prompt) **
    length_penalty.
    reports int32 [1 + S or more], on the CPU, in pinned memory if the rest is on a GPU: the first
    is set to the number of steps, COUNT, and that of a slot whose sentence has ended (after the
    first one) to the same number. When the host sees the number of a step, the results of this
    step are complete: another stream may read them at once.
    An eos counts only among the first `beam` candidates.
    """

    candidate_scores: Tensor
    candidate_tokens: Tensor
    last_steps: Tensor
    progress: Written
    sentences: Written
    steps: Written
    places: Written
    tokens: Written
    scores: Written
    ancestry: Written
    past_tokens: Written
    past_scores: Written
    hypothesis_tokens: Written
    hypothesis_scores: Written
    lengths: Written
    totals: Written
    reports: Written
    beam: int
    groups: int
    diversity: float
    eos: int
    length_penalty: float
    stopping: int
    prompt: int = 0

    def check(self, op: str) -> None:
        like, integer, real = self.candidate_scores, (torch.int32,), (torch.float32,)
        check_tensor(op, "candidate_scores", like, ("N", "W"), real)
        rows, width = like.shape
        beam, groups, ancestry = self.beam, self.groups, self.ancestry
        check_tensor(op, "candidate_tokens", self.candidate_tokens, (rows, width), integer, like)
        check_tensor(op, "progress", self.progress, (len(Progress),), integer, like)
        for name, each in (
            ("last_steps", self.last_steps), ("steps", self.steps), ("places", self.places),
            ("tokens", self.tokens),
        ):  # fmt: skip
            check_tensor(op, name, each, (rows,), integer, like)
        check_tensor(op, "scores", self.scores, (rows,), real, like)
        check_slots(op, self.sentences, beam, self.scores)
        if width not in (1, 2 * beam):
            raise ValueError(f"{op}: W must be 1 or twice the beam, {2 * beam}, got {width}")
        if groups < 1 or beam % groups:
            raise ValueError(f"{op}: {groups} groups do not divide a beam of {beam}")
        if self.stopping not in [*Stopping]:
            raise ValueError(f"{op}: stopping must be in 0 ... 3, got {self.stopping}")
        if self.stopping and (groups > 1 or width == 1):
            raise ValueError(f"{op}: groups and sampling need stopping = 0, got {self.stopping}")
        check_tensor(op, "ancestry", ancestry, ("P", "R"), integer, like)
        check_tensor(op, "past_tokens", self.past_tokens, ancestry.shape, integer, like)
        check_tensor(op, "past_scores", self.past_scores, ancestry.shape, real, like)
        check_tensor(op, "lengths", self.lengths, ("H",), integer, like)
        room = self.lengths.shape
        check_tensor(op, "totals", self.totals, room, real, like)
        shape = (*room, ancestry.shape[0])
        check_tensor(op, "hypothesis_tokens", self.hypothesis_tokens, shape, integer, like)
        check_tensor(op, "hypothesis_scores", self.hypothesis_scores, shape, real, like)
        check_tensor(op, "reports", self.reports, ("1 + S",), integer)
        if len(self.reports) <= len(self.sentences):
            raise ValueError(
                f"{op}: reports must have more than {len(self.sentences)} numbers, got "
                f"{len(self.reports)}"
            )
        if self.reports.device.type != "cpu":
            raise ValueError(f"{op}: reports must be on the CPU, is on {self.reports.device}")
        if rows > ancestry.shape[1]:
            raise ValueError(f"{op}: {rows} hypotheses do not fit into {ancestry.shape[1]} rows")

    def reference(self) -> None:
        progress, beam, lengths, ancestry = self.progress, self.beam, self.lengths, self.ancestry
        count = int(progress[Progress.COUNT]) + 1
        slots = (self.sentences >= 0).nonzero()[:, 0]
        places = torch.arange(beam, device=slots.device)
        rows = slots[:, None] * beam + places
        step, last_step, now = (
            x[slots * beam].long() for x in (self.steps, self.last_steps, self.places)
        )
        self.past_tokens[now[:, None], rows] = self.tokens[rows]
        self.past_scores[now[:, None], rows] = self.scores[rows]
        merged = _merge(_with_free_ends(self) if self.stopping else self)
        best, words, parents = (x[slots] for x in merged)
        parents = slots[:, None] * beam + parents

        # Store finished hypotheses as results.
        first = self.sentences[slots].long()[:, None] * beam
        ends = (words == self.eos) & (best > -torch.inf)
        counting = ends & (torch.arange(best.shape[1], device=best.device) < beam)
        kept, result = _placed(self, counting, best, first + places, step)
        which = kept.nonzero()[:, 0]
        if len(which):
            mine = (first + result)[kept]
            _store(self, mine, parents[kept], now[which], best[kept])
            lengths[mine] = now[which].int() + 1
            counted = step[which] + 1 - self.prompt
            self.totals[mine] = normalised(best[kept], counted, self.length_penalty)

        # Continue with the best unfinished candidates. With sampling a finished row stays, with
        # score -inf.
        order = ends.int().argsort(dim=1, stable=True)[:, :beam]
        parents = parents.gather(1, order)
        self.tokens[rows] = words.gather(1, order)
        self.scores[rows] = best.masked_fill(ends, -torch.inf).gather(1, order)
        longest = int(now.max()) if len(now) else 0
        past = torch.arange(longest, device=slots.device)[:, None, None]
        inherited = torch.where(
            past < now[:, None], ancestry[:longest, parents], ancestry[:longest, rows]
        )
        ancestry[:longest, rows] = inherited
        ancestry[now[:, None], rows] = parents.int()

        finished = (lengths[first + places] > 0).all(1)
        if self.stopping > Stopping.FULL:
            length = (last_step if self.stopping == Stopping.LONGEST else step) + 1
            length = length - self.prompt
            running = normalised(self.scores[rows[:, 0]], length, self.length_penalty)
            finished &= ~(running > self.totals[first + places].amin(1))
        finished |= step >= last_step
        self.steps[rows[~finished]] += 1
        self.places[rows[~finished]] += 1
        self.sentences[slots[finished]] = -1
        self.scores[rows[finished]] = -torch.inf
        progress[Progress.COUNT] = count
        self.reports[1 + slots[finished].cpu()] = count
        self.reports[0] = count


beam_advance = define("beam_advance", BeamAdvance)


def _store(a: BeamAdvance, results: Tensor, ending: Tensor, last: Tensor, scores: Tensor) -> None:
    """Write the tokens and scores of results, int64 [K].

    They are those of the hypotheses in rows ``ending``, whose newest token is at ``last``, and then
    eos with ``scores``; each [K].

    Position p of a result is the token of position p + 1 of the hypothesis.
    """
    place = torch.arange(int(last.max()) + 1, device=last.device)
    here = place <= last[:, None]
    next_one = torch.minimum(place + 1, last[:, None])
    row = torch.where(
        next_one < last[:, None], a.ancestry[next_one, ending[:, None]].long(), ending[:, None]
    )
    to = results[:, None].expand(here.shape)[here], place.expand(here.shape)[here]
    a.hypothesis_tokens[to] = a.past_tokens[next_one, row][here]
    a.hypothesis_scores[to] = a.past_scores[next_one, row][here]
    a.hypothesis_tokens[results, last] = a.eos
    a.hypothesis_scores[results, last] = scores


def normalised(scores: Tensor, lengths: Tensor, length_penalty: float) -> Tensor:
    """The totals by which results of these lengths are compared, float32."""
    return scores / lengths.double().pow(length_penalty).float()


def _with_free_ends(a: BeamAdvance) -> BeamAdvance:
    """The candidates, where at the last step an eos adds nothing to its hypothesis' score."""
    ends = (a.candidate_tokens == a.eos) & (a.candidate_scores > -torch.inf)
    ends = ends & (a.steps >= a.last_steps)[:, None]
    return a._replace(candidate_scores=torch.where(ends, a.scores[:, None], a.candidate_scores))


def _placed(
    a: BeamAdvance, counting: Tensor, best: Tensor, columns: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """Which candidates become results, bool, and as which of their sentence, both like `best`.

    counting: which may. best: scores [S, 2 * beam]. columns: of the sentences' results [S, beam].
    step: int64 [S].
    """
    is_result = a.lengths[columns] > 0
    if a.stopping == Stopping.FIRST:
        result = counting.cumsum(1) - 1 + is_result.sum(1, keepdim=True)
        return counting & (result < a.beam), result
    kept, result = counting.clone(), torch.zeros_like(counting, dtype=torch.int64)
    totals = a.totals[columns].masked_fill(~is_result, -torch.inf)
    new = normalised(best, step[:, None] + 1 - a.prompt, a.length_penalty)
    for i in range(a.beam):  # the best first; each replaces the worst result if it is better
        worst = totals.amin(1)
        place = (totals == worst[:, None]).int().argmax(1, keepdim=True)
        kept[:, i] &= new[:, i] > worst
        result[:, i] = place[:, 0]
        totals.scatter_(1, place, torch.where(kept[:, i], new[:, i], worst)[:, None])
    return kept, result


def _merge(a: BeamAdvance) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the candidates of each slot: scores, tokens, and the parent's row within the slot.

    All [S, 2 * beam], or [S, beam] with sampling. Of G groups, group g owns the rows g, g + G, ...
    of a slot. It takes the 2 * beam / G best of its own candidates, after subtracting `diversity`
    for each time an earlier group has picked the same token. The result interleaves the groups.
    Source: fairseq.search.BeamSearch and DiverseBeamSearch.
    """
    width, groups = a.candidate_scores.shape[1], a.groups
    scores, tokens = (x.view(-1, a.beam, width) for x in (a.candidate_scores, a.candidate_tokens))
    parents = torch.arange(a.beam, device=scores.device)[:, None].expand(scores.shape)
    if width == 1:
        return scores[..., 0], tokens[..., 0], parents[..., 0]
    picks: list[tuple[Tensor, Tensor, Tensor]] = []
    for group in range(groups):
        mine = [x[:, group::groups].flatten(1) for x in (scores, tokens, parents)]
        if picks:
            picked = torch.cat([words for _, words, _ in picks], 1)
            mine[0] = mine[0] - a.diversity * (mine[1][..., None] == picked[:, None]).sum(-1)
        # Ties: the lowest row first, then the lowest token.
        index = ((mine[2] << 32) + mine[1]).argsort(dim=1)
        ranks = mine[0].gather(1, index).argsort(dim=1, descending=True, stable=True)
        index = index.gather(1, ranks[:, : width // groups])
        picks.append((mine[0].gather(1, index), mine[1].gather(1, index), mine[2].gather(1, index)))
    merged = [torch.stack(parts, 2).flatten(1) for parts in zip(*picks, strict=True)]
    return merged[0], merged[1], merged[2]
