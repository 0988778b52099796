"""Candidates of beam search compared with fairseq's rules in plain torch; and what sampling
draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ops_testing import make_rng
from torch import Tensor

from lightseq_fairseq import fairseq_compat, ops
from lightseq_fairseq.ops.philox import uniforms

fairseq_compat.prepare()

from fairseq.search import BeamSearch, Sampling  # noqa: E402

PAD, EOS, UNK, V, S = 1, 2, 3, 23, 6
INF = torch.inf


class Words:
    """The part of a dictionary that fairseq's searches use."""

    def pad(self) -> int:
        return PAD

    def eos(self) -> int:
        return EOS

    def unk(self) -> int:
        return UNK

    def __len__(self) -> int:
        return V


def at(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """The steps and last steps of some rows, which are all at the same step."""
    steps = torch.tensor([[step], [9]], dtype=torch.int32).expand(2, rows)
    return steps[0], steps[1]


def rules(
    min_len: int = 2, unk_penalty: float = 0.0, temperature: float = 1.0, min_len_from: int = 0
) -> tuple[Any, ...]:
    return PAD, EOS, UNK, min_len, min_len_from, unk_penalty, temperature


def fairseqs(logits: Tensor, step: int, max_len: int, min_len: int, unk_penalty: float,
             temperature: float) -> Tensor:  # fmt: skip
    """Log-probabilities as ``SequenceGenerator._generate`` passes them to its search."""
    lprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    lprobs[lprobs != lprobs] = -INF
    lprobs[:, PAD] = -INF
    lprobs[:, UNK] -= unk_penalty
    if step >= max_len:
        lprobs[:, :EOS] = -INF
        lprobs[:, EOS + 1 :] = -INF
    if step < min_len:
        lprobs[:, EOS] = -INF
    return lprobs


def random_rows(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, V).mul(3).to(dtype), -torch.rand(rows).mul(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 2, 8])
@pytest.mark.parametrize("unk_penalty, temperature", [(0.0, 1.0), (2.5, 0.7), (-4.0, 3.0)])
@pytest.mark.parametrize("beam", [1, 4])
def test_candidates_are_fairseqs(
    beam: int, unk_penalty: float, temperature: float, step: int, dtype: torch.dtype
) -> None:
    logits, scores = random_rows(S * beam, dtype)
    found, tokens = ops.beam_candidates(
        logits, scores, *at(step, S * beam), 2 * beam, *rules(2, unk_penalty, temperature)
    )
    assert found.dtype == torch.float32 and tokens.dtype == torch.int32
    lprobs = fairseqs(logits, step, 9, 2, unk_penalty, temperature)
    history = scores.view(S, beam, 1).expand(S, beam, step)
    expected = BeamSearch(Words()).step(step, lprobs.view(S, beam, V), history)
    # The best of all candidates are the best of the lists of a sentence's hypotheses.
    best, order = found.view(S, -1).topk(2 * beam)
    parents = order // (2 * beam)
    torch.testing.assert_close(best, expected[0])
    assert torch.equal(tokens.view(S, -1).gather(1, order).long(), expected[1])
    assert torch.equal(parents, expected[2])


def test_only_the_end_at_the_end() -> None:
    logits, scores = random_rows(4)
    for step in (9, 10):
        found, tokens = ops.beam_candidates(logits, scores, *at(step, 4), 4, *rules())
        assert (tokens[:, 0] == EOS).all() and found[:, 0].isfinite().all()
        assert found[:, 1:].isneginf().all()
    found, _ = ops.beam_candidates(logits, scores, *at(9, 4), 4, *rules(min_len=10))
    assert found.isneginf().all()


def test_each_row_has_its_own_step() -> None:
    logits, scores = random_rows(5)
    logits[:, EOS] = 9.0
    steps = torch.tensor([0, 1, 3, 8, 9], dtype=torch.int32)
    last = torch.tensor([9, 9, 3, 9, 9], dtype=torch.int32)
    sentences, rng = torch.arange(5, dtype=torch.int32), make_rng()
    for min_len_from in (0, 1):
        settings = rules(3, min_len_from=min_len_from)
        found = ops.beam_candidates(logits, scores, steps, last, 4, *settings)
        drawn = ops.beam_sample(logits, scores, sentences, steps, last, rng, 1, 0, 0.0, *settings)
        for row in range(5):
            one = slice(row, row + 1)
            mine = logits[one], scores[one]
            alone = ops.beam_candidates(*mine, steps[one], last[one], 4, *settings)
            assert all(torch.equal(x[one], y) for x, y in zip(found, alone, strict=True))
            its = sentences[one], steps[one], last[one], rng
            alone = ops.beam_sample(*mine, *its, 1, 0, 0.0, *settings)
            assert all(torch.equal(x[one], y) for x, y in zip(drawn, alone, strict=True))
        ends = (found[1] == EOS) & found[0].isfinite()
        assert bool(ends[0].any()) == (min_len_from == 1) and not ends[1].any()
        assert found[0][[2, 4], 1:].isneginf().all() and (found[1][[2, 4], 0] == EOS).all()


def test_among_equals_the_lowest_token_comes_first() -> None:
    logits = torch.zeros(2, V)
    logits[1, 10:15] = 4.0
    _, tokens = ops.beam_candidates(logits, torch.zeros(2), *at(3, 2), 4, *rules())
    assert tokens.tolist() == [[0, 2, 3, 4], [10, 11, 12, 13]]
    _, tokens = ops.beam_candidates(logits, torch.zeros(2), *at(3, 2), 8, *rules())
    assert tokens.tolist() == [[0, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12, 13, 14, 0, 2, 3]]


