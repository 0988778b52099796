"""Requests to an engine get the words of a search of their own, whatever else it has to do."""

from __future__ import annotations

import helpers.counting as counting
import helpers.digits as digits
import pytest
import torch
from helpers.requests import (
    EOS,
    LIMITS,
    PAD,
    assert_is,
    assert_served,
    assert_streamed,
    engine_of,
    offline,
    requests_of,
    run,
)

from lightseq_fairseq.base.errors import Expired, Full, UserError
from lightseq_fairseq.generation import engine as of_engine
from lightseq_fairseq.generation.engine import Request
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.source import SearchBatch


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> digits.Toy:
    return digits.exact()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_requests_of_all_kinds(toy: digits.Toy) -> None:
    engine = engine_of(toy.ls)
    assert_served(engine, toy.ls, requests_of(toy, 60))
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
    assert_streamed(counting.toy().ls)


def test_a_stream_that_is_cancelled() -> None:
    """It tells nothing more, also if there is no other step."""
    engine, options = engine_of(counting.toy().ls), SearchOptions(1, PAD, EOS, 3)
    request = Request(SearchBatch(torch.tensor([[5, 7]]), 20), options, EOS, 2)
    stream = engine.submit(request, streams=True)
    while not engine.grown:
        engine.advance()
    engine.cancel(stream)
    late = engine.submit(request, deadline=0.0)
    assert engine.advance() == [late]
    assert engine.grown == []
    assert len(stream.tokens) == 1


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
