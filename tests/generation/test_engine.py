"""Requests to an engine get the words of a search of their own, whatever else it has to do."""

from __future__ import annotations

import random
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import pytest
import torch
from helpers.searches import assert_close

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation import engine as of_engine
from lightseq_fairseq.generation.engine import Engine, Expired, Full, Limits, Request, Ticket
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search import search
from lightseq_fairseq.generation.source import SearchBatch

PAD, EOS = 1, 2
LIMITS = Limits(slots=8, longest=40, max_len=30, waiting=50)


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> digits.Toy:
    return digits.exact()


def requests_of(toy: digits.Toy, count: int) -> list[Request]:
    """Of one sentence or two, with several kinds of options."""
    rng = random.Random(count)
    sources = next(digits.first_held_out(toy.task, count))["net_input"]["src_tokens"]
    found = []
    for row in range(0, count - 1):
        tokens = sources[row : row + rng.randint(1, 2)]
        forced = torch.randint(5, 12, (len(tokens), rng.randint(1, 3)))
        given = forced if rng.random() < 0.3 else None
        options = SearchOptions(rng.choice([1, 3]), PAD, EOS, 3, min_len=rng.choice([1, 1, 5]))
        begun = 0 if given is None else given.shape[1]
        batch = SearchBatch(tokens, rng.randint(8, 25), given)
        found.append(Request(batch, options, EOS, begun))
    return found


def offline(model: Any, request: Request) -> Any:
    encoder = getattr(model, "encoder", None)
    given = [request.batch], request.options, request.first
    return search(model.decoder.steps, encoder, model.decoder, *given)[0]


def engine_of(model: Any, limits: Limits = LIMITS) -> Engine:
    return Engine(getattr(model, "encoder", None), model.decoder, limits)


def run(engine: Engine) -> list[Ticket]:
    ended = []
    while engine.is_busy:
        ended += engine.advance()
    return ended


def assert_is(ticket: Ticket, expected: Any) -> None:
    assert ticket.error is None
    assert_close(dict(enumerate(ticket.results or [])), dict(enumerate(expected)))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_requests_of_all_kinds(toy: digits.Toy) -> None:
    asked = requests_of(toy, 60)
    expected = [offline(toy.ls, each) for each in asked]
    engine, rng = engine_of(toy.ls), random.Random(3)
    tickets: list[Ticket] = []
    ended: list[Ticket] = []
    cancelled = set()
    while len(tickets) < len(asked) or engine.is_busy:
        if len(tickets) < len(asked) and rng.random() < 0.7:
            tickets.append(engine.submit(asked[len(tickets)]))
        if tickets and rng.random() < 0.05:
            one = rng.choice(tickets)
            if one not in ended and one in (*engine.waiting, *engine.living.values()):
                cancelled.add(one)
            engine.cancel(one)
        ended += engine.advance()
    assert 1 < len(cancelled) < 20
    assert {*ended} == {*tickets} - cancelled
    assert len(ended) == len({*ended})
    for ticket, wanted in zip(tickets, expected, strict=True):
        if ticket not in cancelled:
            assert_is(ticket, wanted)
    # Arrived first, begun first.
    begun = [ticket.began for ticket in tickets if ticket.began is not None]
    assert begun == sorted(begun)
    engine.close()


def test_a_cancelled_request_frees_its_rows_at_once(toy: digits.Toy) -> None:
    tokens = digits.sentences(9)
    request = Request(SearchBatch(tokens, 25), SearchOptions(2, PAD, EOS, 3, min_len=20), EOS, 0)
    engine = engine_of(toy.ls, LIMITS._replace(slots=1))
    first, second = engine.submit(request), engine.submit(request)
    engine.advance()
    assert [*engine.living.values()] == [first]
    engine.cancel(first)
    engine.advance()
    assert [*engine.living.values()] == [second]
    assert run(engine) == [second]
    assert first.results is None
    assert_is(second, offline(toy.ls, request))


