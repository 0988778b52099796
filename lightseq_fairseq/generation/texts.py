"""Results as text, of `lightseq_fairseq.Translator`, `LanguageModel` and `RobertaModel`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Hypothesis:
    """One translation of a sentence, or a prompt with one continuation.

    Attributes:
        text: the result, detokenized. Subwords are joined if ``remove_bpe`` or ``bpe`` asks
            for it. A D- line of the commands.
        score: log2 of its probability, divided by its length to the power ``lenpen`` (not divided
            with ``unnormalized``). Greater is better.
        words: the same text before ``tokenizer`` and ``bpe`` decode it; an H- line.
        tokens: the symbols of the dictionary that the model wrote, with ``</s>`` at the end.
        ids: the numbers of the tokens in the dictionary.
        token_scores: log2 of the probability of each token; a P- line.
        alignment: pairs (source token, target token), counted from 0; an A- line. None without
            ``print_alignment``.
    """

    text: str
    score: float
    words: str = field(repr=False)
    tokens: tuple[str, ...] = field(repr=False)
    ids: tuple[int, ...] = field(repr=False)
    token_scores: tuple[float, ...] = field(repr=False)
    alignment: tuple[tuple[int, int], ...] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Translation:
    """A sentence and its translations.

    Attributes:
        source: the sentence as the model reads it: ``<unk>`` stands for words that are not in the
            dictionary, and subwords are joined if ``remove_bpe`` asks for it. An S- line.
        hypotheses: ``nbest`` translations, the best first. Empty if
            ``skip_invalid_size_inputs_valid_test`` has left out a sentence that is too long.
        constraints: the target words that ``constraints`` has asked for; C- lines.
        seconds: the sentence's share of the time of its batch.
    """

    source: str
    hypotheses: tuple[Hypothesis, ...]
    constraints: tuple[str, ...] = ()
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Translation(text={self.text!r}, score={self.score:.4f})"

    @property
    def text(self) -> str:
        """The best translation; "" if there is none."""
        return self.hypotheses[0].text if self.hypotheses else ""

    @property
    def score(self) -> float:
        """The score of the best translation; minus infinity if there is none."""
        return self.hypotheses[0].score if self.hypotheses else -math.inf

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens of the best translation."""
        return self.hypotheses[0].tokens if self.hypotheses else ()


class Prediction(NamedTuple):
    """The class of a text, or of a pair of texts.

    Attributes:
        label: the most probable label, as the data have it.
        probability: of this label, from 0 to 1.
    """

    label: str
    probability: float


# A regression predicts numbers instead, one or several.
Predicted = Prediction | float | tuple[float, ...]
