"""The settings of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SearchOptions:
    """Settings of a search; names and meanings are those of fairseq's generators.

    Attributes:
        beam: hypotheses, and results, per sentence.
        pad, eos, unk, min_len, unk_penalty, temperature: see ``ops.beam_candidates``.
        length_penalty, groups, diversity: see ``ops.beam_advance``.
        sampled, topk, topp: sample the tokens, see ``ops.beam_sample``.
        no_repeat_ngram: see ``repeats.block``; 0 blocks nothing.
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

    def of_tokens(self) -> dict[str, Any]:
        """The arguments that ``ops.beam_candidates`` and ``ops.beam_sample`` have in common."""
        names = ("pad", "eos", "unk", "min_len", "unk_penalty", "temperature")
        return {name: getattr(self, name) for name in names}
