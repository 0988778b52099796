"""The merge of beam search compared with the rules of fairseq and of transformers, one hypothesis
at a time in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from lightseq_fairseq import fairseq_compat, ops

fairseq_compat.prepare()

from fairseq.search import DiverseBeamSearch  # noqa: E402

EOS, V, P, MAX_LEN = 2, 12, 9, 7
NAMES = (
    "last_steps", "progress", "sentences", "steps", "places", "tokens", "scores", "ancestry",
    "past_tokens", "past_scores", "hypothesis_tokens", "hypothesis_scores", "lengths", "totals",
    "reports",
)  # fmt: skip


def state(sentences: list[int], beam: int, rows: int, groups: int = 1) -> dict[str, Tensor]:
    """The initial state of a search; everything that must be written before it is read has invalid
    values."""
    count = len(sentences) * beam
    scores = torch.full((count,), -torch.inf)
    scores.view(-1, beam)[:, :groups] = 0.0
    return {
        "last_steps": torch.full((count,), MAX_LEN, dtype=torch.int32),
        "progress": torch.zeros(2, dtype=torch.int32),
        "sentences": torch.tensor(sentences, dtype=torch.int32),
        "steps": torch.zeros(count, dtype=torch.int32),
        "places": torch.zeros(count, dtype=torch.int32),
        "tokens": torch.full((count,), EOS, dtype=torch.int32),
        "scores": scores,
        "ancestry": torch.full((P, rows), -7, dtype=torch.int32),
        "past_tokens": torch.full((P, rows), -7, dtype=torch.int32),
        "past_scores": torch.full((P, rows), torch.nan),
        "hypothesis_tokens": torch.full((rows, P), -7, dtype=torch.int32),
        "hypothesis_scores": torch.full((rows, P), torch.nan),
        "lengths": torch.zeros(rows, dtype=torch.int32),
        "totals": torch.full((rows,), torch.nan),
        "reports": torch.zeros(len(sentences) + 1, dtype=torch.int32),
    }


def advance(found: tuple[Tensor, Tensor], tensors: dict[str, Tensor], *options: Any) -> None:
    ops.beam_advance(*found, *(tensors[name] for name in NAMES), *options)


@dataclass
class Hypothesis:
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def then(self, token: int, score: float) -> Hypothesis:
        return Hypothesis([*self.tokens, token], [*self.scores, score])


@dataclass
class Sentence:
    """fairseq's SequenceGenerator for one sentence, on Python lists."""

    beam: int
    alive: list[Hypothesis]
    results: list[Hypothesis] = field(default_factory=list)
    is_finished: bool = False

    def advance(self, candidates: list[tuple[float, int, int]], step: int) -> None:
        """candidates: (score, token, parent), best first."""
        ends = [token == EOS and score > -math.inf for score, token, _ in candidates]
        for (score, token, parent), is_end in list(zip(candidates, ends, strict=True))[: self.beam]:
            if is_end and len(self.results) < self.beam:
                self.results.append(self.alive[parent].then(token, score))
        self.is_finished = len(self.results) == self.beam or step == MAX_LEN
        going = [c for c, is_end in zip(candidates, ends, strict=True) if not is_end]
        going += [(-math.inf, t, p) for (_, t, p), e in zip(candidates, ends, strict=True) if e]
        self.alive = [self.alive[p].then(t, s) for s, t, p in going[: self.beam]]


@dataclass
class OfTransformers(Sentence):
    """GenerationMixin._beam_search for one sentence; ``early_stopping`` is its argument."""

    penalty: float = 1.0
    early_stopping: bool | str = False
    prompt: int = 0

    def total(self, score: float, length: int) -> float:
        return score / (length - self.prompt) ** self.penalty

    def totals(self) -> list[float]:
        return [self.total(h.scores[-1], len(h.tokens)) for h in self.results]

    def advance(self, candidates: list[tuple[float, int, int]], step: int) -> None:
        if step == MAX_LEN:  # as with forced_eos_token_id
            free = [(self.alive[p].scores[-1], t, p) for s, t, p in candidates if s > -math.inf]
            candidates = sorted(free, key=lambda c: (-c[0], c[2]))
        best = candidates[: self.beam]
        self.results += [self.alive[p].then(t, s) for s, t, p in best if t == EOS and s > -math.inf]
        order = sorted(range(len(self.results)), key=lambda i: -self.totals()[i])
        self.results = [self.results[i] for i in order[: self.beam]]
        going = [(s, t, p) for s, t, p in candidates if t != EOS or s == -math.inf]
        self.alive = [self.alive[p].then(t, s) for s, t, p in going[: self.beam]]
        self.is_finished = step == MAX_LEN
        if len(self.results) == self.beam and not self.is_finished:
            longest = self.early_stopping == "never" and self.penalty > 0
            length = MAX_LEN + 1 if longest else step + 1
            hope = self.total(self.alive[0].scores[-1], length) > self.totals()[-1]
            self.is_finished = self.early_stopping is True or not hope


