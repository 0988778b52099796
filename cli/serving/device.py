"""The process that has the models on a device, and computes. It does nothing else.

A search polls the GPU's reports, so a server in the same process would wait for the interpreter.
Between two steps the process reads the messages that have arrived, and sends what has ended.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from lightseq_fairseq.base.errors import Expired, UserError
from lightseq_fairseq.cli.serving.encoder import Encoder, Text
from lightseq_fairseq.cli.serving.log import LOGGER
from lightseq_fairseq.cli.serving.messages import (
    Cancel,
    Ended,
    Found,
    Plan,
    State,
    Submit,
    Told,
    told,
)
from lightseq_fairseq.cli.serving.models import Asked, EncodedBy, Served, Tokens
from lightseq_fairseq.generation.engine import Engine, Limits, Request, Ticket
from lightseq_fairseq.generation.source import SearchBatch

_TELLS = 1.0  # seconds between two `State` messages, while there is work
_WAITING = 4096  # sentences that may wait
_FORCED = 64  # tokens with which a translation may begin
_LONGEST = 1 << 16  # tokens, if neither the plan nor the model has fewer
_SLOTS = {"cuda": 256, "cpu": 16}


class Device:
    """The models on one device.

    Args:
        served: the models, on the CPU.
        device: "cuda" or "cpu".
        connection: to the server. It gets lists of messages, of all that a step has changed.
    """

    def __init__(
        self, served: Mapping[str, Served], plan: Plan, device: str, connection: Connection
    ) -> None:
        import torch

        most = plan.longest or _LONGEST
        limits = Limits(plan.slots or _SLOTS[device], most, most, _WAITING, _FORCED)
        self._connection = connection
        self._engines: dict[str, Engine | Encoder] = {}
        self._tickets: dict[int, tuple[Any, Any]] = {}
        self._numbers: dict[Ticket | Text, int] = {}
        self._told: dict[Ticket, int] = {}
        self._outgoing: list[Any] = []
        for name, each in served.items():
            model = each.model.to(device, getattr(torch, plan.dtype))
            if isinstance(each, EncodedBy):
                self._engines[name] = Encoder(each, model, (limits.waiting, limits.slots))
                continue
            positions = model.max_positions()
            longest, most = positions if isinstance(positions, tuple) else (positions, positions)
            its = limits._replace(
                longest=min(limits.longest, longest),
                max_len=min(limits.max_len, most - 1),  # and </s>
            )
            self._engines[name] = Engine(getattr(model, "encoder", None), model.decoder, its)

    def run(self) -> None:
        """Serve until the connection is closed."""
        last, is_busy = 0.0, False
        while True:
            # Waits for a message only if there is nothing else to do.
            has_come = self._connection.poll(0 if is_busy else None)
            while has_come:
                for message in self._connection.recv():
                    self._take(message)
                has_come = self._connection.poll(0)
            for engine in self._engines.values():
                if engine.is_busy:
                    self._advance(engine)
            is_busy = any(engine.is_busy for engine in self._engines.values())
            now = time.monotonic()
            if now - last > _TELLS or not is_busy:
                last = now
                self._outgoing.append(self._state())
            if self._outgoing:
                self._connection.send(self._outgoing)
                self._outgoing = []

    def _state(self) -> State:
        import torch

        memory = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
        models = {
            name: (len(engine.waiting), len(engine.living), engine.slots)
            for name, engine in self._engines.items()
        }
        return State(models, memory)

    def _take(self, message: Submit | Cancel) -> None:
        if isinstance(message, Cancel):
            for number in message.numbers:
                if number in self._tickets:
                    engine, ticket = self._tickets[number]
                    engine.cancel(ticket)
                    self._forget(ticket)
            return
        chosen: Any = self._engines[message.model]
        deadline = None if message.seconds is None else time.monotonic() + message.seconds
        for number, asked in zip(message.numbers, map(pickle.loads, message.asked), strict=True):
            try:
                request = asked if isinstance(asked, Tokens) else _request(asked)
                ticket = chosen.submit(request, deadline, message.streams)
            except UserError as error:
                self._outgoing.append(Ended(number, [], told(error)))
                continue
            self._tickets[number] = chosen, ticket
            self._numbers[ticket] = number

    def _advance(self, engine: Any) -> None:
        try:
            ended = engine.advance()
        except RuntimeError as error:  # such as no memory
            import torch

            LOGGER.exception("a search has failed")
            lost = [ticket for its, ticket in self._tickets.values() if its is engine]
            for ticket in lost:
                self._end(ticket, ("RuntimeError", "The search has failed: see the server's log."))
            if not isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_initialized():
                raise  # the GPU may be unusable: the server ends
            return
        for ticket in engine.grown:
            number, known = self._numbers[ticket], self._told.get(ticket, 0)
            self._outgoing.append(Told(number, ticket.tokens[known:]))
            self._told[ticket] = len(ticket.tokens)
        for ticket in ended:
            says = None if ticket.error is None else told(ticket.error)
            if says is not None and not isinstance(ticket.error, Expired):
                says = "RuntimeError", says[1]  # the request is right: the model computes NaN
            self._end(ticket, says)

    def _end(self, ticket: Ticket | Text, error: tuple[str, str] | None) -> None:
        number, ended = self._numbers[ticket], ticket.ended or time.monotonic()
        began = ticket.began or ended
        found: Any = []
        if isinstance(ticket, Text):
            found = ticket.found
        elif ticket.results is not None:
            found = [_found(each) for each in ticket.results[0]]
        times = began - ticket.arrived, ended - began
        self._outgoing.append(Ended(number, found, error, *times))
        self._forget(ticket)

    def _forget(self, ticket: Ticket | Text) -> None:
        del self._tickets[self._numbers.pop(ticket)]
        if isinstance(ticket, Ticket):
            self._told.pop(ticket, None)


def _request(asked: Asked) -> Request:
    import torch

    forced = None if asked.forced is None else torch.tensor([asked.forced])
    tokens = torch.tensor([asked.tokens], dtype=torch.int64)
    return Request(
        SearchBatch(tokens, asked.max_len, forced), asked.options, asked.first, asked.begun
    )


def _found(hypothesis: Any) -> Found:
    names = ("tokens", "score", "positional_scores")
    return Found(*(hypothesis[name].tolist() for name in names))


def main(
    served: Mapping[str, Served], plan: Plan, device: str, threads: int, connection: Connection
) -> None:
    """The process: computes until the connection closes; threads: of a CPU."""
    import torch

    torch.set_num_threads(threads)
    try:
        if device == "cuda" and plan.memory is not None:
            of_all = plan.memory * (1 << 30) / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(of_all, 1.0))
        Device(served, plan, device, connection).run()
    except (EOFError, ConnectionError):  # the server has ended, or has loaded the models again
        os._exit(0)
    except torch.OutOfMemoryError:  # others end only their requests
        limit = "" if plan.memory is None else f", of which they may use {plan.memory:g} GiB"
        says = f"The models do not fit into the GPU's memory{limit}: serve fewer, or add --bf16."
        LOGGER.error("error: %s", says)
        os._exit(1)
    except Exception:
        LOGGER.exception("the process of the models ends")
        os._exit(1)
