"""lightseq-serve as a model of NVIDIA's Triton, by its Python backend.

A request has the path of an endpoint and its JSON; the response is the endpoint's answer. A stream
of /v1/completions is several responses.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from lightseq_fairseq.cli.serve import engines_of
from lightseq_fairseq.cli.serving.app import application

_POLLS = 0.05  # seconds between two questions whether a request was cancelled


class TritonPythonModel:
    """What Triton makes of this file."""

    def initialize(self, args: dict[str, str]) -> None:
        settings = json.loads(args["model_config"])
        command = settings["parameters"]["command"]["string_value"]
        self._app = application(*engines_of(shlex.split(command)))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._run(self._lifespan.__aenter__()).result()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._run(self._answer(request, request.get_response_sender()))

    def finalize(self) -> None:
        self._run(self._lifespan.__aexit__(None, None, None)).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _answer(self, request: Any, sender: Any) -> None:
        path, body = (
            triton.get_input_tensor_by_name(request, name).as_numpy().flat[0]
            for name in ("PATH", "BODY")
        )
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path.decode(), "raw_path": path, "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
        }  # fmt: skip
        bodies, status = [body], 0

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            while not request.is_cancelled():
                await asyncio.sleep(_POLLS)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            is_last = not message.get("more_body", False)
            tensors = [
                triton.Tensor("STATUS", np.array([status], np.int32)),
                triton.Tensor("ANSWER", np.array([message.get("body", b"")], np.object_)),
            ]
            flags = triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
            sender.send(triton.InferenceResponse(tensors), flags)

        await self._app(scope, receive, send)
