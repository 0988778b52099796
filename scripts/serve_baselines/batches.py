"""The engines of a server whose texts wait for batches: dynamic batching, as other servers have it.

As soon as the engine is free, it gets all texts that have come, at most `MOST` of them. It runs in
a process of its own, as ours does.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving.messages import Answer, Model, State
from lightseq_fairseq.cli.serving.processes import Channel, Gone

MOST = 256  # texts of a batch, as many as ours searches at a time

#: Of a batch of texts, an answer for each: a `messages.Answer` or `messages.Encoded`.
Batch = Callable[[Sequence[str]], Sequence[Any]]


class BatchedEngines:
    """Takes the place of ``cli.serving.engines.Engines``.

    Args:
        model: what is served.
        load: called in the engine's process, returns what computes a batch.
    """

    state: State | None = None
    is_gone = False

    def __init__(self, model: Model, load: Callable[[], Batch]) -> None:
        self.models, self.is_ready = {model.name: model}, False
        context = multiprocessing.get_context("spawn")
        self._own, other = context.Pipe()
        self._process = context.Process(target=_run, args=(load, other), daemon=True)
        self._process.start()
        other.close()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    async def connect(self) -> None:
        self._channel = Channel(self._take, self._lose)
        await self._channel.connect(self._own)

    async def warm_up(self) -> None:
        (name,) = self.models
        await self.answers(name, ["1"], {})
        self.is_ready = True

    def kill(self) -> None:
        self._process.kill()

    async def answers(
        self, name: str, texts: Sequence[str], options: Mapping[str, Any],
        seconds: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """Answers for texts; options have no effect."""
        loop, numbers = asyncio.get_running_loop(), [next(self._numbers) for _ in texts]
        for number in numbers:
            self._waiting[number] = loop.create_future()
        self._channel.send([*zip(numbers, texts, strict=True)])
        try:
            return [await self._waiting[number] for number in numbers]
        finally:
            for number in numbers:
                self._waiting.pop(number, None)

    async def stream(self, *_: Any) -> AsyncGenerator[Answer, None]:
        raise UserError("This engine does not stream.")
        yield

    def _take(self, answers: Sequence[tuple[int, Any]]) -> None:
        for number, answer in answers:
            if (future := self._waiting.get(number)) is not None and not future.done():
                future.set_result(answer)

    def _lose(self) -> None:
        self.is_gone = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Gone())


def _run(load: Callable[[], Batch], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compute, waiting = load(), list[tuple[int, str]]()
    try:
        while True:
            if not waiting:
                waiting += connection.recv()
            while connection.poll(0):
                waiting += connection.recv()
            # Texts of similar length together, as far as they have come.
            batch, waiting = waiting[:MOST], waiting[MOST:]
            found = compute([text for _, text in batch])
            connection.send([*zip((number for number, _ in batch), found, strict=True)])
    except (EOFError, ConnectionError):
        os._exit(0)
