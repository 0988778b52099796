"""Attention over packed sentences: self, causal and cross. No argument is a [B, H, L, L] tensor.

out = dropout(softmax(scale * q k^T)) v       within each sentence and head (Vaswani et al. 2017)

Query i attends to the keys j < length of its sentence, with causal only to j <= i, and with a
window only to |i - j| <= window. Forward saves the log-sum-exp of every row; backward recomputes
the probabilities from it (Dao et al. 2022): P = exp(S - lse), dV = (P*m)^T dO, dP = (dO V^T)*m,
dS = P * (dP - rowsum(P * dP)), with the scores S = scale * Q K^T and m = mask/(1-p).
rowsum(P * dP) equals rowsum(dO * O); kernels use the latter, since they never hold a whole row of
P.

A cast of the result follows the rounding to bfloat16: the result is saved for backward in any case.
Gradients are rounded so, too, but only their values in E4M3 are stored. Transposes are made by the
products' backward (`fp8_transpose`) in less time: sentences begin at any row, so attention's stores
of a transpose would fill sectors only in part.

Shapes: T = packed tokens (rows), Tq and Tk those of queries and keys, B = sentences, L = longest
sentence, H = heads, D = head width.
Dropout: the row id is query row * H + head, the column is the key's position in its sentence.

The reference pads to [B, H, L, D] (padding.py), so that each product is one batched matmul.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import Cast, Dropout
from .casting import ALIGNMENT, E4M3, check_cast, dtypes_for, quantise, quantised_like
from .checks import check_boundaries, check_dropout, check_rows, check_tensor
from .numerics import work_dtype
from .padding import known, pad, padded_tokens, slots_of, slotted
from .philox import attention_dropout_factors
from .registry import Written, define


class AttentionFwd(NamedTuple):
    """(out [Tq, H, D] contiguous, lse [Tq, H], values [Tq, H * D]: out in E4M3).

    lse is float64 if q is float32, too.

    q: [Tq, H, D]; k, v: [Tk, H, D]; rows may be strided (views of a wider GEMM's output).
    cu_q, cu_k: int32 [B + 1], first row of each sentence, then the end of the last. A sentence may
    be empty on either side. out is 0 for a query without keys and for rows past the last sentence.
    max_q, max_k: length of the longest sentence, or an upper bound of it.
    window: tokens on each side of a query to which it attends; 0: all. Only in self-attention:
        cu_q and cu_k are then one tensor.
    scale: factor of the scores, positive and finite (fairseq: D^-0.5).
    dropout: of the probabilities, see `philox.attention_keep_mask`.
    cast: of out; q, k and v are then bfloat16.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: int
    scale: float
    dropout: Dropout
    cast: Cast | None = None

    def check(self, op: str) -> None:
        q, k, v, cu_q, cu_k, max_q, max_k = self[:7]
        check_rows(op, "q", q, ("Tq", "H", "D"), dtypes_for(self.cast))
        check_rows(op, "k", k, ("Tk", *q.shape[1:]), (q.dtype,), q)
        check_rows(op, "v", v, k.shape, (q.dtype,), q)
        check_tensor(op, "cu_q", cu_q, ("B + 1",), (torch.int32,), q)
        check_tensor(op, "cu_k", cu_k, cu_q.shape, (torch.int32,), q)
        if len(cu_q) < 2:
            boundaries = len(cu_q)
            raise ValueError(
                f"{op}: cu_q must hold at least one sentence, got {boundaries} boundaries"
            )
        if min(max_q, max_k) < 0:
            raise ValueError(f"{op}: max_q and max_k must be >= 0, got {max_q} and {max_k}")
        if self.window < 0:
            raise ValueError(f"{op}: window must be >= 0, got {self.window}")
        if not 0.0 < self.scale < math.inf:
            raise ValueError(f"{op}: scale must be positive and finite, got {self.scale}")
        check_dropout(op, self.dropout, q)
        check_boundaries(op, "cu_q", cu_q, len(q), ("max_q", max_q))
        check_boundaries(op, "cu_k", cu_k, len(k), ("max_k", max_k))
        if self.window and cu_q is not cu_k:
            raise ValueError(f"{op}: with a window, cu_q and cu_k must be the same tensor")
        check_cast(op, self.cast, q.flatten(1))

    def shape(self) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_lse_dtype(q))
        return out, lse, quantised_like(out.flatten(1), self.cast)[0]

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self._attend()
        return out, lse, quantise(out.flatten(1), self.cast)[0]

    def _attend(self) -> tuple[Tensor, Tensor]:
        q, k, v, cu_q, cu_k, max_q, max_k = self[:7]
        (rows, heads, width), dtype = q.shape, _lse_dtype(q)
        if min(q.numel(), k.numel(), max_q, max_k) == 0:
            return q.new_zeros(q.shape), q.new_zeros((rows, heads), dtype=dtype)
        padded_q, padded_k = pad(q, cu_q, max_q), pad(k, cu_k, max_k)
        queries, keys = slotted(padded_q, max_q), slotted(padded_k, max_k)

        scores = queries.new_empty((len(cu_q) - 1, heads, max_q, max_k))
        scores.copy_(_hidden(self))
        scores = scores.view(-1, max_q, max_k)
        scores.baddbmm_(queries, keys.transpose(1, 2), alpha=self.scale)
        largest = scores.amax(-1, keepdim=True)
        probabilities = scores.sub_(largest).exp_()
        total = probabilities.sum(-1, keepdim=True)
        probabilities.div_(total)
        padded_lse = largest.to(dtype).add_(total.to(dtype).log_()).view(-1)
        if self.dropout.p > 0:
            _drop(self, probabilities, out=probabilities)

        slots = slots_of(cu_q, rows, heads, max_q, seeing=cu_k)
        # Reuse the memory of operands that are no longer needed.
        values = slotted(pad(v, cu_k, max_k, into=padded_k), max_k)
        out = _product(probabilities, values, into=padded_q).index_select(0, slots)
        lse = torch.cat((padded_lse, padded_lse.new_zeros(1))).index_select(0, slots)
        return out.view(rows, heads, width).to(q.dtype), lse.view(rows, heads)


