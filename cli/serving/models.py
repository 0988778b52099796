"""A served model: texts become requests of an engine, and its results become texts.

This is the work of processes of their own, so that it stops neither the server nor the device.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.texts import Hypothesis
from lightseq_fairseq.python.language_model import LanguageModel
from lightseq_fairseq.python.pretrained import Pretrained, task_of
from lightseq_fairseq.python.translator import Translator

_KINDS: tuple[type[Pretrained], ...] = (Translator, LanguageModel)


class Asked(NamedTuple):
    """A ``generation.engine.Request`` of one sentence, as processes send it.

    Tensors would be sent through shared memory, which costs more than these few numbers.
    """

    tokens: list[int]
    forced: list[int] | None
    max_len: int
    options: SearchOptions
    first: int
    begun: int


class Found(NamedTuple):
    """A hypothesis, as processes send it: its tokens, score, and the score of each token."""

    tokens: list[int]
    score: float
    token_scores: list[float]


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


class Served:
    """A model that texts can be sent to.

    Attributes:
        name: by which requests name it. path: of its checkpoint.
        pretrained: on the CPU.
        languages: (source, target) of a translation model, else None.
    """

    def __init__(self, name: str, path: str, pretrained: Pretrained) -> None:
        self.name, self.path, self.pretrained = name, path, pretrained
        self.languages: tuple[str, str] | None = None
        if isinstance(pretrained, Translator):
            task = pretrained.configuration.task
            self.languages = str(task.source_lang), str(task.target_lang)

    @property
    def continues(self) -> bool:
        """Whether it is a language model, whose texts begin with their prompts."""
        return isinstance(self.pretrained, LanguageModel)

    def asked(self, text: str, options: Mapping[str, Any]) -> Asked:
        """What the engine is to search for a text.

        options: of a call of ``pretrained``; and "prefix", with which a translation begins.

        Raises:
            UserError: the text or an option cannot be used.
        """
        request = self.pretrained.request(text, _of_search(options))
        batch = request.batch
        forced = None if batch.forced is None else batch.forced[0].tolist()
        begun = request.begun
        if prefix := options.get("prefix"):
            forced = [*(forced or ()), *self.pretrained.target_tokens(prefix)]
            begun = len(forced)
        return Asked(
            batch.tokens[0].tolist(), forced, batch.max_len, request.options, request.first, begun
        )

    def answer(
        self, asked: Asked, found: Sequence[Found], options: Mapping[str, Any]
    ) -> Answer:  # fmt: skip
        """What the engine has found for ``asked``, as texts."""
        hypotheses = self.pretrained.texts(map(_as_fairseqs, found), _of_search(options))
        start = 0
        if self.continues:
            start = len(asked.tokens)
            prompt = self.pretrained.texts(
                [_as_fairseqs(Found(asked.tokens, 0.0, [0.0] * start))], _of_search(options)
            )[0].text  # fmt: skip
            hypotheses = tuple(
                replace(each, text=each.text.removeprefix(prompt)) for each in hypotheses
            )
        written = sum(len(each.tokens) - start - 1 for each in found)  # without eos
        cut = tuple(len(each.tokens) > asked.max_len for each in found)
        return Answer(hypotheses, cut, (len(asked.tokens), written))


def _of_search(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "prefix"}


def _as_fairseqs(found: Found) -> dict[str, Any]:
    import torch

    return {
        "tokens": torch.tensor(found.tokens),
        "score": torch.tensor(found.score),
        "positional_scores": torch.tensor(found.token_scores),
        "alignment": torch.empty(0),
    }


def load(name: str, path: str, options: Mapping[str, Any]) -> Served:
    """Load a model on the CPU.

    Raises:
        UserError: it cannot be used.
    """
    checkpoint = checkpoint_in(path)
    task = task_of(checkpoint)
    kinds = [kind for kind in _KINDS if task in kind.kind.tasks]
    if not kinds:
        raise UserError(
            f"{path} contains a model of --task {task}, but lightseq-serve has translation models "
            "and language models."
        )
    return Served(name, path, kinds[0].from_pretrained(checkpoint, device="cpu", **options))


# --- The processes of texts ----------------------------------------------------------------------

_SERVED: dict[str, Served] = {}


def begin(served: Mapping[str, Served]) -> None:
    """Call this first in a process that was forked with the models."""
    _SERVED.update(served)
    follow_parent()


def follow_parent() -> None:
    """End this process when its parent has ended, however that was."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def asked(name: str, texts: Sequence[str], options: Mapping[str, Any]) -> list[Asked]:
    """See `Served.asked`; for several texts."""
    return [_SERVED[name].asked(text, options) for text in texts]


def answers(
    name: str, asked: Sequence[Asked], found: Sequence[Sequence[Found]], options: Mapping[str, Any]
) -> list[Answer]:
    """See `Served.answer`; for several texts."""
    served = _SERVED[name]
    return [served.answer(*pair, options) for pair in zip(asked, found, strict=True)]
