"""Random bits of dropout: Philox-4x32 with 7 rounds (Salmon et al., SC 2011).

A bit is a pure function of (seed, micro-batch, site, row, column). Nothing is saved for backward,
which generates the same bits again. All kernels, code paths and devices give the same bits.

Activations:

counter = (column // 8, row, site, micro-batch)    key = (seed's low word, seed's high word)
The four output words are eight 16-bit numbers, low half first: number e of group g belongs to
column 8g + e. An element is kept if its number >= min(round(65536 * p), 65535), a 16-bit threshold.

Attention probabilities, of which there are many more, take half as many calls of the generator:

counter = (2w and 2w + 1, row, site, micro-batch)  for the columns 32w ... 32w + 31
Bit c of the eight output words is the number of column 32w + c, lowest bit first. An element is
kept if this 8-bit number >= the threshold 256 * p, which is rounded up or down by a number that is
drawn once for (seed, micro-batch, site), so that the drop rate is p on average.

Kept values are scaled by 1 / (1 - p).

Shapes: R = rows, G = groups of columns that take one call of the generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import Dropout
from .checks import check_dropout, check_tensor
from .numerics import work_dtype
from .registry import define

ROUNDS = 7
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
# Sign bits of the two 16-bit numbers in the lower half of an int64, and of those in the upper half.
_LOW_SIGNS = 0x80008000
_HIGH_SIGNS = (0x80008000 << 32) - (1 << 64)
_SIGNS = _LOW_SIGNS - (1 << 32)  # as int32
# Groups per block on a CPU: enough for two threads, few enough to stay in cache.
_GROUPS_PER_BLOCK = 1 << 15


def keep_mask(rng: Tensor, site: int, rows: Tensor, columns: int, p: float) -> Tensor:
    """Which elements dropout keeps: bool [len(rows), columns].

    rng: int64 [2] = (seed, micro-batch number). site: number of the dropout in the model.
    rows: int64 [R], row ids. A row of the mask depends only on its id, not on the other rows.
    """
    check_dropout("keep_mask", Dropout(p, rng, site), rows)
    check_tensor("keep_mask", "rows", rows, ("R",), (torch.int64,))
    mask = torch.empty((len(rows), columns), dtype=torch.bool, device=rng.device)
    for part, numbers in _blocks_of_numbers(rng, site, rows, columns):
        torch.ge(numbers, _least_kept(p), out=mask[part])
    return mask


def attention_keep_mask(rng: Tensor, site: int, rows: Tensor, columns: int, p: float) -> Tensor:
    """Which attention probabilities dropout keeps: bool [len(rows), columns].

    rows: int64 [R], row ids; a row is a query and head. columns: the keys of its sentence.
    Other arguments as in `keep_mask`.
    """
    check_dropout("attention_keep_mask", Dropout(p, rng, site), rows)
    check_tensor("attention_keep_mask", "rows", rows, ("R",), (torch.int64,))
    mask = torch.empty((len(rows), columns), dtype=torch.bool, device=rng.device)
    for part, bits in _blocks_of_attention_bits(rng, site, rows, columns, p):
        mask[part] = bits
    return mask


class DropoutMask(NamedTuple):
    """`keep_mask` of the rows 0 ... rows - 1, on rng's device: bool [rows, columns]."""

    rng: Tensor
    site: int
    rows: int
    columns: int
    p: float

    def check(self, op: str) -> None:
        check_dropout(op, Dropout(self.p, self.rng, self.site), self.rng)
        if self.rows < 0 or self.columns < 0:
            raise ValueError(
                f"{op}: rows and columns must be >= 0, got {self.rows} and {self.columns}"
            )

    def shape(self) -> Tensor:
        return self.rng.new_empty((self.rows, self.columns), dtype=torch.bool)

    def reference(self) -> Tensor:
        rows = torch.arange(self.rows, device=self.rng.device)
        return keep_mask(self.rng, self.site, rows, self.columns, self.p)


dropout_mask = define("dropout_mask", DropoutMask)


def drop(x: Tensor, dropout: Dropout) -> Tensor:
    """Apply the dropout to x [T, C] in place; return x."""
    if dropout.p > 0:
        for part, factor in dropout_factors(dropout, x.shape, x.dtype):
            x[part].mul_(factor)
    return x


def dropped(x: Tensor, dropout: Dropout) -> Tensor:
    """The dropout of x [T, C], a new tensor in the working precision."""
    return drop(x.to(work_dtype(x), copy=True), dropout)


