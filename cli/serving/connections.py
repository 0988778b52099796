"""HTTP connections of the server, by uvicorn's parser that is compiled."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The head of a request: what precedes its body. It must be complete after so many seconds, and
# before so many further bytes have arrived: the parser itself has no bound.
SECONDS = 30.0
_BYTES = 1 << 16


class Connection(HttpToolsProtocol):
    """Closes when the head of a request does not arrive in time, or does not end."""

    _head: int | None  # bytes of one that has not ended
    _late: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._late.cancel()
        self._begin_head()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._late.cancel()
        self._head = None

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
            if self._head > _BYTES:
                self.send_400_response("The head of the request is too long.")
                return
        super().data_received(data)

    def _begin_head(self) -> None:
        self._head = 0
        self._late = self.loop.call_later(SECONDS, self.transport.close)