def test_deadlines(toy: digits.Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends at its deadline, begun or not; others do not."""
    now = [100.0]
    monkeypatch.setattr(of_engine.time, "monotonic", lambda: now[0])
    options = SearchOptions(2, PAD, EOS, 3, min_len=15)
    request = Request(SearchBatch(digits.sentences(9), 25), options, EOS, 0)
    engine = engine_of(toy.ls, LIMITS._replace(slots=1))
    late, waits, patient = (engine.submit(request, x) for x in (101.0, 101.0, 300.0))
    assert engine.advance() == []
    now[0] = 101.5
    assert {*engine.advance()} == {late, waits}
    assert isinstance(late.error, Expired)
    assert str(late.error) == "The request has not ended after 1.5 seconds."
    assert run(engine) == [patient]
    assert patient.error is None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_tokens_are_told_as_they_are_found() -> None:
    text = counting.toy()
    engine = engine_of(text.ls)
    options = SearchOptions(1, PAD, EOS, 3)
    prompts = [torch.tensor([5, 7]), torch.tensor([4, 5, 6]), torch.tensor([9])]
    tickets = []
    told: list[int] = []
    for prompt in prompts:
        request = Request(SearchBatch(prompt[None], 20), options, EOS, len(prompt))
        tickets.append(engine.submit(request, streams=True))
        for _ in range(3):
            engine.advance()
            told += [len(ticket.tokens) for ticket in engine.grown]
    run(engine)
    assert len(told) > 5
    for ticket, prompt in zip(tickets, prompts, strict=True):
        assert ticket.results is not None
        whole = ticket.results[0][0]["tokens"].tolist()
        assert whole[-1] == EOS
        assert [*prompt.tolist(), *ticket.tokens, EOS] == whole
        assert_is(ticket, offline(text.ls, ticket.request))


def test_limits(toy: digits.Toy) -> None:
    engine = engine_of(toy.ls, LIMITS._replace(waiting=2))
    options = SearchOptions(1, PAD, EOS, 3)
    good = Request(SearchBatch(digits.sentences(4), 10), options, EOS, 0)
    for batch, begun, words in (
        (SearchBatch(digits.sentences(*[3] * 9), 10), 0, "9 sentences, at most 8"),
        (SearchBatch(digits.sentences(41), 10), 0, "41 tokens in a sentence, at most 40"),
        (SearchBatch(digits.sentences(4), 31), 0, "31 tokens in a result, at most 30"),
        (SearchBatch(digits.sentences(4), 30), 9, "9 tokens with which it begins, at most 8"),
    ):
        with pytest.raises(UserError, match=words):
            engine.submit(Request(batch, options, EOS, begun))
    with pytest.raises(UserError, match="Only one sentence with a beam of 1 can be streamed"):
        engine.submit(good._replace(options=SearchOptions(2, PAD, EOS, 3)), streams=True)
    for _ in range(2):
        engine.submit(good)
    with pytest.raises(Full, match="2 requests wait"):
        engine.submit(good)
    assert len(run(engine)) == 2
    engine.submit(good)
    assert len(run(engine)) == 1


def test_a_model_that_computes_nan_and_an_error(
    toy: digits.Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is told to its request; after the second the engine is empty, and works again."""
    engine = engine_of(toy.ls)
    request = Request(SearchBatch(digits.sentences(4), 10), SearchOptions(2, PAD, EOS, 3), EOS, 0)
    expected = offline(toy.ls, request)
    output = toy.ls.decoder.output_layer
    with monkeypatch.context() as patched:
        patched.setattr(toy.ls.decoder, "output_layer", lambda x: output(x) * torch.nan)
        engine.submit(request)
        (ticket,) = run(engine)
    assert isinstance(ticket.error, UserError)
    with monkeypatch.context() as patched:
        patched.setattr(toy.ls.decoder, "output_layer", lambda x: 1 / 0)
        engine.submit(request)
        with pytest.raises(ZeroDivisionError):
            run(engine)
    assert not engine.is_busy
    ticket = engine.submit(request)
    assert run(engine) == [ticket]
    assert_is(ticket, expected)