def random_candidates(scores: Tensor, width: int, step: int) -> tuple[Tensor, Tensor]:
    """Lists as from ops.beam_candidates, or from beam_sample (width 1), with many ends."""
    lprobs = torch.log_softmax(torch.randn(len(scores), V) * 2, dim=1)
    lprobs[:, EOS] += 1.0
    if step == MAX_LEN:
        lprobs[torch.arange(V).expand_as(lprobs) != EOS] = -torch.inf
    totals = lprobs + scores[:, None]
    if width == 1:
        tokens = torch.multinomial(lprobs.exp(), 1)
        tokens[scores.isneginf()] = EOS
        return totals.gather(1, tokens), tokens.int()
    best, tokens = totals.sort(dim=1, descending=True, stable=True)
    return best[:, :width].contiguous(), tokens[:, :width].int().contiguous()


def merged(scores: Tensor, tokens: Tensor, beam: int) -> list[tuple[float, int, int]]:
    """The candidates of a sentence [beam, W], sorted."""
    flat = [
        (score, token, parent)
        for parent, (each, words) in enumerate(zip(scores.tolist(), tokens.tolist(), strict=True))
        for score, token in zip(each, words, strict=True)
    ]
    if scores.shape[1] == 1:
        return flat
    return sorted(flat, key=lambda c: (-c[0], c[2], c[1]))[: 2 * beam]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("beam, is_sampled", [(1, False), (2, False), (5, False), (3, True)])
def test_a_whole_search(beam: int, is_sampled: bool, penalty: float) -> None:
    torch.manual_seed(beam)
    numbers = [3, 0, 1, 4, 2]
    tensors = state(numbers, beam, 5 * beam + 2, beam if is_sampled else 1)
    sentences = {n: Sentence(beam, [Hypothesis() for _ in range(beam)]) for n in numbers}
    before: set[int] = set()
    for step in range(MAX_LEN + 1):
        found = random_candidates(tensors["scores"], 1 if is_sampled else 2 * beam, step)
        slots = tensors["sentences"].tolist()
        advance(found, tensors, beam, 1, 0.0, EOS, penalty, 0)
        for place, number in enumerate(slots):
            if number >= 0:
                rows = slice(place * beam, (place + 1) * beam)
                candidates = merged(found[0][rows], found[1][rows], beam)
                sentences[number].advance(candidates, step)
        ended = {n for n, sentence in sentences.items() if sentence.is_finished}
        assert set(tensors["sentences"].tolist()) - {-1} == set(numbers) - ended
        assert tensors["progress"].tolist() == [step + 1, 0]
        reports = tensors["reports"].tolist()
        assert reports[0] == step + 1
        now = {numbers[place] for place, count in enumerate(reports[1:]) if count == step + 1}
        assert now == ended - before
        before = ended
        for place, number in enumerate(numbers):
            rows = slice(place * beam, (place + 1) * beam)
            alive = sentences[number].alive
            if number in ended:
                assert tensors["scores"][rows].isneginf().all()
            else:
                assert tensors["tokens"][rows].tolist() == [h.tokens[-1] for h in alive]
                assert tensors["scores"][rows].tolist() == [h.scores[-1] for h in alive]
    assert len(ended) == len(numbers)
    for number, sentence in sentences.items():
        assert 0 < len(sentence.results) <= beam
        for place, hypothesis in enumerate(sentence.results):
            column, length = number * beam + place, len(hypothesis.tokens)
            assert tensors["lengths"][column] == length
            assert tensors["hypothesis_tokens"][column, :length].tolist() == hypothesis.tokens
            assert tensors["hypothesis_scores"][column, :length].tolist() == hypothesis.scores
            expected = torch.tensor(hypothesis.scores[-1]) / length**penalty
            torch.testing.assert_close(tensors["totals"][column], expected)
    assert (tensors["lengths"] > 0).sum() == sum(len(s.results) for s in sentences.values())
    assert any(len(s.results) == beam for s in sentences.values())


