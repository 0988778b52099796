"""Runs an encoder over the texts that wait, as many as fit into a batch, by one thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.base.errors import Expired, Full, UserError
from lightseq_fairseq.cli.serving.messages import Encoded
from lightseq_fairseq.cli.serving.models import EncodedBy, Tokens
from lightseq_fairseq.generation.texts import Predicted

_TOKENS = 16384  # of a batch, with pads


@dataclass(eq=False)
class Text:
    """A text in an `Encoder`; its attributes are those of ``generation.engine.Ticket``.

    found: None until it is encoded.
    """

    asked: Tokens
    arrived: float
    deadline: float | None
    found: Encoded | None = None
    error: Exception | None = None
    began: float | None = None
    ended: float | None = None


class Encoder:
    """Encodes with one model; its methods are those of ``generation.engine.Engine``.

    Args:
        model: on its device.
        most: texts that wait, and those of a batch.
    """

    grown = ()

    def __init__(self, served: EncodedBy, model: Any, most: tuple[int, int]) -> None:
        self._served, self._model, self._most = served, model, most
        self.waiting: deque[Text] = deque()
        self.living: dict[Text, Text] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    @property
    def slots(self) -> int:
        return self._most[1]

    def submit(self, asked: Tokens, deadline: float | None, streams: bool) -> Text:
        """Take a text.

        Raises:
            Full: too many wait.
        """
        if streams:
            raise UserError("Only completions are streamed.")
        if len(self.waiting) >= self._most[0]:
            raise Full(f"{len(self.waiting)} texts wait: try it again later.")
        text = Text(asked, time.monotonic(), deadline)
        self.waiting.append(text)
        return text

    def cancel(self, text: Text) -> None:
        """Forget a text, if it waits."""
        if text in self.waiting:
            self.waiting.remove(text)

    @torch.no_grad()
    def advance(self) -> list[Text]:
        """Encode a batch; its texts, and those whose deadlines have passed."""
        now, longest = time.monotonic(), 0
        ended: list[Text] = []
        batch: list[Text] = []
        while self.waiting and len(batch) < self._most[1]:
            text = self.waiting[0]
            if text.deadline is not None and text.deadline <= now:
                seconds = now - text.arrived
                text.error = Expired(f"The request has not ended after {seconds:.1f} seconds.")
                ended.append(self.waiting.popleft())
                continue
            longest = max(longest, len(text.asked.tokens))
            kinds = {each.asked.classifies for each in batch} | {text.asked.classifies}
            if batch and ((len(batch) + 1) * longest > _TOKENS or len(kinds) > 1):
                break
            text.began = now
            batch.append(self.waiting.popleft())
        if batch:
            tokens = [torch.tensor(text.asked.tokens) for text in batch]
            compute = self._classes if batch[0].asked.classifies else self._features
            try:
                computed = [*compute(tokens)]
            except BaseException:
                self.waiting.clear()  # as an `Engine`, after an error it has no text left
                raise
            for text, found in zip(batch, computed, strict=True):
                text.found = Encoded(found, (len(text.asked.tokens), 0))
        for text in (*ended, *batch):
            text.ended = time.monotonic()
        return [*ended, *batch]

    def _classes(self, tokens: Sequence[Tensor]) -> Iterable[Predicted]:
        classifier = self._served.classifier
        assert classifier is not None
        return classifier.predictions(classifier.outputs(tokens))

    def _features(self, tokens: Sequence[Tensor]) -> Iterable[bytes]:
        """The mean of the features of each text, the bytes of C float32 numbers."""
        from fairseq.data.data_utils import collate_tokens

        pad = self._served.interface.task.source_dictionary.pad()
        device = next(self._model.parameters()).device
        batch = collate_tokens(tokens, pad).to(device)
        features, _ = self._model.encoder.extract_features(batch)
        lengths = (batch != pad).sum(1, keepdim=True)
        means = features.float().masked_fill(batch[..., None] == pad, 0).sum(1) / lengths
        return (row.tobytes() for row in means.cpu().numpy())