attention_fwd = define("attention_fwd", AttentionFwd, "out lse values")


class AttentionBwd(NamedTuple):
    """Overwrite dq [Tq, H, D], dk and dv [Tk, H, D]; rows past the last sentence become 0.

    dout: [Tq, H, D]. out, lse: forward's results. dq, dk, dv may be strided like q, k, v.
    q_cast, k_cast: of dq, and of both dk and dv, or neither; k_cast may be q_cast. With them all
    inputs are bfloat16, and dq, dk, dv are E4M3: heads are adjacent, rows begin at multiples of 16
    numbers, as in column slices of a matrix.
    Other arguments as in forward.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: int
    scale: float
    dropout: Dropout
    dq: Written
    dk: Written
    dv: Written
    q_cast: Cast | None = None
    k_cast: Cast | None = None

    @property
    def forward(self) -> AttentionFwd:
        return AttentionFwd(self.q, self.k, self.v, *self[6:14])

    def check(self, op: str) -> None:
        q, k, q_cast, k_cast = self.q, self.k, self.q_cast, self.k_cast
        if (q_cast is None) != (k_cast is None):
            raise ValueError(f"{op}: give both q_cast and k_cast, or neither")
        self.forward._replace(cast=q_cast).check(op)
        for name, x in (("dout", self.dout), ("out", self.out)):
            check_rows(op, name, x, q.shape, (q.dtype,), q)
        check_tensor(op, "lse", self.lse, q.shape[:2], (_lse_dtype(q),), q)
        check_cast(op, k_cast, k.flatten(1))
        for name, x, like in (("dq", self.dq, q), ("dk", self.dk, k), ("dv", self.dv, k)):
            if q_cast is None:
                check_rows(op, name, x, like.shape, (q.dtype,), q)
                continue
            check_tensor(op, name, x, like.shape, (E4M3,), q)
            if len(x) and (x.stride()[1:] != (x.shape[2], 1) or x.stride(0) % ALIGNMENT):
                raise ValueError(
                    f"{op}: {name} must have adjacent heads, and rows at multiples of {ALIGNMENT} "
                    f"numbers, but its strides are {x.stride()}"
                )

    def reference(self) -> None:
        given = self.dq, self.dk, self.dv
        if self.q_cast is None:
            return self._differentiate(given)
        exact = [x.new_empty(x.shape) for x in (self.q, self.k, self.v)]
        self._differentiate(exact)
        for target, x, cast in zip(given, exact, (self.q_cast, self.k_cast, self.k_cast)):
            values, _ = quantise(x.flatten(1), cast)
            target.view(torch.uint8).copy_(values.view(torch.uint8).view(x.shape))

    def _differentiate(self, gradients: Sequence[Tensor]) -> None:
        """Write the gradients of q, k and v."""
        dq, dk, dv = gradients
        forward = self.forward
        q, k, v, cu_q, cu_k, max_q, max_k = forward[:7]
        (rows, heads, width), scale = q.shape, self.scale
        if min(q.numel(), k.numel(), max_q, max_k) == 0:
            for gradient in gradients:
                gradient.zero_()
            return
        padded_q, padded_k = pad(q, cu_q, max_q), pad(k, cu_k, max_k)
        padded_v, padded_dout = pad(v, cu_k, max_k), pad(self.dout, cu_q, max_q)
        queries, douts = slotted(padded_q, max_q), slotted(padded_dout, max_q)
        keys, values = slotted(padded_k, max_k), slotted(padded_v, max_k)

        # lse = inf makes the probabilities of padded queries 0, so that they add nothing to dk, dv.
        is_padding = torch.arange(max_q, device=q.device) >= cu_q.diff()[:, None]
        padded_lse = self.lse[padded_tokens(cu_q, max_q)]
        padded_lse = padded_lse.masked_fill_(is_padding[..., None], torch.inf)
        padded_lse = padded_lse.transpose(1, 2)[..., None]
        high = padded_lse.to(queries.dtype)
        scores = queries.new_empty((len(cu_q) - 1, heads, max_q, max_k))
        torch.sub(_hidden(forward), high, out=scores)
        probabilities = scores.view(-1, max_q, max_k)
        probabilities.baddbmm_(queries, keys.transpose(1, 2), alpha=scale)
        if q.dtype == torch.float32:
            low = (padded_lse - high).nan_to_num_(0.0)  # inf - inf in padding
            scores.sub_(low.float())
        probabilities.exp_()
        kept = probabilities
        if self.dropout.p > 0:
            kept = torch.empty_like(probabilities)
            _drop(forward, probabilities, out=kept)

        dscores = torch.bmm(douts, values.transpose(1, 2)).mul_(kept)
        rowsum = dscores.sum(-1, keepdim=True)
        dscores.addcmul_(probabilities, rowsum, value=-1.0).mul_(scale)

        # The products reuse the memory of operands that are no longer needed.
        slots_q = slots_of(cu_q, rows, heads, max_q, seeing=cu_k)
        slots_k = slots_of(cu_k, len(k), heads, max_k, seeing=cu_q)
        packed = queries.new_empty((max(rows, len(k)) * heads, width))
        for gradient, left, right, slots, memory in (
            (dv, kept.transpose(1, 2), douts, slots_k, padded_v),
            (dk, dscores.transpose(1, 2), queries, slots_k, padded_v),
            (dq, dscores, keys, slots_q, padded_dout),
        ):
            product = _product(left, right, into=memory)
            result = torch.index_select(product, 0, slots, out=packed[: len(slots)])
            gradient.copy_(result.view(gradient.shape))


attention_bwd = define("attention_bwd", AttentionBwd)


def _lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of lse. A float32 lse from 4 to 8 has a rounding error of up to 2^-22, which all
    probabilities of the row share: too much for float32 inputs, little for 16-bit inputs."""
    return torch.float32 if q.element_size() == 2 else torch.float64


