"""The settings of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightseq_fairseq.ops.beam_advance import Stopping

# transformers' values of early_stopping.
STOPPING = {True: Stopping.FULL, False: Stopping.CURRENT, "never": Stopping.LONGEST}


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search; names and meanings are those of fairseq's generators.

    Attributes:
        beam: hypotheses, and results, per sentence.
        pad, eos, unk, min_len, unk_penalty, temperature: see ``ops.beam_candidates``.
        length_penalty, groups, diversity: see ``ops.beam_advance``.
        sampled, topk, topp: sample the tokens, see ``ops.beam_sample``. With both, topp is a share
            of the probability of the topk best.
        no_repeat_ngram: see ``ops.block_repeats``; 0 blocks nothing.
        early_stopping: one of `STOPPING`, for the rules of transformers: see ``Stopping``. Then a
            forced token adds nothing to a score. None: fairseq's rules.
        blocked: tokens that no result has.
        renormalizes: the probabilities of the tokens that are not blocked, not repeated n-grams and
            not an eos before ``min_len`` add up to 1. Otherwise these stay as they are.
        forces_eos: results of the greatest length end with eos. Otherwise, by transformers' rules
            only, these end with any token, see ``ends.end_all``.
    """

    beam: int
    pad: int
    eos: int
    unk: int
    min_len: int = 1
    unk_penalty: float = 0.0
    temperature: float = 1.0
    length_penalty: float = 1.0
    groups: int = 1
    diversity: float = 0.0
    sampled: bool = False
    topk: int = 0
    topp: float = 0.0
    no_repeat_ngram: int = 0
    early_stopping: bool | str | None = None
    blocked: tuple[int, ...] = ()
    renormalizes: bool = False
    forces_eos: bool = True

    @property
    def stopping(self) -> Stopping:
        """When a sentence ends. As in transformers, one hypothesis ends by its first eos."""
        if self.early_stopping is None or self.beam == 1:
            return Stopping.FIRST
        found = STOPPING[self.early_stopping]
        # Without a reward for length, no total of a result exceeds that of the current length.
        shrinks = found == Stopping.LONGEST and self.length_penalty <= 0
        return Stopping.CURRENT if shrinks else found

    @property
    def blocks(self) -> bool:
        """Whether tokens are blocked after the logits, see ``ops.block_repeats``."""
        return bool(self.no_repeat_ngram or self.blocked or (self.renormalizes and self.min_len))

    def of_tokens(self) -> dict[str, Any]:
        """The arguments that ``ops.beam_candidates`` and ``ops.beam_sample`` have in common."""
        names = ("pad", "eos", "unk", "min_len", "unk_penalty", "temperature")
        return {name: getattr(self, name) for name in names}
