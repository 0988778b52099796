"""Next tokens of each hypothesis: the best ones (beam search), or one random token (sampling).

l = log_softmax(logits / temperature), in float32, then fairseq's rules for pad, eos and unk.
Beam search takes the best of score + l; sampling draws one token with probability exp(l).
`beam_advance` continues from there. All values that change between steps are read on the device,
so that one captured graph is replayed for all steps.

Shapes: S = slots, each of which decodes one sentence in `beam` adjacent rows; N = S * beam rows;
V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_rows, check_tensor
from .philox import uniforms
from .registry import define

_RESULTS = "candidate_scores candidate_tokens"


class BeamCandidates(NamedTuple):
    """The best next tokens of each row: (scores float32 [N, count], tokens int32 [N, count]).

    logits: [N, V], of the next token. scores: float32 [N], sums of log-probabilities so far.
    steps, last_steps: int32 [N], the position of the row's newest token, from 0, and the step at
    which it must end. count: candidates per row, below V.
    The logits are divided by temperature first. Then pad is excluded, eos is excluded from step
    min_len_from until step min_len and is the only token from the last step on, and unk_penalty is
    subtracted from the log-probability of unk.
    Candidates are sorted, best first; ties: the lowest token first. A NaN counts as -inf.
    Source: fairseq.search.BeamSearch.step, and SequenceGenerator before it.
    """

    logits: Tensor
    scores: Tensor
    steps: Tensor
    last_steps: Tensor
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    pad: int
    eos: int
    unk: int
    min_len: int
    min_len_from: int
    unk_penalty: float
    temperature: float

    def check(self, op: str) -> None:
        logits, count = self.logits, self.count
        _check_logits(op, self)
        if not 1 <= count < logits.shape[1]:
            raise ValueError(f"{op}: count must be at least 1 and below V, got {count}")

    def shape(self) -> tuple[Tensor, Tensor]:
        return _empty(self.logits, self.count)

    def reference(self) -> tuple[Tensor, Tensor]:
        count = self.count
        totals = _log_probabilities(self).add_(self.scores[:, None])
        best, tokens = totals.topk(count + 1)
        tied, tokens = (best[:, count - 1] == best[:, count]).nonzero()[:, 0], tokens[:, :count]
        if len(tied):  # topk breaks ties arbitrarily: among equals of the last, keep the lowest
            last = best[tied, count - 1 : count]
            better, equal = totals[tied] > last, totals[tied] == last
            room = count - better.sum(1, keepdim=True)
            chosen = better | (equal & (equal.cumsum(1) <= room))
            tokens[tied] = chosen.nonzero()[:, 1].view(-1, count)
        tokens = tokens.sort(1).values
        best, order = totals.gather(1, tokens).sort(dim=1, descending=True, stable=True)
        return best, tokens.gather(1, order).int()


beam_candidates = define("beam_candidates", BeamCandidates, _RESULTS)


class BeamSample(NamedTuple):
    """One random next token of each row: (scores float32 [N, 1], tokens int32 [N, 1]).

    sentences: int32 [S], the sentence that each slot decodes. rng: int64 [2], see `philox`. A draw
    is a function of rng, the sentence, the row's index in the slot and the step.
    topp > 0: sample from the fewest best tokens whose probabilities sum to at least topp;
    otherwise topk > 0: from the topk best; otherwise from all. The best token has the largest
    logit under the rules of `beam_candidates`; ties: the lowest token first. (torch.topk, which
    fairseq uses, keeps as many, but leaves open which of tied tokens.) Scores are not renormalised.
    A row without any possible token, or whose score is -inf, gives eos with score -inf. Other
    arguments as in `beam_candidates`.
    Source: fairseq.search.Sampling; Holtzman et al. 2020 (topp). The random numbers differ from
    fairseq's.
    """

    logits: Tensor
    scores: Tensor
    sentences: Tensor
    steps: Tensor
    last_steps: Tensor
    rng: Tensor
    beam: int
    topk: int
    topp: float
    pad: int
    eos: int
    unk: int
    min_len: int
    min_len_from: int
    unk_penalty: float
    temperature: float

    def check(self, op: str) -> None:
        _check_logits(op, self)
        check_slots(op, self.sentences, self.beam, self.scores)
        check_tensor(op, "rng", self.rng, (2,), (torch.int64,), self.logits)

    def shape(self) -> tuple[Tensor, Tensor]:
        return _empty(self.logits, 1)

    def reference(self) -> tuple[Tensor, Tensor]:
        logits, scores, sentences, steps, _, rng, beam, topk, topp = self[:9]
        logs = _log_probabilities(self)
        weights = logs.exp()
        if topp > 0 or topk > 0:
            # By the logits, because different ones may have equal probabilities after rounding.
            # Adding 0 makes a copy, without negative zeros.
            penalty = torch.tensor((self.unk_penalty, self.temperature), dtype=torch.float32).prod()
            best = _apply_rules(self, logits.float() + 0.0, penalty)
            order = best.argsort(dim=1, descending=True, stable=True)
            falling = weights.gather(1, order)
            # As in fairseq, the token with which the sum reaches topp is included.
            last = (falling.cumsum(1) < topp).sum(1) if topp > 0 else topk - 1
            rank = torch.arange(weights.shape[1], device=weights.device).expand_as(weights)
            last = torch.as_tensor(last, device=rank.device).view(-1, 1)
            falling = falling.masked_fill(rank > last, 0)
            weights = torch.zeros_like(weights).scatter_(1, order, falling)
        sums = weights.double().cumsum(1)
        place = torch.arange(beam, device=sentences.device)
        hypotheses = (sentences.long()[:, None] * beam + place).flatten()
        targets = uniforms(rng, 0, hypotheses, steps) * sums[:, -1]
        tokens = torch.searchsorted(sums, targets[:, None], right=True)
        nothing = ((sums[:, -1] <= 0) | scores.isneginf())[:, None]
        tokens = tokens.clamp_(max=logits.shape[1] - 1).masked_fill_(nothing, self.eos)
        drawn = logs.gather(1, tokens).add_(scores[:, None]).masked_fill_(nothing, -torch.inf)
        return drawn, tokens.int()


beam_sample = define("beam_sample", BeamSample, _RESULTS)


def _log_probabilities(a: BeamCandidates | BeamSample) -> Tensor:
    """Log-probabilities float32 [N, V]; fairseq's token rules are applied after the softmax."""
    logs = torch.log_softmax(a.logits.float() / a.temperature, dim=1)
    return _apply_rules(a, logs.nan_to_num_(-torch.inf, torch.inf, -torch.inf), a.unk_penalty)


