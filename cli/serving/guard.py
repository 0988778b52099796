"""What the server refuses before it reads a request's JSON, and the form of its refusals."""

from __future__ import annotations

import asyncio
import json
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
_FORM = b"application/x-www-form-urlencoded"
_NUMBERS = ("alternatives",)  # fields of LibreTranslate's forms that are numbers
_KEY_IN_BODY = ("/translate",)  # as LibreTranslate's clients send it
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

    It is plain ASGI, since it must see a body before it is in memory. Forms become JSON.

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
        began, path, status = time.perf_counter(), scope["path"], 0
        logged: dict[str, Any] = {}
        scope["logged"] = logged

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
            has_key = path in _OPEN or self._has_key(headers, scope["query_string"])
            if not (has_key or path in _KEY_IN_BODY):
                raise _no_key()
            if self._running >= self.bounds.requests and path not in _FOR_ALL:
                raise Refused(
                    503, f"{self._running} requests are being answered: try it again later."
                )
            self._running += 1
            try:
                body = await self._body(receive)
                if headers.get(b"content-type", b"").startswith(_FORM):
                    # curl calls JSON a form if nobody names its type.
                    body = body if body.lstrip().startswith(b"{") else _as_json(path, body)
                    headers[b"content-type"] = b"application/json"
                    scope["headers"] = [*headers.items()]
                if not (has_key or self._is_key(_key_in(body))):
                    raise _no_key()
                await self.app(scope, _again(body, receive), counted)
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

    async def _body(self, receive: Receive) -> bytes:
        """All of the body; later messages say that the client has gone."""
        try:
            return await asyncio.wait_for(self._read(receive), _BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(408, "The body of the request did not arrive in time.") from None

    async def _read(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(499, "The client has closed the connection.")
            body += message.get("body", b"")
            if len(body) > self.bounds.body:
                raise _too_large(self.bounds)
            if not message.get("more_body"):
                return bytes(body)

    def _has_key(self, headers: Mapping[bytes, bytes], query: bytes) -> bool:
        given = headers.get(b"authorization", b"").decode("latin-1")
        words = given.split(maxsplit=1)[1:]  # Bearer of OpenAI, DeepL-Auth-Key of DeepL
        words += parse_qs(query.decode("latin-1")).get("key", [])  # Google's
        return self.bounds.key is None or any(map(self._is_key, words))

    def _is_key(self, word: str) -> bool:
        key = self.bounds.key
        return key is not None and secrets.compare_digest(word.encode(), key.encode())


def _no_key() -> Refused:
    says = 'The key is missing or wrong: send the header "Authorization: Bearer KEY".'
    return Refused(401, says)


def _again(body: bytes, receive: Receive) -> Receive:
    """``receive`` of a body that has been read."""
    bodies = [body]

    async def received() -> Message:
        return {"type": "http.request", "body": bodies.pop()} if bodies else await receive()

    return received


def _as_json(path: str, form: bytes) -> bytes:
    """The JSON of a form; what is no UTF-8 stays as it is."""
    try:
        fields: dict[str, Any] = parse_qs(form.decode(), keep_blank_values=True)
    except UnicodeDecodeError:
        return form
    lists = ("text",) if path.startswith("/v2/") else ()  # of DeepL
    for name, found in fields.items():
        if len(found) == 1 and name not in lists:
            (fields[name],) = found
            if name in _NUMBERS and found[0].isdigit():
                fields[name] = int(found[0])
    return json.dumps(fields).encode()


def _key_in(body: bytes) -> str:
    """LibreTranslate's field of the key, "" without one."""
    try:
        found = json.loads(body)
    except ValueError:
        return ""
    key = found.get("api_key") if isinstance(found, dict) else None
    return key if isinstance(key, str) else ""


def _too_large(bounds: Bounds) -> Refused:
    return Refused(413, f"The body of the request is larger than {bounds.body} bytes.")