def _product(left: Tensor, right: Tensor, into: Tensor) -> Tensor:
    """Write left @ right, [B * H, L, D], to `into` [B * H * L + 1, D]; return `into`."""
    torch.bmm(left, right, out=slotted(into, left.shape[1]))
    return into


def _hidden(a: AttentionFwd) -> Tensor:
    """Additive mask [B, 1, 1 or Lq, Lk]: -inf where a query must not attend to a key, else 0."""
    queries = a.max_q if a.causal or a.window else 1
    shape = "hidden", a.causal, a.window, queries, a.max_k, work_dtype(a.q)
    return known(a.cu_k, shape, lambda: _make_hidden(a))


def _make_hidden(a: AttentionFwd) -> Tensor:
    key = torch.arange(a.max_k, device=a.cu_k.device)
    query = torch.arange(a.max_q, device=a.cu_k.device)[:, None]
    hidden = (key >= a.cu_k.diff()[:, None])[:, None, None]
    if a.causal:
        hidden = hidden | (key > query)
    if a.window:
        hidden = hidden | ((key - query).abs() > a.window)
    mask = torch.zeros(hidden.shape, dtype=work_dtype(a.q), device=a.cu_k.device)
    return mask.masked_fill_(hidden, -torch.inf)


def _drop(a: AttentionFwd, probabilities: Tensor, out: Tensor) -> None:
    """out = dropout(probabilities), both [B * H, Lq, Lk]."""
    heads, keys = a.q.shape[1], probabilities.shape[2]
    tokens = padded_tokens(a.cu_q, a.max_q)
    head = torch.arange(heads, device=tokens.device)[:, None]
    row_ids = (tokens[:, None].long() * heads + head).view(-1)
    matrix, result = probabilities.view(-1, keys), out.view(-1, keys)
    for part, factor in attention_dropout_factors(a.dropout, keys, probabilities.dtype, row_ids):
        torch.mul(matrix[part], factor, out=result[part])
