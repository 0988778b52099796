"""Attention of the newest token of each hypothesis: self-attention (cached) and cross attention.

out[n] = softmax(scale * q[n] k^T) v      in each head, with one query per hypothesis

self:  k and v are those of positions 0 ... steps[n] of the hypothesis. They stay in the cache where
       they were first written: row ancestry[p, n] holds position p of hypothesis n. Beam search
       thus reorders 4 bytes per position instead of the cache (FasterTransformer's indirection).
cross: k and v are those of the source sentence, packed; all hypotheses of its beam share them.

Shapes: N = hypotheses, `beam` adjacent rows per slot; P = positions and R = rows of the cache;
C = channels, H = heads; S = sentences, T = packed source tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, check_boundaries, check_range, check_rows, check_tensor
from .numerics import work_dtype
from .registry import Written, define


class DecodeSelfAttention(NamedTuple):
    """out [N, C] contiguous; writes the new tokens' keys and values to position steps[n], row n.

    qkv: [N, 3 * C], query, key and value of the new tokens, as one GEMM writes them.
    keys, values: [P, R, C] with R >= N, one layer's cache; the last dimension must be contiguous.
    ancestry: int32 [P, R]; ancestry[p, n] in [0, R) for p < steps[n]; other entries are ignored.
    steps: int32 [N]: the position of the new token, below P; the rows of a slot are at the same
    one. It is read on the device, so that one captured graph is replayed for all steps.
    beam: adjacent rows of a slot. If several of them share an ancestor, the kernel reads it once.
    On a GPU a step >= P fails in a device-side assertion, unless LIGHTSEQ_CHECK_INDICES=1.
    """

    qkv: Tensor
    keys: Written
    values: Written
    ancestry: Tensor
    steps: Tensor
    heads: int
    scale: float
    beam: int = 1

    def check(self, op: str) -> None:
        qkv, keys, values, ancestry, steps, heads, _, beam = self
        check_rows(op, "keys", keys, ("P", "R", "C"), FLOATS)
        positions, rows, channels = keys.shape
        check_rows(op, "values", values, keys.shape, (keys.dtype,), keys)
        check_rows(op, "qkv", qkv, ("N", 3 * channels), (keys.dtype,), keys)
        check_rows(op, "ancestry", ancestry, (positions, rows), (torch.int32,), keys)
        check_tensor(op, "steps", steps, qkv.shape[:1], (torch.int32,), keys)
        if len(qkv) > rows:
            raise ValueError(f"{op}: {len(qkv)} hypotheses do not fit into a cache of {rows} rows")
        if beam < 1:
            raise ValueError(f"{op}: beam must be at least 1, got {beam}")
        _check_heads(op, channels, heads)
        check_range(op, "steps", steps, positions, "P")

    def shape(self) -> Tensor:
        return self.qkv.new_empty((self.qkv.shape[0], self.qkv.shape[1] // 3))

    def reference(self) -> Tensor:
        qkv, keys, values, ancestry, steps, heads, scale, _ = self
        if len(qkv) == 0:
            return self.shape()
        q, k, v = qkv.chunk(3, dim=1)
        own, steps = torch.arange(len(qkv), device=steps.device), steps.long()
        keys[steps, own], values[steps, own] = k, v

        least, last = (int(step) for step in steps.aminmax())
        place, hidden = torch.arange(last + 1, device=own.device), None
        row = torch.cat((ancestry[:last, : len(own)].t().long(), own[:, None]), 1)
        if least < last:
            # Later positions repeat the newest one, hidden: what is there may be not finite.
            hidden = place > steps[:, None]
            row = torch.where(place < steps[:, None], row, own[:, None])
            place = torch.minimum(place, steps[:, None])
        past = _by_heads(keys, values, (place, row), heads)
        return _attend(q[:, None], *past, hidden, heads, scale)[:, 0]


decode_self_attention = define("decode_self_attention", DecodeSelfAttention)


class DecodeCrossAttention(NamedTuple):
    """out [N, C] contiguous; 0 for a query whose sentence is empty or whose slot has no sentence.

    q: [N, C], N >= len(sentences) * beam; the rows of a slot are adjacent; out is 0 for later rows.
    keys, values: [T, C], rows may be strided (views of one GEMM for all layers).
    cu_seqlens: int32 [S + 1]; sentence s has the rows from cu_seqlens[s] to cu_seqlens[s + 1].
    sentences: int32 [slots], the sentence that each slot translates, negative for none. The
    boundaries of other sentences are not read.
    On a GPU only q may be written by the kernel directly before this one in the stream: the other
    tensors are read while that kernel still runs (programmatic dependent launch).
    Sentence numbers are not checked.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    cu_seqlens: Tensor
    sentences: Tensor
    beam: int
    heads: int
    scale: float

    def check(self, op: str) -> None:
        q, keys, values, cu_seqlens, sentences, beam, heads, _ = self
        check_rows(op, "q", q, ("N", "C"), FLOATS)
        channels = q.shape[1]
        check_rows(op, "keys", keys, ("T", channels), (q.dtype,), q)
        check_rows(op, "values", values, keys.shape, (q.dtype,), q)
        check_tensor(op, "cu_seqlens", cu_seqlens, ("S + 1",), (torch.int32,), q)
        check_tensor(op, "sentences", sentences, ("slots",), (torch.int32,), q)
        if beam < 1 or len(q) < len(sentences) * beam:
            raise ValueError(
                f"{op}: q must have beam rows for each of {len(sentences)} sentences,"
                f" got {len(q)} rows and beam {beam}"
            )
        if len(cu_seqlens) < 2:
            raise ValueError(f"{op}: cu_seqlens must hold at least one sentence")
        _check_heads(op, channels, heads)
        check_boundaries(op, "cu_seqlens", cu_seqlens, len(keys), used=sentences)

    def shape(self) -> Tensor:
        return self.q.new_empty(self.q.shape)

    def reference(self) -> Tensor:
        q, keys, values, cu_seqlens, sentences, beam, heads, scale = self
        slots, sentence = len(sentences), sentences.clamp_min(0).long()
        start = cu_seqlens[sentence]
        length = (cu_seqlens[sentence + 1] - start).masked_fill_(sentences < 0, 0)
        longest = int(length.max()) if slots else 0
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        if longest == 0:
            return out
        position = torch.arange(longest, device=q.device)
        hidden = position >= length[:, None]  # [slots, longest]
        # Positions past the end repeat the sentence's last token: values of another sentence, if
        # not finite, must not reach the result (0 * inf is NaN).
        token = torch.minimum(position, length[:, None] - 1).clamp_min(0) + start[:, None]
        token.clamp_max_(len(keys) - 1)
        of_slots = _by_heads(keys, values, (token,), heads)
        queries = q[: slots * beam].unflatten(0, (slots, beam))
        attended = _attend(queries, *of_slots, hidden, heads, scale)
        attended.masked_fill_((length == 0)[:, None, None], 0)
        out[: slots * beam] = attended.flatten(0, 1)
        return out


