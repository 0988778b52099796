"""Block tokens that would repeat an n-gram of their hypothesis, and those that are always blocked.

A blocked token gets the logit -inf. fairseq blocks tokens after the softmax: the probabilities of
the others stay as they are, and their sum is below 1. So the scores are lowered by as much as the
softmax of the new logits raises the probabilities.

Shapes: N = rows; V = vocabulary; P, R = positions and rows of the buffers of a search, see
`beam_advance`; K = tokens that are always blocked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_contiguous, check_rows
from .numerics import work_dtype
from .registry import Written, define


class BlockRepeats(NamedTuple):
    """The scores that go with the new logits, float32 [N]: `renormalizes` leaves them as they are.

    logits: [N, V], of the next token; -inf is written for blocked tokens. scores: float32 [N].
    blocked: int32 [K], in [0, V), each once.
    size: of an n-gram, at least 2; 0: repeats are allowed. The n-grams include the first token.
    temperature: the softmax is that of logits / temperature.
    tokens, places: int32 [N], newest token of each row and its position. ancestry, past_tokens:
    int32 [P, R], the row where a hypothesis has an earlier position, and the tokens there.
    A row of which all tokens are blocked gets the score -inf, and so does a row with a NaN, unless
    the scores stay.
    Source: fairseq.ngram_repeat_block.NGramRepeatBlock.
    """

    logits: Written
    scores: Tensor
    blocked: Tensor
    tokens: Tensor
    places: Tensor
    ancestry: Tensor
    past_tokens: Tensor
    size: int
    temperature: float
    renormalizes: bool

    def check(self, op: str) -> None:
        logits = self.logits
        check_rows(op, "logits", logits, ("N", "V"), FLOATS)
        rows = logits.shape[:1]
        check_contiguous(op, "scores", self.scores, rows, (torch.float32,), logits)
        ints: tuple[torch.dtype, ...] = (torch.int32,)
        check_contiguous(op, "blocked", self.blocked, ("K",), ints, logits)
        check_contiguous(op, "tokens", self.tokens, rows, ints, logits)
        check_contiguous(op, "places", self.places, rows, ints, logits)
        check_contiguous(op, "ancestry", self.ancestry, ("P", "R"), ints, logits)
        check_contiguous(op, "past_tokens", self.past_tokens, self.ancestry.shape, ints, logits)
        if self.size == 1 or self.size < 0:
            raise ValueError(f"{op}: size must be 0 or at least 2, got {self.size}")
        if self.temperature <= 0:
            raise ValueError(f"{op}: temperature must be positive, got {self.temperature}")

    def shape(self) -> Tensor:
        return torch.empty_like(self.scores)

    def reference(self) -> Tensor:
        logits, scores, blocked = self.logits, self.scores, self.blocked.long()
        before = None if self.renormalizes else self._log_sum()
        is_blocked = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        if self.size:
            tokens, repeats = self._ends()
            # The place of a token that repeats nothing is one behind the last column.
            wide = torch.nn.functional.pad(is_blocked, (0, 1))
            places = tokens.masked_fill(~repeats, logits.shape[1])
            is_blocked = wide.scatter_(1, places.t(), True)[:, :-1]
        is_blocked[:, blocked] = True
        logits.masked_fill_(is_blocked, -torch.inf)
        if before is None:
            return scores.clone()
        change = (self._log_sum() - before).float()
        return (scores + change).nan_to_num(-torch.inf, torch.inf, -torch.inf)

    def _ends(self) -> tuple[Tensor, Tensor]:
        """The last token of each n-gram, int64 [., N]; whether its others are the newest tokens."""
        rows, last = len(self.logits), self.size - 1
        step = self.places.long()
        positions = len(self.ancestry)
        position = torch.arange(positions, device=step.device)[:, None]
        # Entries of later positions are leftovers of other searches: their rows may not exist.
        ancestors = self.ancestry[:, :rows].long().masked_fill(position >= step, 0)
        tokens = self.past_tokens.gather(1, ancestors)
        tokens = torch.where(position == step, self.tokens, tokens)
        starts = max(positions - last, 0)  # of n-grams
        repeats = (position[:starts] + last <= step).expand(starts, rows)
        for offset in range(last):
            newest = tokens.gather(0, (step - (last - 1) + offset).clamp_min(0)[None])
            repeats = repeats & (tokens[offset : offset + starts] == newest)
        return tokens[last : last + starts].long(), repeats

    def _log_sum(self) -> Tensor:
        """log(sum(exp(logits / temperature))) of each row [N]; -inf if there is none."""
        logits = self.logits.to(work_dtype(self.logits))
        return (logits / self.temperature if self.temperature != 1.0 else logits).logsumexp(1)


block_repeats = define("block_repeats", BlockRepeats)
