"""The results of a search, in the form of fairseq's generators.

The host creates the hypothesis objects while the encoder still runs, and later fetches all results
in one copy. Most of them are never read, so tensors are created on first access. They are then
created for the hypotheses of one rank (such as the best) of all sentences: a caller who reads the
best hypothesis of one sentence usually reads the best of every sentence.

Shapes: B = sentences of a batch, M = B * beam hypotheses at most, P = positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation.search_buffers import SearchBuffers

_PARTS = ("tokens", "score", "attention", "alignment", "positional_scores")


class _Rank(dict[str, Sequence[Tensor]]):
    """The hypotheses of one rank (such as the best ones) of all sentences.

    Maps the name of a part to one tensor per sentence, created on first access.
    """

    def learn(self, block: np.ndarray, rows: np.ndarray) -> None:
        """block: the result of ``_fetched``. rows: int64 [B], the rows of these hypotheses."""
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


class LazyHypothesis(MutableMapping[str, Tensor]):
    """A hypothesis of L tokens including eos; behaves like fairseq's dict, but is not a dict.

    tokens int64 [L], score float32 [], positional_scores float32 [L]; attention and alignment are
    empty. All are on the CPU. Copying or unpickling gives a real dict.
    Source: ``finalize_hypos`` of ``fairseq.sequence_generator.SequenceGenerator``.
    """

    __slots__ = ("_own", "_rank", "_sentence")

    def __init__(self, rank: _Rank, sentence: int) -> None:
        self._rank, self._sentence = rank, sentence
        self._own: dict[str, Tensor] | None = None  # replaces the rank's parts after a change

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
        # Clone: each tensor is a view of a storage that holds all sentences.
        return dict, ({name: part.clone() for name, part in self.items()},)


class Fetched:
    """Results of some sentences on their way to the host, which does not wait for them.

    Args:
        rows: of the results in the buffers: a slice, or integers.
        positions: P, the length of the longest result.
        stream: the stream of the copy; None for the CPU.
    """

    def __init__(
        self, memory: SearchBuffers, rows: slice | np.ndarray, positions: int,
        stream: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        with torch.cuda.stream(stream):
            places = rows if isinstance(rows, slice) else memory.sent(rows).long()
            self._block = _fetched(memory, places, positions)
        self._copied = None if stream is None else stream.record_event()

    @property
    def is_complete(self) -> bool:
        """Whether the results are on the host."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        """Wait until they are on the host."""
        if self._copied is not None:
            self._copied.synchronize()

    @functools.cached_property
    def block(self) -> np.ndarray:
        """The result of ``_fetched``; waits for it."""
        self.wait()
        # Copy, since users may keep results while the next search reuses the pinned memory.
        copied = self._block.numpy().copy()
        del self._block
        return copied


class Results:
    """The results of a batch of a search; create it while the search runs, let it `take` them when
    all of its sentences have ended, and read them at the end.

    Args:
        sentences, beam: B, and the results per sentence (a sentence may get fewer).
    """

    def __init__(self, sentences: int, beam: int) -> None:
        self._ranks = [_Rank() for _ in range(beam)]
        self._of_sentences = [
            [LazyHypothesis(rank, sentence) for rank in self._ranks]
            for sentence in range(sentences)
        ]

    def take(self, fetched: Fetched, first: int) -> None:
        """first: the row of ``fetched`` that is the first result."""
        self._fetched, self._first = fetched, first

    @property
    def is_complete(self) -> bool:
        """Whether `read` would not wait; call it after `take`."""
        return self._fetched.is_complete

    def read(self) -> list[list[LazyHypothesis]]:
        """The results of each sentence, best first.

        Raises:
            UserError: a sentence has no result.
        """
        sentences, beam = len(self._of_sentences), len(self._ranks)
        block, first = self._fetched.block, self._first
        del self._fetched
        mine = block[first : first + sentences * beam]
        found = mine[:, 0] > 0
        order = np.where(found, -mine[:, 1].view(np.float32), np.inf).reshape(sentences, beam)
        rows = (
            order.argsort(axis=1, kind="stable")
            + np.arange(first, first + len(mine), beam)[:, None]
        )
        for rank, its_rows in zip(self._ranks, rows.T, strict=True):
            rank.learn(block, its_rows)
        if not found.all():
            self._keep(found.reshape(sentences, beam).sum(1).tolist())
        return self._of_sentences

    def _keep(self, numbers: list[int]) -> None:
        """Keep only the first ``numbers[b]`` results of sentence b."""
        if 0 in numbers:
            raise UserError(
                "A sentence has no translation with a finite score: the model "
                "computes NaN. Either training has diverged (use an earlier checkpoint), or --fp16 "
                "overflows (remove it)."
            )
        for each, number in zip(self._of_sentences, numbers, strict=True):
            del each[number:]


class Newest:
    """The newest token of each slot after a step, on its way to the host.

    Args:
        rows: of the first hypothesis of each slot.
        numbers: int64 [slots], the sentences, negative for none.
    """

    def __init__(self, memory: SearchBuffers, rows: slice, numbers: np.ndarray) -> None:
        self._tokens = memory.tokens[rows].to("cpu", non_blocking=True, copy=True)
        on_gpu = memory.device.type == "cuda"
        self._copied = torch.cuda.current_stream().record_event() if on_gpu else None
        self._numbers = numbers.tolist()

    def read(self) -> dict[int, int]:
        """The token of each sentence; waits for the step."""
        if self._copied is not None:
            self._copied.synchronize()
        found = zip(self._numbers, self._tokens.tolist(), strict=False)
        return {number: token for number, token in found if number >= 0}


def _fetched(memory: SearchBuffers, rows: slice | Tensor, positions: int) -> Tensor:
    """Some hypotheses in one block on the CPU, int32 [M, 2 + 2 * P], by one copy.

    Each row: length, score, tokens, cumulative score up to each token. Scores are stored as their
    float32 bits.
    """
    return torch.cat(
        [
            memory.lengths[rows, None],
            memory.totals[rows, None].view(torch.int32),
            memory.hypothesis_tokens[rows, :positions],
            memory.hypothesis_scores[rows, :positions].view(torch.int32),
        ],
        1,
    ).to("cpu", non_blocking=True)
