"""What a search has found, as fairseq's generators give it.

The host makes the hypotheses while the encoder still works, and learns of all of them in one copy.
Most are never looked at, so tensors are made when somebody asks for them: then for the hypotheses
of the same rank of all sentences at once, as who reads the best of one reads that of each.

Letters: B sentences, M = B * beam hypotheses at most, P positions.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.errors import UserError
from lightseq_fairseq.generation.search_buffers import SearchBuffers

_PARTS = ("tokens", "score", "attention", "alignment", "positional_scores")


class _Rank(dict[str, Sequence[Tensor]]):
    """The hypotheses of one rank: by name their parts, sentence by sentence, once asked for."""

    def learn(self, block: np.ndarray, rows: np.ndarray) -> None:
        """block: what ``_fetched`` gives. rows: int64 [B], where in it they stand."""
        self._block, self._rows = block, rows

    def __missing__(self, name: str) -> Sequence[Tensor]:
        self[name] = made = self._make(name)
        return made

    def _make(self, name: str) -> Sequence[Tensor]:
        found = self._block[self._rows]
        lengths, reals, positions = found[:, 0], found.view(np.float32), found.shape[1] // 2 - 1
        if name == "score":
            return torch.from_numpy(reals[:, 1].copy()).unbind()
        if name == "tokens":
            padded = found[:, 2 : 2 + positions].astype(np.int64)
        elif name == "positional_scores":
            padded = np.diff(reals[:, 2 + positions :], axis=1, prepend=np.float32(0))
        elif name in _PARTS:
            return torch.empty(len(found), 0).unbind()
        else:
            raise KeyError(name)
        packed = padded[np.arange(positions) < lengths[:, None]]
        return torch.from_numpy(packed).split(lengths.tolist())


class Hypothesis(MutableMapping[str, Tensor]):
    """A hypothesis of L tokens, the end included: fairseq's dict, except that it is none.

    tokens int64 [L], score float32 [], positional_scores float32 [L]; attention and alignment are
    empty. All are on the CPU. Copies, and what is unpickled, are dicts.
    Source: ``finalize_hypos`` of ``fairseq.sequence_generator.SequenceGenerator``.
    """

    __slots__ = ("_own", "_rank", "_sentence")

    def __init__(self, rank: _Rank, sentence: int) -> None:
        self._rank, self._sentence = rank, sentence
        self._own: dict[str, Tensor] | None = None  # instead of the rank's, once one was changed

    def __getitem__(self, name: str) -> Tensor:
        if self._own is None:
            return self._rank[name][self._sentence]
        return self._own[name]

    def _changed(self) -> dict[str, Tensor]:
        if self._own is None:
            self._own = dict(self)
        return self._own

    def __setitem__(self, name: str, part: Tensor) -> None:
        self._changed()[name] = part

    def __delitem__(self, name: str) -> None:
        del self._changed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_PARTS if self._own is None else self._own)

    def __len__(self) -> int:
        return len(_PARTS if self._own is None else self._own)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # Clones: each tensor lies in one with those of the other sentences.
        return dict, ({name: part.clone() for name, part in self.items()},)


class Results:
    """The results of a search: made while it runs, told what they are when it has ended.

    Args:
        sentences, beam: B, and how many results each has, as a rule.
    """

    def __init__(self, sentences: int, beam: int) -> None:
        self._ranks = [_Rank() for _ in range(beam)]
        self._of_sentences = [
            [Hypothesis(rank, sentence) for rank in self._ranks] for sentence in range(sentences)
        ]

    def fetch(
        self, memory: SearchBuffers, positions: int, stream: torch.cuda.Stream | None
    ) -> list[list[Hypothesis]]:
        """Those of each sentence, best first: all that ``ops.beam_advance`` has kept.

        positions: P, the longest result. stream: in whose order the device is to be asked.
        Raises UserError where a sentence has none.
        """
        sentences, beam = len(self._of_sentences), len(self._ranks)
        # A copy, since users may keep results, and pinned memory is to serve the next batch.
        block = _fetched(memory, sentences * beam, positions, stream).numpy().copy()
        found = block[:, 0] > 0
        order = np.where(found, -block[:, 1].view(np.float32), np.inf).reshape(sentences, beam)
        rows = order.argsort(axis=1, kind="stable") + np.arange(0, len(block), beam)[:, None]
        for rank, its_rows in zip(self._ranks, rows.T, strict=True):
            rank.learn(block, its_rows)
        if not found.all():
            self._keep(found.reshape(sentences, beam).sum(1).tolist())
        return self._of_sentences

    def _keep(self, numbers: list[int]) -> None:
        """So many of each sentence."""
        if 0 in numbers:
            raise UserError(
                "a sentence has no translation of a finite score: the model's output is not a "
                "number, which a diverged training or an overflow of --fp16 leaves behind."
            )
        for each, number in zip(self._of_sentences, numbers, strict=True):
            del each[number:]


def _fetched(
    memory: SearchBuffers, count: int, positions: int, stream: torch.cuda.Stream | None
) -> Tensor:
    """The first columns as rows of one block on the CPU, int32 [M, 2 + 2 * P], by one copy.

    Of each: its length, its score, its tokens, its scores up to each of them. Scores are bits of
    float32.
    """
    with torch.cuda.stream(stream):
        block = torch.cat(
            [
                memory.lengths[:count, None],
                memory.totals[:count, None].view(torch.int32),
                memory.hypothesis_tokens[:positions, :count].t(),
                memory.hypothesis_scores[:positions, :count].t().view(torch.int32),
            ],
            1,
        ).to("cpu", non_blocking=True)
    if stream is not None:
        stream.synchronize()
    return block
