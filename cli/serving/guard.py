"""What the server refuses before it has read a request, and the form of its refusals."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qs

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightseq_fairseq.cli.serving import log
from lightseq_fairseq.cli.serving.messages import Bounds
from lightseq_fairseq.cli.serving.metrics import Metrics

_RETRY = 1  # seconds after which a client may try again when too many requests wait
_BODY_SECONDS = 30.0  # in which the body of a request must arrive
_FOR_ALL = ("/health", "/ready", "/metrics")  # answered under any load
_OPEN = (*_FOR_ALL, "/docs", "/openapi.json", "/languages")  # without a key


class Refused(HTTPException):
    """A request that is not answered: its status, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(status, sentence)


def refusal(path: str, error: Refused) -> JSONResponse:
    """An error in the form of the API of its path."""
    sentence: Any = error.detail
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    if path.startswith("/v1/"):
        kind = kinds.get(
            error.status_code,
            "invalid_request_error" if error.status_code < 500 else "server_error",
        )
        sentence = {"message": sentence, "type": kind, "param": None, "code": None}
    if path.startswith("/language/"):
        sentence = {"code": error.status_code, "message": sentence}
    answer = {"message" if path.startswith("/v2/") else "error": sentence}
    headers = {"Retry-After": str(_RETRY)} if error.status_code in (429, 503) else None
    return JSONResponse(answer, error.status_code, headers)


class Guard:
    """Bounds the size of bodies and the time in which they arrive, asks for the key, and counts.

    It is plain ASGI, since it must see a body before it is in memory.

    Args:
        paths: those that are counted apart from others.
    """

    def __init__(
        self, app: ASGIApp, bounds: Bounds, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self.app, self.bounds, self.metrics, self.paths = app, bounds, metrics, paths
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, path, status, read = time.perf_counter(), scope["path"], 0, 0
        logged: dict[str, Any] = {}
        scope["logged"] = logged

        async def bounded() -> Message:
            nonlocal read
            if read < 0:  # the body is complete: what follows is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), _BODY_SECONDS)
            except asyncio.TimeoutError:
                raise Refused(408, "The body of the request did not arrive in time.") from None
            read += len(message.get("body", b""))
            if read > self.bounds.body:
                raise _too_large(self.bounds)
            if not message.get("more_body"):
                read = -1
            return message

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self.bounds.body:
                raise _too_large(self.bounds)
            self._ask_for_key(path, headers, scope["query_string"])
            if self._running >= self.bounds.requests and path not in _FOR_ALL:
                raise Refused(
                    503, f"{self._running} requests are being answered: try it again later."
                )
            self._running += 1
            try:
                await self.app(scope, bounded, counted)
            finally:
                self._running -= 1
        except Refused as error:
            await refusal(path, error)(scope, receive, counted)
        except asyncio.CancelledError:  # a second Ctrl-C
            if status == 0:
                await refusal(path, Refused(503, "The server is ending."))(scope, receive, counted)
        finally:
            known = path if path in self.paths else "other"
            seconds = time.perf_counter() - began
            self.metrics.requests.labels(known, str(status or 500)).inc()
            self.metrics.seconds.labels(known).observe(seconds)
            log.request(
                path=path, status=status or 500, seconds=round(seconds, 6),
                client=(scope["client"] or ("",))[0], **logged,
            )  # fmt: skip

    def _ask_for_key(self, path: str, headers: Mapping[bytes, bytes], query: bytes) -> None:
        key = self.bounds.key
        if key is None or path in _OPEN:
            return
        given = headers.get(b"authorization", b"").decode("latin-1")
        words = given.split(maxsplit=1)[1:]  # Bearer of OpenAI, DeepL-Auth-Key of DeepL
        words += parse_qs(query.decode("latin-1")).get("key", [])  # Google's
        if not any(secrets.compare_digest(word.encode(), key.encode()) for word in words):
            says = 'The key is missing or wrong: send the header "Authorization: Bearer KEY".'
            raise Refused(401, says)


def _too_large(bounds: Bounds) -> Refused:
    return Refused(413, f"The body of the request is larger than {bounds.body} bytes.")
