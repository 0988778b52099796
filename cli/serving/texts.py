"""A process of texts: texts become requests of the device, and what it has found becomes texts.

So this work stops neither the server nor the device.
"""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving.log import LOGGER
from lightseq_fairseq.cli.serving.messages import Answer, Found, Worked, told
from lightseq_fairseq.cli.serving.models import Searched, Served


class Texts:
    """The functions that a ``messages.Work`` names.

    Args:
        served: the models by their names, on the CPU.
    """

    def __init__(self, served: Mapping[str, Served]) -> None:
        self._served = served

    def asked(self, name: str, texts: Sequence[Any], options: Mapping[str, Any]) -> list[bytes]:
        """What the device is to compute for each text, see ``Served.asked``.

        They are bytes, since the server only passes them on.
        """
        return [pickle.dumps(self._served[name].asked(text, options)) for text in texts]

    def answers(
        self, name: str, asked: Sequence[bytes], found: Sequence[Any], options: Mapping[str, Any]
    ) -> list[Any]:
        """What the texts have become, see ``Searched.answer``."""
        served = self._served[name]
        assert isinstance(served, Searched)
        pairs = zip(map(pickle.loads, asked), found, strict=True)
        return [served.answer(*pair, options) for pair in pairs]

    def grown(
        self, name: str, asked: bytes, tokens: Sequence[int], options: Mapping[str, Any]
    ) -> Answer:
        """What a text has become so far, with the tokens that follow it."""
        served, request = self._served[name], pickle.loads(asked)
        assert isinstance(served, Searched)
        tokens = [*request.tokens, *tokens]
        found = Found(tokens, 0.0, [0.0] * len(tokens))
        return served.answer(request, [found], options)._replace(is_last=False)


def main(served: Mapping[str, Served], connection: Connection) -> None:
    """The process: answers each ``messages.Work``, in their order, until the connection closes."""
    warnings.simplefilter("ignore")  # such as those of unknown words, for each text
    with contextlib.suppress(EOFError, ConnectionError):
        _answer(Texts(served), connection)


def _answer(texts: Texts, connection: Connection) -> NoReturn:
    while True:
        work = connection.recv()
        result, error = None, None
        try:
            result = getattr(texts, work.function)(*work.arguments)
        except Exception as its:
            error = told(its)
            if not isinstance(its, UserError):
                LOGGER.exception("a text has failed")
        connection.send(Worked(work.number, result, error))