def _apply_rules(a: BeamCandidates | BeamSample, x: Tensor, unk_penalty: float | Tensor) -> Tensor:
    """Apply fairseq's token rules to x [N, V] in place, and return it."""
    steps = a.steps[:, None]
    x[:, a.pad] = -torch.inf
    x[:, a.unk] -= unk_penalty
    ends = steps >= a.last_steps[:, None]
    x[:, : a.eos].masked_fill_(ends, -torch.inf)
    x[:, a.eos + 1 :].masked_fill_(ends, -torch.inf)
    early = (steps < a.min_len) & (steps >= a.min_len_from)
    x[:, a.eos : a.eos + 1].masked_fill_(early, -torch.inf)
    return x


def check_slots(op: str, sentences: Tensor, beam: int, scores: Tensor) -> None:
    """Raise ValueError unless sentences is int32 [S] and scores has S * beam rows."""
    check_tensor(op, "sentences", sentences, ("S",), (torch.int32,), scores)
    if beam < 1 or len(sentences) * beam != len(scores):
        raise ValueError(
            f"{op}: {len(sentences)} slots of beam {beam} are not the {len(scores)} rows of scores"
        )


def _check_logits(op: str, a: BeamCandidates | BeamSample) -> None:
    logits = a.logits
    check_rows(op, "logits", logits, ("N", "V"), FLOATS)
    rows = logits.shape[:1]
    check_tensor(op, "scores", a.scores, rows, (torch.float32,), logits)
    check_tensor(op, "steps", a.steps, rows, (torch.int32,), logits)
    check_tensor(op, "last_steps", a.last_steps, rows, (torch.int32,), logits)


def _empty(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], count)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
