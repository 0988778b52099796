"""Packed tokens to padded slots and back, for references that work on whole batches at once.

Shapes: T = packed tokens (rows), B = sentences, L = longest sentence, H = heads, D = head width.

Slots past the end of a sentence hold a copy of a real row, never uninitialised numbers. One extra
row of zeros at the end serves all packed rows without a slot: rows past the last sentence, and rows
whose sentence is empty on the other side of the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from .numerics import work_dtype

_KNOWN = "_lightseq_padding"
_MOST_KNOWN = 1 << 20  # elements of a tensor that is kept


def known(cu: Tensor, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """``make()``, or its earlier result: all layers of a pass need the same indices.

    cu: boundaries, on which the result depends, and with which it is kept until they are written.
    key: all else on which it depends. Do not write the result.
    """
    if cu.is_inference():  # such a tensor does not tell whether it was written
        return make()
    found: dict[Hashable, Tensor]
    version, found = getattr(cu, _KNOWN, (None, {}))
    if version != cu._version:
        found = {}
        setattr(cu, _KNOWN, (cu._version, found))
    result = found.get(key)
    if result is None:
        result = make()
        if result.numel() <= _MOST_KNOWN:
            found[key] = result
    return result


def padded_tokens(cu: Tensor, longest: int) -> Tensor:
    """Packed row of each slot [B, L]; slots past the end of a sentence repeat its last row."""
    return known(cu, ("tokens", longest), lambda: _padded_tokens(cu, longest))


def _padded_tokens(cu: Tensor, longest: int) -> Tensor:
    last = cu.diff().sub_(1).clamp_(min=0)
    position = torch.arange(longest, device=cu.device)
    tokens = cu[:-1, None] + torch.minimum(position, last[:, None])
    # An empty sentence uses the row that follows it; at the end, the last row of all.
    return tokens.clamp_(max=(cu[-1] - 1).clamp(min=0))


def pad(x: Tensor, cu: Tensor, longest: int, into: Tensor | None = None) -> Tensor:
    """x [T, H, D] -> [B * H * L + 1, D] in the working precision; the last row is zero.

    cu: boundaries of the sentences. longest: L.
    into: an earlier result of the same shape, to reuse its memory.
    """
    rows, heads, width = x.shape
    step = x.stride(0)
    if x.stride(1) != width or step % width:
        x, step = x.contiguous(), heads * width
    # View strided rows as rows of width D: one gather gives the order [B, H, L] without transpose.
    flat = x.as_strided(((rows - 1) * (step // width) + heads, width), (width, 1))

    def make() -> Tensor:
        head = torch.arange(heads, device=x.device)[:, None]
        tokens = padded_tokens(cu, longest)[:, None].long()
        return (tokens * (step // width) + head).view(-1)

    index = known(cu, ("rows", longest, heads, step // width), make)
    padded = x.new_empty((len(index) + 1, width), dtype=work_dtype(x)) if into is None else into
    if x.dtype == padded.dtype:
        torch.index_select(flat, 0, index, out=padded[:-1])
    else:
        padded[:-1] = flat.index_select(0, index)
    padded[-1].zero_()
    return padded


def slotted(padded: Tensor, longest: int) -> Tensor:
    """[B * H * L + 1, D] -> [B * H, L, D]."""
    return padded[:-1].view(-1, longest, padded.shape[1])


def slots_of(cu: Tensor, rows: int, heads: int, longest: int, seeing: Tensor) -> Tensor:
    """Slot of each packed row and head: [T * H], in [0, B * H * L); else B * H * L, the zeros.

    seeing: boundaries of the other side; rows whose sentence is empty there have no slot.
    """
    if seeing is not cu:  # the other side can be written as well
        return _slots_of(cu, rows, heads, longest, seeing)
    key = "slots", rows, heads, longest
    return known(cu, key, lambda: _slots_of(cu, rows, heads, longest, seeing))


def _slots_of(cu: Tensor, rows: int, heads: int, longest: int, seeing: Tensor) -> Tensor:
    row = torch.arange(rows, dtype=cu.dtype, device=cu.device)
    sentence = torch.bucketize(row, cu[1:], right=True)
    has_slot = sentence < len(cu) - 1
    sentence = sentence.clamp_(max=len(cu) - 2)
    has_slot &= seeing.diff()[sentence] > 0
    first = (sentence * heads * longest + (row - cu[sentence]))[:, None]
    slots = first + torch.arange(heads, device=cu.device) * longest
    nothing = (len(cu) - 1) * heads * longest
    return slots.masked_fill_(~has_slot[:, None], nothing).view(-1)
