"""Hypotheses as a search keeps them, and the tokens that must not follow them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


class Hypotheses:
    """Random hypotheses, each at a position of its own; entries of later positions are invalid.

    Attributes:
        texts: the tokens of each, with the newest.
        tensors: tokens, places, ancestry and past_tokens, as ``ops.block_repeats`` reads them.
    """

    def __init__(
        self, source: random.Random, rows: int, positions: int, words: int, device: str = "cpu"
    ) -> None:
        room = rows + 2
        ancestry = torch.full((positions, room), -(2**30))
        past = torch.full((positions, room), 2**30)
        lengths = [source.randint(1, positions) for _ in range(rows)]
        self.texts = [[source.randrange(words) for _ in range(length)] for length in lengths]
        for position in range(positions):
            holders = source.sample(range(room), rows)
            for row, (holder, text) in enumerate(zip(holders, self.texts, strict=True)):
                if position < len(text) - 1:
                    ancestry[position, row], past[position, holder] = holder, text[position]
        newest = torch.tensor([text[-1] for text in self.texts])
        places = torch.tensor([len(text) - 1 for text in self.texts])
        self.tensors = [x.int().to(device) for x in (newest, places, ancestry, past)]

    def of(self, rows: int) -> list[Tensor]:
        """The tensors for the first rows."""
        newest, places, *buffers = self.tensors
        return [newest[:rows], places[:rows], *buffers]

    def blocked(self, size: int, always: Sequence[int], words: int) -> Tensor:
        """Which tokens must not follow: bool [N, V], on the CPU."""
        found = torch.zeros(len(self.texts), words, dtype=torch.bool)
        found[:, list(always)] = True
        for row, text in enumerate(self.texts):
            for start in range(len(text) - size + 1 if size else 0):
                *first, last = text[start : start + size]
                if first == text[len(text) - size + 1 :]:
                    found[row, last] = True
        return found
