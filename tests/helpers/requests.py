"""Requests to an engine, for tests: random ones, in random order, and what they should find."""

from __future__ import annotations

import random
from typing import Any

import helpers.digits as digits
import torch
from helpers.searches import assert_close

from lightseq_fairseq.generation.engine import Engine, Limits, Request, Ticket
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search import search
from lightseq_fairseq.generation.source import SearchBatch

PAD, EOS = 1, 2
LIMITS = Limits(slots=8, longest=40, max_len=30, waiting=50)


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


def _words(results: Any) -> list[list[int]]:
    """Of the best hypothesis of each sentence."""
    return [hypotheses[0]["tokens"].tolist() for hypotheses in results]


def assert_served(engine: Engine, model: Any, asked: list[Request], rounds: bool = False) -> None:
    """Requests that arrive one after another, of which some are cancelled, get the results of a
    search of their own; those that arrive first begin first.

    rounds: in 16 bits sums depend on the number of rows, so a few requests may get other words.
    """
    expected = [offline(model, each) for each in asked]
    rng = random.Random(3)
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
    pairs = [x for x in zip(tickets, expected, strict=True) if x[0] not in cancelled]
    if rounds:
        others = sum(_words(ticket.results or []) != _words(wanted) for ticket, wanted in pairs)
        assert others <= 0.05 * len(pairs)
    else:
        for ticket, wanted in pairs:
            assert_is(ticket, wanted)
    begun = [ticket.began for ticket in tickets if ticket.began is not None]
    assert begun == sorted(begun)


def assert_streamed(model: Any) -> None:
    """Prompts for a language model, whose tokens are told as they are found."""
    engine, options = engine_of(model), SearchOptions(1, PAD, EOS, 3)
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
        assert_is(ticket, offline(model, ticket.request))
