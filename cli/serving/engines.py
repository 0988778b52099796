"""The models behind the server, which can be loaded again while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving.messages import Answer, Model, Plan, State
from lightseq_fairseq.cli.serving.processes import Gone, Processes


class Engines:
    """Waits until the models are loaded.

    Attributes:
        models: what is served.
        is_gone: whether a process has ended that the server needs.
        is_ready: whether each model has answered a text.

    Raises:
        UserError: the models cannot be served.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._current = Processes(plan, self._lose)
        self._reloads = asyncio.Lock()
        self.is_gone = self.is_ready = False

    @property
    def models(self) -> dict[str, Model]:
        return self._current.models

    @property
    def state(self) -> State | None:
        """The last one, None before the first."""
        return self._current.state

    async def connect(self) -> None:
        """Connect to the running event loop; call this first."""
        await self._current.connect()

    async def warm_up(self) -> None:
        """Let each model answer a text."""
        await self._current.warm_up()
        self.is_ready = True

    async def reload(self) -> None:
        """Load the models again. Requests that come after that get the new ones.

        Raises:
            UserError: they cannot be served; those of before stay.
        """
        async with self._reloads:
            start = asyncio.get_running_loop().run_in_executor
            processes = await start(None, Processes, self._plan, lambda: None)
            await processes.connect()
            try:
                await processes.warm_up()
            except Gone:
                raise UserError("The new processes have ended: see the log.") from None
            except BaseException:
                processes.kill()
                raise
            old, self._current = self._current, processes
            processes.lost = self._lose
            old.retire()

    def kill(self) -> None:
        """End the processes; call this last."""
        self._current.kill()

    async def answers(
        self, name: str, texts: Sequence[Any], options: Mapping[str, Any],
        seconds: float | None = None,
    ) -> list[Any]:  # fmt: skip
        """See `Processes.answers`."""
        return await self._current.answers(name, texts, options, seconds)

    async def stream(
        self, name: str, text: str, options: Mapping[str, Any], seconds: float | None = None
    ) -> AsyncGenerator[Answer, None]:
        """See `Processes.stream`."""
        grown = self._current.stream(name, text, options, seconds)
        async with contextlib.aclosing(grown):
            async for answer in grown:
                yield answer

    def _lose(self) -> None:
        """The server ends, too."""
        self.is_gone, self.is_ready = True, False
        signal.raise_signal(signal.SIGTERM)
