"""What a search has found, as fairseq's generators give it.

All hypotheses come to the host in one copy. Most are never looked at, so the tensors of each are
made when somebody asks for them.

Letters: B sentences, M columns of results (beam of them a sentence), P positions.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import islice, repeat

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.errors import UserError
from lightseq_fairseq.generation.memory import Memory

_PARTS = ("tokens", "score", "attention", "alignment", "positional_scores")


class _Batch:
    """The hypotheses of a batch, a row each.

    Args:
        block: int32 [M, 2 + 2 * P], see ``_fetched``.
    """

    def __init__(self, block: Tensor) -> None:
        positions = block.shape[1] // 2 - 1
        numbers, reals = block.numpy(), block.view(torch.float32).numpy()
        self._lengths, self._totals = numbers[:, 0].copy(), reals[:, 1].copy()
        self._tokens = numbers[:, 2 : 2 + positions].astype(np.int64)
        self._scores = reals[:, 2 + positions :].copy()
        self._scores[:, 1:] -= reals[:, 2 + positions : -1]

    def ranked(self, beam: int) -> tuple[list[int], list[int]]:
        """The rows that are results, sentence by sentence, best first; how many a sentence has."""
        found = self._lengths > 0
        ranks = np.where(found, -self._totals, np.inf).reshape(-1, beam)
        order = ranks.argsort(axis=1, kind="stable")
        rows = (order + np.arange(0, len(found), beam)[:, None]).ravel()
        return rows[found[rows]].tolist(), found.reshape(-1, beam).sum(1).tolist()

    def part(self, name: str, row: int) -> Tensor:
        if name == "tokens":
            return torch.from_numpy(self._tokens[row, : self._lengths[row]])
        if name == "score":
            return torch.from_numpy(self._totals[row : row + 1])[0]
        if name == "positional_scores":
            return torch.from_numpy(self._scores[row, : self._lengths[row]])
        return torch.empty(0)


class Hypothesis(MutableMapping[str, Tensor]):
    """A hypothesis of L tokens, the end included: fairseq's dict, except that it is none.

    tokens int64 [L], score float32 [], positional_scores float32 [L]; attention and alignment are
    empty. All are on the CPU.
    Source: ``finalize_hypos`` of ``fairseq.sequence_generator.SequenceGenerator``.
    """

    __slots__ = ("_batch", "_made", "_row")

    def __init__(self, batch: _Batch, row: int) -> None:
        self._batch, self._row = batch, row
        self._made: dict[str, Tensor | None] | None = None

    @property
    def _parts(self) -> dict[str, Tensor | None]:
        """All names, and None where nobody has asked yet."""
        if self._made is None:
            self._made = dict.fromkeys(_PARTS)
        return self._made

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        if part is None:
            part = self._parts[name] = self._batch.part(name, self._row)
        return part

    def __setitem__(self, name: str, part: Tensor) -> None:
        self._parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return repr(dict(self))


def results(
    memory: Memory, sentences: int, positions: int, beam: int, stream: torch.cuda.Stream | None
) -> list[list[Hypothesis]]:
    """The results of each sentence, best first: all that ``ops.beam_advance`` has kept.

    positions: P, the longest result. stream: in whose order the device is to be asked.
    Raises UserError where a sentence has none.
    """
    batch = _Batch(_fetched(memory, sentences * beam, positions, stream))
    rows, numbers = batch.ranked(beam)
    if 0 in numbers:
        raise UserError(
            "a sentence has no translation of a finite score: the model's output is not a number, "
            "which a diverged training or an overflow of --fp16 leaves behind."
        )
    hypotheses = map(Hypothesis, repeat(batch), rows)
    return [list(islice(hypotheses, number)) for number in numbers]


def _fetched(
    memory: Memory, count: int, positions: int, stream: torch.cuda.Stream | None
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
