"""What the server's processes tell each other.

The server's own process reads no tensors, so this imports no torch: the server starts while others
import it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lightseq_fairseq.base.errors import Expired, Full, UserError
from lightseq_fairseq.generation.texts import Hypothesis, Predicted


class Plan(NamedTuple):
    """What is to be served, and where.

    models: the name and the path of each. flags: of lightseq-interactive, as options of Python.
    dtype: "float32", "bfloat16" or "float16". slots: sentences that are searched at a time; None:
    by the device. longest: tokens of a text, and of a result; None: what the model has. memory:
    GiB of the GPU; None: all. workers: processes of texts. logs_json: see ``log.set_up``.
    """

    models: tuple[tuple[str, str], ...]
    flags: dict[str, Any]
    dtype: str
    cpu: bool
    slots: int | None
    longest: int | None
    memory: float | None
    workers: int
    logs_json: bool


class Bounds(NamedTuple):
    """What a client may ask for.

    texts, characters: of a request, of all its texts. body: bytes. beam: hypotheses. seconds:
    until an answer. requests: at a time. key: that requests must have; None for none.
    """

    texts: int
    characters: int
    body: int
    beam: int
    seconds: float
    requests: int
    key: str | None


class Languages(NamedTuple):
    """Of a model that translates: from each of ``sources`` to each of ``targets``; empty if they
    are not known, so that it may be asked for all.

    usual: the pair of requests that name none; None: they must name them.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    usual: tuple[str, str] | None


class Model(NamedTuple):
    """What the server knows of a model.

    does: "translates", "continues" or "encodes". languages: None unless it translates.
    has_labels: whether it classifies. shown: for the log.
    """

    name: str
    does: str
    languages: Languages | None
    has_labels: bool
    shown: str


class Loaded(NamedTuple):
    """From the loader: the models are in memory; or, with ``error``, they cannot be served."""

    models: tuple[Model, ...]
    error: str | None = None


class Work(NamedTuple):
    """To a process of texts: call a function of ``cli.serving.texts``."""

    number: int
    function: str
    arguments: tuple[Any, ...]


class Worked(NamedTuple):
    """From a process of texts: what the function has returned, or its error's kind and sentence."""

    number: int
    result: Any
    error: tuple[str, str] | None


class Submit(NamedTuple):
    """To the device: search for these sentences, or encode them.

    numbers: one for each sentence, which the sender chooses. asked: see ``texts.asked``. seconds:
    until its deadline.
    """

    model: str
    numbers: list[int]
    asked: list[bytes]
    seconds: float | None
    streams: bool


class Cancel(NamedTuple):
    """To the device: end these sentences without results."""

    numbers: list[int]


class Found(NamedTuple):
    """A hypothesis: its tokens, its score, and the score of each token."""

    tokens: list[int]
    score: float
    token_scores: list[float]


class Encoded(NamedTuple):
    """What a text has become.

    found: an embedding, the bytes of float32 numbers; or what its head predicts. tokens: of the
    text, and 0.
    """

    found: bytes | Predicted
    tokens: tuple[int, int]


class Ended(NamedTuple):
    """From the device: a sentence has ended, with results, or with an error's kind and sentence.

    found: hypotheses, the best first; of an encoder the answer. waited, searched: seconds.
    """

    number: int
    found: list[Found] | Encoded
    error: tuple[str, str] | None = None
    waited: float = 0.0
    searched: float = 0.0


class Told(NamedTuple):
    """From the device: tokens that follow those told before."""

    number: int
    tokens: list[int]


class State(NamedTuple):
    """From the device: of each model the sentences that wait, those that are searched, and the
    slots; and the bytes that torch has on the GPU."""

    models: dict[str, tuple[int, int, int]]
    memory: int


class Answer(NamedTuple):
    """What a text has become.

    hypotheses: the best first; of a language model, what follows the prompt. is_cut: which of them
    have ended at the greatest length.
    tokens: of the text, and of all hypotheses. is_last: False while a stream goes on.
    """

    hypotheses: tuple[Hypothesis, ...]
    is_cut: tuple[bool, ...]
    tokens: tuple[int, int]
    is_last: bool = True


def told(error: Exception) -> tuple[str, str]:
    """The kind and the sentence of an error, as processes send it."""
    return type(error).__name__, str(error)


def raised(error: tuple[str, str]) -> Exception:
    """The error whose kind and sentence these are."""
    name, sentence = error
    kinds = {each.__name__: each for each in (Full, Expired, UserError)}
    return kinds.get(name, RuntimeError)(sentence)