@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("beam, prompt", [(1, 0), (2, 0), (2, 3), (5, 0), (5, 1)])
def test_rules_of_transformers(
    beam: int, prompt: int, early_stopping: bool | str, penalty: float
) -> None:
    """prompt: tokens with which all hypotheses begin, beside the first decoder input."""
    torch.manual_seed(beam)
    numbers = list(range(20))
    tensors = state(numbers, beam, 20 * beam)
    tensors["steps"] += prompt
    tensors["places"] += prompt
    tensors["past_scores"][:prompt] = 0.0
    tensors["ancestry"][:prompt] = torch.arange(20 * beam) // beam * beam
    read = Hypothesis([-7] * (prompt - 1) + [EOS] * (prompt > 0), [0.0] * prompt)
    rules = {True: 1, False: 2, "never": 3 if penalty > 0 else 2}
    sentences = [
        OfTransformers(beam, [read] * beam, [], False, penalty, early_stopping, prompt)
        for _ in numbers
    ]
    ends = []  # of sentences, before the last step
    for step in range(prompt, MAX_LEN + 1):
        found = random_candidates(tensors["scores"], 2 * beam, step)
        for number in tensors["sentences"].clone()[tensors["sentences"] >= 0].tolist():
            rows = slice(number * beam, (number + 1) * beam)
            sentences[number].advance(merged(found[0][rows], found[1][rows], beam), step)
        advance(found, tensors, beam, 1, 0.0, EOS, penalty, rules[early_stopping], prompt)
        finished = [sentence.is_finished for sentence in sentences]
        assert tensors["sentences"].lt(0).tolist() == finished
        if step == MAX_LEN - 1:
            ends = finished
    assert any(ends) or (early_stopping is not True and penalty >= 1) or prompt == 3
    for number, sentence in enumerate(sentences):
        columns = slice(number * beam, (number + 1) * beam)
        lengths, totals = tensors["lengths"][columns], tensors["totals"][columns]
        assert lengths.gt(0).sum() == len(sentence.results) > 0
        order = totals.masked_fill(lengths == 0, -torch.inf).argsort(descending=True)
        for place, hypothesis, total in zip(order, sentence.results, sentence.totals()):
            column, length = number * beam + int(place), len(hypothesis.tokens)
            assert tensors["hypothesis_tokens"][column, :length].tolist() == hypothesis.tokens
            assert tensors["hypothesis_scores"][column, :length].tolist() == hypothesis.scores
            assert lengths[place] == length
            torch.testing.assert_close(totals[place], torch.tensor(total))


@pytest.mark.parametrize("groups, strength", [(2, 0.5), (3, 2.0), (6, 0.0)])
@pytest.mark.parametrize("step", [0, 3])
def test_groups_are_fairseqs(groups: int, strength: float, step: int) -> None:
    torch.manual_seed(groups)
    beam, slots = 6, 7

    class Words:
        def pad(self) -> int:
            return 1

        eos = unk = pad

        def __len__(self) -> int:
            return V * 3

    lprobs = torch.log_softmax(torch.randn(slots, beam, V * 3) * 2, dim=-1)
    history = -torch.rand(slots, beam, max(step, 1)) * 3
    expected = DiverseBeamSearch(Words(), groups, strength).step(
        step, lprobs.clone(), history if step else None
    )
    tensors = state(list(range(slots)), beam, slots * beam, groups)
    if step:
        tensors["scores"].copy_(history[:, :, step - 1].flatten())
    totals = lprobs.flatten(0, 1) + tensors["scores"][:, None]
    best, tokens = totals.sort(dim=1, descending=True, stable=True)
    found = best[:, : 2 * beam].contiguous(), tokens[:, : 2 * beam].int().contiguous()
    advance(found, tensors, beam, groups, strength, V * 3, 1.0, 0)  # no token is an end
    scores, words, parents = (x[:, :beam].flatten() for x in expected)
    torch.testing.assert_close(tensors["scores"], scores)
    assert torch.equal(tensors["tokens"].long(), words)
    rows = torch.arange(slots).repeat_interleave(beam) * beam + parents
    assert torch.equal(tensors["ancestry"][0].long(), rows)


