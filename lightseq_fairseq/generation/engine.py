"""Searches requests that arrive while others run: the core of a server, without one.

A request begins when a slot is free, whatever the others do, so its words are those of a search of
its own. Requests begin in the order in which they arrived. Those with other options of the search
wait until the ones before them have ended, since a step has one set of options.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightseq_fairseq.base.errors import Expired, Full, UserError
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis, Newest, Results
from lightseq_fairseq.generation.search import REFILL, Room, Search
from lightseq_fairseq.generation.source import Group, SearchBatch

_ROOM = 4  # sentences that may have room in the buffers, for each slot
_USUAL = 48  # tokens of a sentence; longer ones only share the room with fewer others
_READ = 8192  # tokens that the encoder reads at a time, unless one sentence has more


class Request(NamedTuple):
    """Sentences that are searched with some options.

    Attributes:
        batch: the sentences, see ``SearchBatch``.
        first: the first decoder input token.
        begun: the most tokens with which a result begins: those of a prompt, or forced ones.
    """

    batch: SearchBatch
    options: SearchOptions
    first: int
    begun: int

    @property
    def kind(self) -> str:
        """Equal for requests that can be searched together.

        As in fairseq, min_len does not hold while any sentence of a batch has a forced token. So it
        must hold from the same step on.
        """
        return repr((self.options, self.first, self.batch.forced is None, self.free_from))

    @property
    def free_from(self) -> int:
        """The step from which min_len holds; it does not matter beyond min_len."""
        return min(self.begun, self.options.min_len)


class Limits(NamedTuple):
    """What an engine accepts.

    slots: sentences that are searched at a time. waiting: requests that may wait.
    longest: tokens of a source or prompt. max_len: tokens of a result. forced: tokens with which
    results begin.
    """

    slots: int
    longest: int
    max_len: int
    waiting: int = 4096
    forced: int = 8


@dataclass(eq=False)
class Ticket:
    """A request in an engine.

    Attributes:
        deadline: a time of ``time.monotonic``, at which the request ends without results.
        group: its sentences, once they have begun.
        streams: whether the engine tells the tokens as they are found.
        tokens: those that it has told.
        group: its sentences, once they have begun.
        results: for each sentence its hypotheses, the best first. None: there are none, because the
            request was cancelled, or of ``error``.
        began, ended: times of ``time.monotonic``.
    """

    request: Request
    arrived: float
    deadline: float | None = None
    streams: bool = False
    tokens: list[int] = field(default_factory=list)
    group: Group | None = None
    results: list[list[LazyHypothesis]] | None = None
    error: Exception | None = None
    began: float | None = None
    ended: float | None = None


class Engine:
    """Searches with one model, by one thread, which calls `advance` again and again.

    Args:
        encoder, decoder: of the model, see ``generation.search.search``. encoder: None for a
            language model.
        limits: what requests may ask for.

    Attributes:
        waiting: the requests that have not begun. living: those that have, until they end.
        grown: those of which the last step has told tokens.
    """

    def __init__(self, encoder: Any, decoder: Any, limits: Limits) -> None:
        self.encoder, self.decoder, self.limits = encoder, decoder, limits
        self.waiting: deque[Ticket] = deque()
        self.living: dict[Group, Ticket] = {}
        self.grown: list[Ticket] = []
        self._steps = decoder.steps.lent_to(self)
        self._search: Search | None = None
        self._kind = ""
        self._fetching: deque[Ticket] = deque()
        self._newest: deque[Newest] = deque()
        self._ended: list[Ticket] = []  # by an error or a deadline, since the last step
        self._due = float("inf")  # no deadline is earlier

    @property
    def slots(self) -> int:
        """How many sentences are searched at a time."""
        return self.limits.slots

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.waiting or self.living or self._fetching or self._ended)

    def submit(
        self, request: Request, deadline: float | None = None, streams: bool = False
    ) -> Ticket:
        """Take a request.

        deadline, streams: see `Ticket`. Only one sentence with a beam of 1 is streamed.

        Raises:
            Full: try it again later.
            UserError: it exceeds the limits.
        """
        limits, batch = self.limits, request.batch
        sentences, longest = batch.tokens.shape
        forced = request.begun if self.encoder is not None else 0
        for what, number, most in (
            ("sentences", sentences, limits.slots),
            ("tokens in a sentence", longest, limits.longest),
            ("tokens in a result", batch.max_len, limits.max_len),
            ("tokens with which it begins", forced, limits.forced),
        ):
            if number > most:
                raise UserError(f"The request has {number} {what}, at most {most} are allowed.")
        if not request.options.forces_eos or batch.end_together:
            raise UserError("The engine has fairseq's search, which ends each result with eos.")
        if streams and (sentences > 1 or request.options.beam > 1):
            raise UserError("Only one sentence with a beam of 1 can be streamed.")
        if len(self.waiting) >= limits.waiting:
            raise Full(f"{len(self.waiting)} requests wait: try it again later.")
        ticket = Ticket(request, time.monotonic(), deadline, streams)
        self.waiting.append(ticket)
        if deadline is not None:
            self._due = min(self._due, deadline)
        return ticket

    def cancel(self, ticket: Ticket, error: Exception | None = None) -> None:
        """End a request without results; nothing happens if it has ended.

        error: what `advance` returns it with; without, it does not return it.
        """
        if ticket.group is not None:
            if self.living.pop(ticket.group, None) is None:
                return
            assert self._search is not None
            self._search.cancel(ticket.group)
        elif ticket in self.waiting:
            self.waiting.remove(ticket)
        else:
            return
        if error is not None:
            ticket.error = error
            self._ended.append(ticket)

    @torch.no_grad()
    def advance(self) -> list[Ticket]:
        """Begin requests, if there are free slots, and run a step; the requests that have ended.

        Raises:
            Exception: an error of the model or the device. No request is left.
        """
        self.grown = []
        if time.monotonic() >= self._due:
            self._expire()
        try:
            self._begin()
            search = self._search
            if search is not None and search.is_busy:
                search.advance()
                self._fetching += [self.living.pop(group) for group in search.ended]
                search.ended.clear()
                self._tell(search)
            waits = not self.living  # nothing else is to be done
            ended, self._ended = self._ended, []
            while self._fetching and (waits or _results(self._fetching[0]).is_complete):
                ended.append(self._read(self._fetching.popleft()))
        except BaseException:
            self._forget()
            raise
        now = time.monotonic()
        for ticket in ended:
            ticket.ended = now
        return ended

    def close(self) -> None:
        """Free the buffers; no request may be left."""
        if self._search is not None:
            self._search.close()
            self._search = None

    def _tell(self, search: Search) -> None:
        """Tell the tokens of the step before the last one: now it is known which were no eos."""
        streaming = [ticket for ticket in self.living.values() if ticket.streams]
        before = self._newest.popleft().read() if self._newest else {}
        if streaming:
            self._newest.append(search.newest())
        for ticket in streaming:
            assert ticket.group is not None
            if (token := before.get(ticket.group.first)) is not None:
                ticket.tokens.append(token)
                self.grown.append(ticket)

    def _read(self, ticket: Ticket) -> Ticket:
        try:
            ticket.results = _results(ticket).read()
        except UserError as error:  # the model computes NaN
            ticket.error = error
        return ticket

    def _expire(self) -> None:
        """End the requests whose deadlines have passed."""
        now, tickets = time.monotonic(), [*self.waiting, *self.living.values()]
        late = [x for x in tickets if x.deadline is not None and x.deadline <= now]
        for ticket in late:
            seconds = now - ticket.arrived
            self.cancel(ticket, Expired(f"The request has not ended after {seconds:.1f} seconds."))
        left = [x.deadline for x in tickets if x.deadline is not None and x.deadline > now]
        self._due = min(left, default=float("inf"))

    def _begin(self) -> None:
        """Begin the next requests, if there is room."""
        if not self.waiting:
            return
        search, kind = self._search, self.waiting[0].request.kind
        if search is None or (kind != self._kind and not (search.is_busy or self._fetching)):
            search = self._open(self.waiting[0].request)
        if kind != self._kind or search.free * REFILL < len(search.in_slot):
            return
        some: list[Ticket] = []
        sentences = tokens = 0
        for ticket in self.waiting:
            batch = ticket.request.batch
            sentences += len(batch.tokens)
            tokens += batch.tokens.numel()
            is_first = not some
            if ticket.request.kind != kind or sentences > search.free:
                break
            if tokens > search.room.read_tokens and not is_first:
                break
            some.append(ticket)
        if not some:
            return
        groups = search.add([ticket.request.batch for ticket in some])
        if groups is None:
            return
        now = time.monotonic()
        for ticket, group in zip(some, groups, strict=True):
            self.waiting.popleft()
            ticket.group, ticket.began = group, now
            self.living[group] = ticket

    def _open(self, request: Request) -> Search:
        """A search of requests of this kind."""
        self.close()
        limits, options = self.limits, request.options
        reads_prompts = self.encoder is None
        slots, longest = limits.slots, limits.longest + reads_prompts
        read = max(longest, min(_READ, slots * longest))
        room = Room(
            slots=slots,
            chunks=_ROOM * slots,
            sentences=_ROOM * slots,
            tokens=max(_ROOM * slots * _USUAL, 2 * read),
            read_sentences=slots,
            read_tokens=read,
            longest=longest,
            max_len=limits.max_len,
            forced=limits.forced if request.batch.forced is not None else 0,
            min_len_from=request.free_from,
        )
        self._search = Search(
            self._steps, self.encoder, self.decoder, options, request.first, room,
            reads_prompts=reads_prompts,
        )  # fmt: skip
        if options.sampled:
            self._search.memory.rng[:1].random_()
        self._kind = request.kind
        return self._search

    def _forget(self) -> None:
        """After an error: no request is left, and the buffers are freed."""
        self._steps.forget()
        self._search = None
        for every in (self.waiting, self.living, self._fetching, self._newest, self._ended):
            every.clear()


def _results(ticket: Ticket) -> Results:
    """The results of a request that has begun."""
    assert ticket.group is not None
    return ticket.group.results