decode_cross_attention = define("decode_cross_attention", DecodeCrossAttention)


def _by_heads(
    keys: Tensor, values: Tensor, places: tuple[Tensor, ...], heads: int
) -> tuple[Tensor, Tensor]:
    """keys[places] and values[places], each [B * H, Lk, D], the layout for a batched matmul.

    places: integer indices for all dimensions but the last; they broadcast to [B, Lk]. The tensors
    are viewed as rows of width D, one per head, and gathered by one index. This copies D numbers at
    a time; keys[places] would copy single numbers.
    """
    width = keys.shape[-1] // heads
    strides = keys.stride()
    if strides != values.stride() or any(stride % width for stride in strides[:-1]):
        keys, values = keys.contiguous(), values.contiguous()
        strides = keys.stride()
    index = torch.arange(heads, device=keys.device)[:, None]
    room = heads
    for place, stride, size in zip(places, strides[:-1], keys.shape[:-1], strict=True):
        index = index + place[..., None, :] * (stride // width)  # [B, H, Lk]
        room += (size - 1) * (stride // width)
    picked = [
        x.as_strided((room, width), (width, 1)).index_select(0, index.flatten())
        for x in (keys, values)
    ]
    shape = (-1, index.shape[-1], width)
    return picked[0].view(shape), picked[1].view(shape)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, heads: int, scale: float
) -> Tensor:
    """Attention of q [B, Lq, C] to k and v [B * H, Lk, D]; hidden bool [B, Lk]: masked keys."""
    dtype = work_dtype(q)
    queries = q.to(dtype).unflatten(2, (heads, -1)).transpose(1, 2)
    scores = torch.bmm(queries.flatten(0, 1), k.to(dtype).transpose(1, 2)).mul_(scale)
    if hidden is not None:
        scores.unflatten(0, (-1, heads)).masked_fill_(hidden[:, None, None], -torch.inf)
    out = torch.bmm(scores.softmax(-1), v.to(dtype)).view(queries.shape)
    return out.transpose(1, 2).flatten(2).to(q.dtype)


def _check_heads(op: str, channels: int, heads: int) -> None:
    if heads < 1 or channels % heads:
        raise ValueError(f"{op}: {channels} channels cannot be cut into {heads} heads")
