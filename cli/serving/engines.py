"""The processes of the models, as the server's event loop uses them.

A request passes three processes: one of texts makes numbers of it, that of the device searches,
and one of texts makes texts of what it has found.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import queue
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

from lightseq_fairseq.cli.serving import device, models
from lightseq_fairseq.cli.serving.device import Cancel, Ended, State, Submit, Told
from lightseq_fairseq.cli.serving.models import Answer, Found, Served
from lightseq_fairseq.generation.engine import Limits


class Gone(Exception):
    """A process has ended that the server needs."""


class Engines:
    """The models behind the server; made before the server begins, since it forks.

    Args:
        served: the models, on the CPU.
        place: see ``device.Device``.
        threads: of the device's process, for a CPU. workers: processes of texts.
        listening: the server's socket, which these processes do not keep open.

    Attributes:
        state: the last one, None before the first.
        is_gone: whether a process has ended that the server needs.
    """

    def __init__(
        self, served: Mapping[str, Served], limits: Limits, place: tuple[str, str], threads: int,
        workers: int, listening: socket.socket,
    ) -> None:  # fmt: skip
        self.served = served
        self.state: State | None = None
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        ours = self._connection, listening
        process = context.Process(target=_child, args=(ours, served, limits, place, threads, other))
        process.start()
        other.close()
        self._texts = ProcessPoolExecutor(workers, context, _begin_texts, (ours, served))
        self._texts.submit(os.getpid).result()  # forks all of them, before there are threads
        self._children = multiprocessing.active_children()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Ended | Told | Gone]] = {}
        self._outgoing: queue.SimpleQueue[list[Submit | Cancel] | None] = queue.SimpleQueue()
        self._ready = asyncio.Event()
        self.is_gone = False

    async def begin(self) -> None:
        """Connect to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._connection.fileno(), self._read)
        for child in self._children:
            self._loop.add_reader(child.sentinel, self._lose)
        threading.Thread(target=self._write, daemon=True).start()

    async def warm_up(self) -> None:
        """Search for a sentence with each model: then the first request need not wait for it."""
        for name, each in self.served.items():
            options = {"classifies": False} if each.does == "encodes" else {}
            await self.answers(name, ["1"], options)
        self._ready.set()

    @property
    def is_ready(self) -> bool:
        """Whether each model has answered a text."""
        return self._ready.is_set() and not self.is_gone

    def kill(self) -> None:
        """End the processes; call this last."""
        for child in self._children:
            child.kill()

    async def answers(
        self, name: str, texts: Sequence[Any], options: Mapping[str, Any],
        seconds: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """What texts become, in their order; a caller that is cancelled frees their rows.

        texts, options: see ``models.Served.asked``. seconds: until they end with an error.

        Raises:
            UserError: a text or an option cannot be used; its subclasses ``Full`` and ``Expired``.
            Gone: a process has ended.
        """
        asked = await self._in_texts(models.asked, name, texts, options)
        numbers = [next(self._numbers) for _ in texts]
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        found: dict[int, Any] = {}
        try:
            self._submit(Submit(name, numbers, asked, seconds, streams=False), inbox)
            while len(found) < len(numbers):
                ended = _checked(await inbox.get())
                found[ended.number] = ended.found
        finally:
            self._forget(numbers, found)
        return await self._in_texts(
            models.answers, name, asked, [found[x] for x in numbers], options
        )

    async def stream(
        self, name: str, text: str, options: Mapping[str, Any], seconds: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """The text of a language model as it grows; the last one is complete.

        Raises:
            See `answers`.
        """
        (asked,) = await self._in_texts(models.asked, name, [text], options)
        number = next(self._numbers)
        inbox: asyncio.Queue[Any] = asyncio.Queue()
        tokens, ended = [*asked.tokens], False
        try:
            self._submit(Submit(name, [number], [asked], seconds, streams=True), inbox)
            while not ended:
                messages = [_checked(await inbox.get())]
                while not inbox.empty():
                    messages.append(_checked(inbox.get_nowait()))
                for message in messages:
                    if isinstance(message, Ended):
                        ended, found = True, message.found[0]
                    else:
                        tokens += message.tokens
                        found = Found(tokens, 0.0, [0.0] * len(tokens))
                (answer,) = await self._in_texts(models.answers, name, [asked], [[found]], options)
                yield answer._replace(is_last=ended)
        finally:
            self._forget([number], [number] if ended else [])

    async def _in_texts(self, function: Any, *arguments: Any) -> Any:
        try:
            return await self._loop.run_in_executor(self._texts, function, *arguments)
        except BrokenProcessPool:
            self._lose()
            raise Gone from None

    def _submit(self, message: Submit, inbox: asyncio.Queue[Any]) -> None:
        if self.is_gone:
            raise Gone
        for number in message.numbers:
            self._waiting[number] = inbox
        self._outgoing.put([message])

    def _forget(self, numbers: Sequence[int], ended: Any) -> None:
        """Cancel what has not ended."""
        known = [number for number in numbers if self._waiting.pop(number, None) is not None]
        left = [number for number in known if number not in ended]
        if left and not self.is_gone:
            self._outgoing.put([Cancel(left)])

    def _read(self) -> None:
        try:
            messages = self._connection.recv()
        except (EOFError, OSError):
            self._lose()
            return
        for message in messages:
            if isinstance(message, State):
                self.state = message
            elif (inbox := self._waiting.get(message.number)) is not None:
                inbox.put_nowait(message)

    def _lose(self) -> None:
        """A process has ended: so do all requests, and the server."""
        if self.is_gone:
            return
        self.is_gone = True
        for source in (self._connection.fileno(), *(child.sentinel for child in self._children)):
            self._loop.remove_reader(source)
        for inbox in {*self._waiting.values()}:
            inbox.put_nowait(Gone())
        signal.raise_signal(signal.SIGTERM)

    def _write(self) -> None:
        # In a thread of its own: the pipe may be full while a step runs.
        while (messages := self._outgoing.get()) is not None:
            try:
                self._connection.send(messages)
            except OSError:
                return


def _checked(message: Any) -> Any:
    """The message; raises what it tells."""
    if isinstance(message, Gone):
        raise message
    if isinstance(message, Ended) and message.error is not None:
        name, sentence = message.error
        raise device.ERRORS.get(name, RuntimeError)(sentence)
    return message


Ours = tuple[Connection, socket.socket]


def _close(ours: Ours) -> None:
    """Close what is the server's: its end of the pipe, and its socket, which would stay open."""
    for each in ours:
        each.close()


def _child(ours: Ours, *arguments: Any) -> None:
    _close(ours)
    device.main(*arguments)


def _begin_texts(ours: Ours, served: Mapping[str, Served]) -> None:
    _close(ours)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    models.begin(served)