def test_ties_go_to_the_lowest_row_then_token() -> None:
    tensors = state([0], 2, 2)
    tensors["scores"].zero_()
    scores = torch.tensor([[-1.0, -1.0, -2.0, -2.0], [-1.0, -2.0, -2.0, -3.0]])
    tokens = torch.tensor([[5, 6, 3, 4], [7, 0, 1, 8]], dtype=torch.int32)
    advance((scores, tokens), tensors, 2, 1, 0.0, EOS, 1.0, 0)
    assert tensors["tokens"].tolist() == [5, 6]
    assert tensors["ancestry"][0].tolist() == [0, 0]


def test_slots_of_no_sentence_are_left_alone() -> None:
    tensors = state([-1, 1], 2, 6)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    found = random_candidates(tensors["scores"], 4, 0)
    advance(found, tensors, 2, 1, 0.0, EOS, 1.0, 0)
    for name in ("tokens", "scores"):
        assert torch.equal(tensors[name][:2], before[name][:2])
    for columns in ((0, 1), (4, 5)):
        for name in ("ancestry", "past_tokens", "past_scores"):
            kept = tensors[name][:, columns], before[name][:, columns]
            assert torch.equal(*(x.nan_to_num(9.0) for x in kept)), name
        kept = (each["hypothesis_tokens"][(columns,)] for each in (tensors, before))
        assert torch.equal(*kept)
    assert tensors["steps"].tolist() == tensors["places"].tolist() == [0, 0, 1, 1]
    assert tensors["reports"].tolist() == [1, 0, 0]


def test_sentences_that_began_at_different_steps() -> None:
    """Each is searched as if it were alone."""
    torch.manual_seed(4)
    beam, starts = 3, [0, 2, 3]
    together = state([0, 1, 2], beam, 3 * beam)
    alone = [state([0], beam, beam) for _ in starts]
    seeds = iter(range(100))
    for step in range(MAX_LEN + 1 + max(starts)):
        begun = [step >= start for start in starts]
        together["sentences"].copy_(
            torch.tensor([n if b and alone[n]["sentences"][0] == 0 else -1
                          for n, b in enumerate(begun)])
        )  # fmt: skip
        found = []
        for one, start in zip(alone, starts, strict=True):
            torch.manual_seed(next(seeds))
            its = random_candidates(one["scores"], 2 * beam, step - start)
            found.append(its)
            if step >= start:
                advance(its, one, beam, 1, 0.0, EOS, 1.0, 0)
        both = torch.cat([x for x, _ in found]), torch.cat([x for _, x in found])
        advance(both, together, beam, 1, 0.0, EOS, 1.0, 0)
    for number, one in enumerate(alone):
        rows = slice(number * beam, (number + 1) * beam)
        for name in ("steps", "places"):
            assert torch.equal(together[name][rows], one[name])
        for name in ("lengths", "totals", "hypothesis_tokens", "hypothesis_scores"):
            mine, its = (x.nan_to_num(9.0) for x in (together[name][rows], one[name]))
            assert torch.equal(mine, its), name


def test_wrong_arguments_are_refused() -> None:
    tensors = state([0, 1], 2, 4)
    found = random_candidates(tensors["scores"], 4, 0)

    def refused(
        match: str, beam: int = 2, groups: int = 1, stopping: int = 0, **others: Tensor
    ) -> None:
        with pytest.raises(ValueError, match=match):
            advance(found, {**tensors, **others}, beam, groups, 0.0, EOS, 1.0, stopping)

    refused("stopping must be in 0 ... 3, got 4", stopping=4)
    refused("groups and sampling need stopping = 0, got 2", groups=2, stopping=2)

    refused("W must be 1 or twice the beam, 8, got 4", beam=4, sentences=tensors["sentences"][:1])
    refused("reports must be on the CPU, is on meta", reports=tensors["reports"].to("meta"))
    refused("reports must have more than 2 numbers, got 2", reports=tensors["reports"][:2])
    small = {n: tensors[n][:, :3] for n in ("ancestry", "past_tokens", "past_scores")}
    refused("4 hypotheses do not fit into 3 rows", **small)