def test_rows_without_a_hypothesis_and_without_numbers() -> None:
    logits, scores = random_rows(4)
    scores[0] = -INF
    logits[1] = torch.nan
    logits[2, 7] = torch.nan  # the softmax then makes the whole row NaN
    logits[3, 7] = -INF
    found, tokens = ops.beam_candidates(logits, scores, *at(3, 4), 4, *rules())
    assert found[:3].isneginf().all() and found[3].isfinite().all()
    assert tokens[:3].tolist() == [[0, 1, 2, 3]] * 3
    sentences = torch.arange(4, dtype=torch.int32)
    drawn, tokens = sample(logits, scores, sentences)
    assert drawn[:3].isneginf().all() and drawn[3].isfinite().all()
    assert tokens[:3].eq(EOS).all()


def sample(
    logits: Tensor, scores: Tensor, sentences: Tensor, step: int = 3, topk: int = 0,
    topp: float = 0.0, rng: Tensor | None = None, options: tuple[Any, ...] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return ops.beam_sample(
        logits, scores, sentences, *at(step, len(logits)), make_rng() if rng is None else rng,
        len(logits) // len(sentences), topk, topp, *(options or rules()),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"topk": 1}, {"topk": 5}, {"topp": 0.3}, {"topp": 0.9}, {"topk": 2, "topp": 0.9}],
)
def test_draws_have_fairseqs_distribution(options: dict[str, Any]) -> None:
    count = 40_000
    logits = torch.randn(V, generator=torch.Generator().manual_seed(5)).mul(2).repeat(count, 1)
    sentences = torch.arange(count // 4, dtype=torch.int32)
    setting = rules(unk_penalty=-1.0, temperature=1.3)
    scores, tokens = sample(
        logits, torch.full((count,), -2.0), sentences, options=setting, **options
    )
    lprobs = fairseqs(logits[:1], 3, 9, 2, -1.0, 1.3)
    weights = lprobs.exp()[0]
    if "topp" in options:
        kept, index = Sampling(Words(), -1, options["topp"])._sample_topp(lprobs[None].clone())
        weights = torch.zeros(V).scatter_(0, index[0, 0], kept[0, 0])
    elif "topk" in options:
        weights = (
            torch.zeros(V).scatter_(0, weights.topk(5).indices[: options["topk"]], 1) * weights
        )
    wanted = (weights / weights.sum()).double()
    found = tokens[:, 0].bincount(minlength=V).double() / count
    assert ((found > 0) <= (wanted > 0)).all()
    sigma = (wanted * (1 - wanted) / count).sqrt()
    assert ((found - wanted).abs() <= 4.5 * sigma + 1e-9).all()
    torch.testing.assert_close(scores[:, 0], lprobs[0][tokens[:, 0].long()] - 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_of_tied_tokens_the_lowest_are_drawn(dtype: torch.dtype) -> None:
    count = 4000
    row = torch.zeros(V)
    row[[4, 9, 11]], row[[20, 21]] = 1.0, 2.0
    logits, sentences = row.to(dtype).repeat(count, 1), torch.arange(count, dtype=torch.int32)
    # Best first. The sum of probabilities reaches topp within the last token.
    best, weights = [20, 21, 4, 9, 11, 0, 2, 3], row.double().exp()
    for wanted in range(1, len(best) + 1):
        sums = weights[best].cumsum(0) / weights.sum()
        topp = (sums[wanted - 1] - weights[best[wanted - 1]] / weights.sum() / 2).item()
        for settings in ({"topk": wanted}, {"topp": topp}, {"topk": 1, "topp": topp}):
            _, tokens = sample(logits, torch.zeros(count), sentences, **settings)
            assert tokens.unique().tolist() == sorted(best[:wanted]), settings


def test_a_larger_logit_is_better_even_if_probabilities_are_equal_after_rounding() -> None:
    logits = torch.zeros(200, V)
    logits[:, 9], logits[:, 7] = 2e-9, 1e-9
    _, tokens = sample(logits, torch.zeros(200), torch.arange(200, dtype=torch.int32), topk=1)
    assert tokens.unique().tolist() == [9]


def test_a_draw_depends_on_sentence_place_and_step_alone() -> None:
    logits = torch.zeros(12, V)
    scores, sentences = torch.zeros(12), torch.tensor([4, 0, 9, 5], dtype=torch.int32)
    _, whole = sample(logits, scores, sentences)
    kept = torch.tensor([2, 0])
    _, part = sample(logits[:6], scores[:6], sentences[kept])
    assert torch.equal(part.view(2, 3), whole.view(4, 3)[kept])
    assert not torch.equal(sample(logits, scores, sentences, step=4)[1], whole)
    assert not torch.equal(sample(logits, scores, sentences, rng=make_rng(7))[1], whole)


def test_uniform_numbers_are_the_generators_first_words() -> None:
    rows = torch.tensor([0, 5, 2**33 + 1])
    numbers = uniforms(make_rng(3, 1), 0, rows, torch.tensor([11, 11, 11]))
    # Sixteen bits of word 0 decide columns 88 and 89 of dropout's mask.
    for p in (0.25, 0.5, 0.8):
        mask = ops.keep_mask(make_rng(3, 1), 0, rows, 90, p)[:, 89]
        assert torch.equal((numbers * 65536).floor() >= round(65536 * p), mask)
    assert ((numbers > 0) & (numbers < 1)).all()


def test_as_many_candidates_as_words_are_refused() -> None:
    logits, scores = random_rows(6)
    with pytest.raises(ValueError, match=f"count must be at least 1 and below V, got {V}"):
        ops.beam_candidates(logits, scores, *at(3, 6), V, *rules())
