"""The processes that have loaded the models once, as the server's event loop uses them.

A request passes three: one of texts makes numbers of it, that of the device searches, and one of
texts makes texts of what it has found.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving.messages import (
    Answer,
    Cancel,
    Ended,
    Loaded,
    Plan,
    State,
    Submit,
    Told,
    Work,
    Worked,
    raised,
)

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by all processes but the server
_LENGTH = struct.Struct("!i")  # of a message, before it
_LOADER = "lightseq_fairseq.cli.serving.loader"  # imports torch, which the server does not need


class Gone(Exception):
    """A process has ended that the server needs."""


class Channel(asyncio.Protocol):
    """A pipe of ``multiprocessing`` to a process, in an event loop.

    got: is called with each message. lost: is called when the process has closed the pipe.
    """

    def __init__(self, got: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._got, self._lost = got, lost
        self._read = bytearray()
        self._unsent: list[bytes] = []

    async def connect(self, connection: Connection) -> None:
        """Take over an end of a pipe."""
        own = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self._loop = asyncio.get_running_loop()
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=own)

    def send(self, message: Any) -> None:
        """Send a message, with all others of this turn of the event loop."""
        data = pickle.dumps(message)
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += _LENGTH.pack(len(data)), data

    def close(self) -> None:
        """Close the pipe, which ends the process."""
        self._transport.close()

    def _flush(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        self._read += data
        while len(self._read) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                return
            message = pickle.loads(self._read[_LENGTH.size : end])
            del self._read[:end]
            self._got(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def prepare() -> None:
    """Start the process from which the others are forked, so that it imports torch meanwhile.

    They ignore signals that may be sent to all processes, such as by Ctrl-C: the server ends them.
    """
    multiprocessing.set_forkserver_preload([_LOADER])
    if threading.current_thread() is not threading.main_thread():  # of another's server
        forkserver.ensure_running()
        return
    before = [signal.signal(number, signal.SIG_IGN) for number in IGNORED]  # they inherit it
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in zip(IGNORED, before, strict=True):
            signal.signal(number, handler)


class Processes:
    """Starts the processes, and waits until they have loaded the models; see `prepare`.

    Attributes:
        models: what is served.
        state: the last one, None before the first.
        lost: is called once when one of them ends that should not.

    Raises:
        UserError: the models cannot be served.
    """

    def __init__(self, plan: Plan, lost: Callable[[], None]) -> None:
        self.lost = lost
        self.state: State | None = None
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe() for _ in range(1 + plan.workers)]
        ends = [other for _, other in pipes]
        self._connections = [own for own, _ in pipes]
        self._process = context.Process(target=_load, args=(plan, ends))
        self._process.start()
        for end in ends:
            end.close()
        try:
            loaded: Loaded = self._connections[0].recv()
            if loaded.error is not None:
                raise UserError(loaded.error)
        except BaseException as error:  # Ctrl-C, too
            self._process.kill()
            if isinstance(error, EOFError):
                raise UserError("The process that loads the models has ended.") from None
            raise
        self.models = {each.name: each for each in loaded.models}
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Any]] = {}
        self._calls = 0
        self._is_gone = self._ends = False

    async def connect(self) -> None:
        """Connect to the running event loop; call this first."""
        self._loop = asyncio.get_running_loop()
        _, *others = self._connections
        self._device = Channel(self._take, self._lose)
        self._texts = [Channel(self._hand, self._lose) for _ in others]
        for channel, each in zip((self._device, *self._texts), self._connections, strict=True):
            await channel.connect(each)
        self._busy = [0] * len(others)
        self._loop.add_reader(self._process.sentinel, self._end)

    async def warm_up(self) -> None:
        """Search for a sentence with each model: then the first request need not wait for it."""
        for name, each in self.models.items():
            options = {"classifies": False} if each.does == "encodes" else {}
            await self.answers(name, ["1"], options)

    def retire(self) -> None:
        """End the processes when they have answered what they were asked."""
        self._ends = True
        if self._calls == 0:
            self._close()

    def kill(self) -> None:
        """End the processes now."""
        self._is_gone = True
        self._process.kill()

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
        with self._called():
            asked = await self._in_texts("asked", name, texts, options)
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
            results = [found[number] for number in numbers]
            if self.models[name].does == "encodes":
                return results
            answers: list[Any] = await self._in_texts("answers", name, asked, results, options)
            return answers

    async def stream(
        self, name: str, text: str, options: Mapping[str, Any], seconds: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """The text of a language model as it grows; the last one is complete.

        Raises:
            See `answers`.
        """
        with self._called():
            asked = await self._in_texts("asked", name, [text], options)
            number = next(self._numbers)
            inbox: asyncio.Queue[Any] = asyncio.Queue()
            tokens: list[int] = []
            ended: Ended | None = None
            try:
                self._submit(Submit(name, [number], asked, seconds, streams=True), inbox)
                while ended is None:
                    messages = [_checked(await inbox.get())]
                    while not inbox.empty():
                        messages.append(_checked(inbox.get_nowait()))
                    for message in messages:
                        if isinstance(message, Ended):
                            ended = message
                        else:
                            tokens += message.tokens
                    if ended is None:
                        yield await self._in_texts("grown", name, asked[0], tokens, options)
                        continue
                    found = [ended.found]
                    (answer,) = await self._in_texts("answers", name, asked, found, options)
                    yield answer
            finally:
                self._forget([number], [] if ended is None else [number])

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if self._ends and self._calls == 0:
                self._close()

    async def _in_texts(self, function: str, *arguments: Any) -> Any:
        """What a function of `texts.Texts` returns, in the process that has the least to do."""
        if self._is_gone:
            raise Gone
        place = self._busy.index(min(self._busy))
        number = next(self._numbers)
        inbox = self._waiting[number] = asyncio.Queue()
        self._busy[place] += 1
        self._texts[place].send(Work(number, function, arguments))
        try:
            return _checked(await inbox.get()).result
        finally:
            self._busy[place] -= 1
            self._waiting.pop(number, None)

    def _submit(self, message: Submit, inbox: asyncio.Queue[Any]) -> None:
        if self._is_gone:
            raise Gone
        for number in message.numbers:
            self._waiting[number] = inbox
        self._device.send([message])

    def _forget(self, numbers: Sequence[int], ended: Any) -> None:
        """Cancel what has not ended."""
        known = [number for number in numbers if self._waiting.pop(number, None) is not None]
        left = [number for number in known if number not in ended]
        if left and not self._is_gone:
            self._device.send([Cancel(left)])

    def _take(self, messages: Sequence[State | Ended | Told]) -> None:
        for message in messages:
            if isinstance(message, State):
                self.state = message
            else:
                self._hand(message)

    def _hand(self, message: Ended | Told | Worked) -> None:
        if (inbox := self._waiting.get(message.number)) is not None:
            inbox.put_nowait(message)

    def _end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._lose()

    def _lose(self) -> None:
        """A process has ended: so do all calls."""
        if self._is_gone:
            return
        self._close()
        for inbox in {*self._waiting.values()}:
            inbox.put_nowait(Gone())
        self.lost()

    def _close(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            for channel in (self._device, *self._texts):
                channel.close()


def _load(plan: Plan, ends: Sequence[Connection]) -> None:
    from lightseq_fairseq.cli.serving import loader

    loader.main(plan, ends)


def _checked(message: Any) -> Any:
    """The message; raises what it tells."""
    if isinstance(message, Gone):
        raise message
    if not isinstance(message, Told) and message.error is not None:
        raise raised(message.error)
    return message