def dropout_factors(
    dropout: Dropout, shape: Sequence[int], dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """Dropout factors (0 or 1 / (1 - p)) of a matrix of this shape, block by block.

    Yields (slice of the rows, their factors [rows of the slice, columns]). Apply each block before
    you ask for the next one, which overwrites it. On a GPU there is one block.
    """
    p, rng, site = dropout
    scale = 1.0 / (1.0 - p)
    if rng.is_cuda:  # one kernel if the compiled library is loaded
        mask = dropout_mask(rng, site, shape[0], shape[1], p)
        yield slice(0, len(mask)), mask.to(dtype).mul_(scale)
        return
    factors = torch.empty((0, shape[1]), dtype=dtype)
    for part, numbers in _blocks_of_numbers(rng, site, torch.arange(shape[0]), shape[1]):
        if len(factors) < len(numbers):
            factors = torch.empty(numbers.shape, dtype=dtype)
        # A comparison with a float output is several times faster than one via a bool tensor.
        yield part, torch.ge(numbers, _least_kept(p), out=factors[: len(numbers)]).mul_(scale)


def attention_dropout_factors(
    dropout: Dropout, columns: int, dtype: torch.dtype, rows: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """The factors of attention probabilities [len(rows), columns], see `dropout_factors`."""
    p, rng, site = dropout
    scale = 1.0 / (1.0 - p)
    for part, bits in _blocks_of_attention_bits(rng, site, rows, columns, p):
        yield part, bits.to(dtype).mul_(scale)


def uniforms(rng: Tensor, site: int, rows: Tensor, groups: Tensor) -> Tensor:
    """One number in (0, 1) for each row: float64 [len(rows)], (word 0 + 1/2) / 2^32 of a counter.

    rng, site, rows: as in `keep_mask`. groups: the counters' first words, integers [len(rows)].
    """
    seed, micro_batch = rng.unbind() if rng.is_cuda else rng.tolist()
    words = _signed_words(seed, micro_batch, site, rows, groups.long()[:, None])
    halves = words.view(torch.int16).view(len(rows), -1)[:, :2].double() + 32768
    return (halves[:, 1] * 65536 + halves[:, 0] + 0.5) / 2**32


def _least_kept(p: float) -> int:
    """Threshold as a signed 16-bit number: the smallest number that is kept."""
    return min(round(p * 65536), 65535) - 32768


def _blocks_of_numbers(
    rng: Tensor, site: int, rows: Tensor, columns: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows of a block, their signed numbers: int16 [rows of the block, columns])."""
    for part, numbers in _blocks(rng, site, rows, (columns + 7) // 8):
        yield part, numbers.view(torch.int16).view(len(numbers), -1)[:, :columns]


def _blocks_of_attention_bits(
    rng: Tensor, site: int, rows: Tensor, columns: int, p: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows of a block, 1 if kept, else 0: int32 [rows of the block, columns])."""
    threshold = _attention_threshold(rng, site, p)
    least = [-(threshold >> i & 1) for i in range(8)]  # all bits set, or none
    none_kept = -(threshold >> 8)
    shifts = torch.arange(32, device=rng.device, dtype=torch.int32)
    for part, numbers in _blocks(rng, site, rows, 2 * ((columns + 31) // 32)):
        words = numbers.view(torch.int32).view(len(numbers), -1, 8).bitwise_xor_(_SIGNS)
        zeros = words.bitwise_not_()
        below = torch.zeros_like(zeros[..., 0])  # a bit for each column: number < threshold
        for i in range(8):
            # If number and threshold differ in bit i, it decides, unless a higher bit differs too.
            zero = zeros[..., i]
            if isinstance(threshold, Tensor):
                below = (below & (zero | least[i])) | (zero & least[i])
            elif least[i]:
                below.bitwise_or_(zero)
            else:
                below.bitwise_and_(zero)
        bits = (~(below | none_kept))[..., None] >> shifts & 1
        yield part, bits.view(len(numbers), -1)[:, :columns]


def _attention_threshold(rng: Tensor, site: int, p: float) -> Any:
    """The threshold of attention's dropout, at most 256: an int, on a GPU int32 [1]."""
    if not rng.is_cuda:
        return _first_word(rng, site) % 256 + min(round(p * 65536), 65535) >> 8
    last = torch.full((1,), -1, device=rng.device)
    ((_, numbers),) = _blocks(rng, site, last, 1, first=_WORD)
    rounding = numbers.view(torch.int32).view(-1)[:1].bitwise_xor_(_SIGNS) & 0xFF
    return rounding + min(round(p * 65536), 65535) >> 8


def _first_word(rng: Tensor, site: int) -> int:
    """Output word 0 of the counter (2^32 - 1, 2^32 - 1, site, micro-batch)."""
    seed, micro_batch = rng.tolist()
    words = (_WORD, _WORD, site & _WORD, micro_batch & _WORD)
    for key_0, key_1 in _round_keys(seed):
        high_0, low_0 = divmod(_MULTIPLIER_0 * words[0], 1 << 32)
        high_1, low_1 = divmod(_MULTIPLIER_1 * words[2], 1 << 32)
        words = (high_1 ^ words[1] ^ key_0, low_1, high_0 ^ words[3] ^ key_1, low_0)
    return words[0]


def _round_keys(seed: Any) -> list[tuple[Any, Any]]:
    return [
        (((seed & _WORD) + i * _WEYL_0) & _WORD, (((seed >> 32) & _WORD) + i * _WEYL_1) & _WORD)
        for i in range(ROUNDS)
    ]


def _blocks(
    rng: Tensor, site: int, rows: Tensor, groups: int, first: int = 0
) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows of a block, output words of their groups): see `_signed_words`."""
    if len(rows) == 0 or groups == 0:
        return
    numbers = torch.arange(first, first + groups, device=rng.device)[None]
    block = len(rows) if rng.is_cuda else max(1, _GROUPS_PER_BLOCK // groups)
    # Two Python ints on a CPU; on a GPU two 0-dim tensors, which need no host sync.
    seed, micro_batch = rng.unbind() if rng.is_cuda else rng.tolist()
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        yield part, _signed_words(seed, micro_batch, site, rows[part], numbers)


def _signed_words(seed: Any, micro_batch: Any, site: int, rows: Tensor, groups: Tensor) -> Tensor:
    """The output words, with the sign bits of their 16-bit halves flipped: int64 [R, G, 2].

    groups: int64 [1, G], or [R, 1] for one group of each row.
    As int16, numbers from 0 to 65535 minus 2^15, so that signed comparison orders them.

    A word is the low half of an int64 element. The upper half is cleared only for multiplication:
    words 1 and 3 of a round are only xor-ed, so their upper halves may hold any bits.
    In rounds 0 and 1 most words depend only on the row or only on the group: they stay [R, 1] or
    [1, G].
    """
    keys = _round_keys(seed)
    row, group = (rows & _WORD)[:, None], groups

    # Round 0: words [R,1], scalar, [1,G], [1,G].
    product_0, product_1 = group * _MULTIPLIER_0, site * _MULTIPLIER_1
    word_0 = row ^ ((product_1 >> 32) & _WORD) ^ keys[0][0]
    word_1: Any = product_1 & _WORD
    word_2 = ((product_0 >> 32) ^ (micro_batch & _WORD) ^ keys[0][1]) & _WORD
    word_3 = product_0 & _WORD

    # Round 1: words [1,G], [1,G], [R,G], [R,1].
    product_0, product_1 = word_0 * _MULTIPLIER_0, word_2 * _MULTIPLIER_1
    word_0 = ((product_1 >> 32) ^ word_1 ^ keys[1][0]) & _WORD
    word_1 = product_1
    word_2 = (((product_0 >> 32) ^ keys[1][1]) & _WORD) ^ word_3
    word_3 = product_0 & _WORD

    # Round 2: words [R,G], [R,G], [R,G], [1,G]; in place from here on.
    product_0, product_1 = word_0 * _MULTIPLIER_0, word_2 * _MULTIPLIER_1
    word_0 = (product_1 >> 32).bitwise_xor_(word_1 ^ keys[2][0]).bitwise_and_(_WORD)
    word_1 = product_1
    torch.bitwise_xor(((product_0 >> 32) ^ keys[2][1]) & _WORD, word_3, out=word_2)
    word_3 = product_0

    for key_0, key_1 in keys[3 : ROUNDS - 1]:
        product_0, product_1 = word_0 * _MULTIPLIER_0, word_2 * _MULTIPLIER_1
        torch.bitwise_right_shift(product_1, 32, out=word_0)
        word_0.bitwise_xor_(word_1).bitwise_xor_(key_0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(product_0, 32, out=word_2)
        word_2.bitwise_xor_(word_3).bitwise_xor_(key_1).bitwise_and_(_WORD)
        word_1, word_3 = product_1, product_0

    # Last round: words (0, 1) and (2, 3) are stored as one int64 each, all 16-bit sign bits
    # flipped.
    numbers = torch.empty((len(rows), groups.shape[1], 2), dtype=torch.int64, device=rows.device)
    product_0, product_1 = word_0.mul_(_MULTIPLIER_0), word_2.mul_(_MULTIPLIER_1)
    for half, product, word, key in (
        (0, product_1, word_1, keys[-1][0]),
        (1, product_0, word_3, keys[-1][1]),
    ):
        low = (product >> 32).bitwise_xor_(word).bitwise_xor_(key ^ _LOW_SIGNS).bitwise_and_(_WORD)
        high = product.bitwise_left_shift_(32).bitwise_xor_(_HIGH_SIGNS)
        torch.bitwise_or(low, high, out=numbers[..., half])
    return numbers
