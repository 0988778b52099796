"""Attention over packed sentences: self, causal and cross, no [B, H, L, L] tensor in the interface.

out = dropout(softmax(scale * q k^T)) v        inside each sentence and head (Vaswani et al. 2017)

Query i of a sentence sees its keys j < length, with causal those with j <= i. Forward saves the
log-sum-exp of every row; backward recomputes the probabilities from it (Dao et al. 2022):
P = exp(S - lse), dV = (P*m)^T dO, dP = (dO V^T)*m, dS = P * (dP - rowsum(dO * O)), m = mask/(1-p).

T packed tokens (rows), B sentences, L longest sentence, H heads, D head width.
Dropout's row is query row * H + head, its column the key's position in its sentence.

The reference pads to [B, H, L, D], so that each step is one batched product. Slots behind a
sentence's end hold a copy of one of its rows, never foreign or uninitialised numbers, and one
extra row of zeros serves every row that has no result: past the last sentence, or without keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import FLOATS, check_dropout, check_rows, check_tensor
from .numerics import work_dtype
from .philox import dropout_factors
from .registry import register


def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
) -> tuple[Tensor, Tensor]:
    """(out [Tq, H, D] contiguous, lse [Tq, H] float32 (float64 for float64)).

    q: [Tq, H, D]; k, v: [Tk, H, D]; rows may be strided (views of a wider GEMM's output).
    cu_q, cu_k: int32 [B + 1], first row of each sentence and the end of the last. A sentence may be
    empty on either side; a query without keys gives 0, and so do rows past the last sentence.
    max_q, max_k: longest sentence, or more. scale: factor of the scores (fairseq: D^-0.5).
    p, rng, site: dropout of the probabilities, see `philox.keep_mask`.
    Raises ValueError on a wrong shape, dtype, device or layout. cu_* are not range-checked here.
    """
    _check("attention_fwd", q, k, v, cu_q, cu_k, max_q, max_k, p, rng)
    outputs: tuple[Tensor, Tensor] = _FWD(
        q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, p, rng, site
    )
    return outputs


def attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Write the whole of dq [Tq, H, D], dk and dv [Tk, H, D], zeros past the last sentence.

    dout: [Tq, H, D]. out, lse: forward's. dq, dk, dv may be strided like q, k, v.
    The rest as in forward. Raises ValueError like forward.
    """
    op = "attention_bwd"
    _check(op, q, k, v, cu_q, cu_k, max_q, max_k, p, rng)
    for name, x, like in (
        ("dout", dout, q),
        ("out", out, q),
        ("dq", dq, q),
        ("dk", dk, k),
        ("dv", dv, v),
    ):
        check_tensor(op, name, x, like.shape, (q.dtype,), q)
        check_rows(op, name, x)
    check_tensor(op, "lse", lse, q.shape[:2], (work_dtype(q),), q)
    _BWD(
        dout,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        causal,
        scale,
        p,
        rng,
        site,
        dq,
        dk,
        dv,
    )


def attention_fwd_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
) -> tuple[Tensor, Tensor]:
    """Reference of lightseq::attention_fwd."""
    (rows, heads, width), dtype = q.shape, work_dtype(q)
    if min(q.numel(), k.numel(), max_q, max_k) == 0:
        return q.new_zeros(q.shape), q.new_zeros((rows, heads), dtype=dtype)
    tokens_q, tokens_k = _padded_tokens(cu_q, max_q), _padded_tokens(cu_k, max_k)
    queries, keys, values = _pad(q, tokens_q), _pad(k, tokens_k), _pad(v, tokens_k)

    scores = queries.new_empty((len(cu_q) - 1, heads, max_q, max_k))
    scores.copy_(_hidden(cu_k, max_q, max_k, causal, dtype))
    scores = scores.view(-1, max_q, max_k)
    scores.baddbmm_(_slotted(queries, max_q), _slotted(keys, max_k).transpose(1, 2), alpha=scale)
    probabilities = torch.softmax(scores, -1)
    # The largest probability is exp(largest score - lse), and it never underflows.
    padded_lse = scores.amax(-1).sub_(probabilities.amax(-1).log_())
    if p > 0:
        probabilities.mul_(_padded_factors(rows, heads, tokens_q, max_k, p, rng, site, dtype))

    slots = _slots(cu_q, rows, heads, max_q, seeing=cu_k)
    out = _unpad(probabilities, _slotted(values, max_k), slots, into=queries)
    lse = torch.cat((padded_lse.view(-1), padded_lse.new_zeros(1))).index_select(0, slots)
    return out.view(rows, heads, width).to(q.dtype), lse.view(rows, heads)


def attention_bwd_reference(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    p: float,
    rng: Tensor,
    site: int,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Reference of lightseq::attention_bwd."""
    (rows, heads, _), dtype = q.shape, work_dtype(q)
    if min(q.numel(), k.numel(), max_q, max_k) == 0:
        for gradient in (dq, dk, dv):
            gradient.zero_()
        return
    tokens_q, tokens_k = _padded_tokens(cu_q, max_q), _padded_tokens(cu_k, max_k)
    padded_q, padded_k, padded_v = _pad(q, tokens_q), _pad(k, tokens_k), _pad(v, tokens_k)
    padded_dout = _pad(dout, tokens_q)
    queries, douts = _slotted(padded_q, max_q), _slotted(padded_dout, max_q)
    keys, values = _slotted(padded_k, max_k), _slotted(padded_v, max_k)

    # An infinite lse makes the probabilities of padded queries zero: they then give nothing to
    # dk and dv.
    is_padding = torch.arange(max_q, device=q.device) >= cu_q.diff()[:, None]
    padded_lse = lse[tokens_q].masked_fill_(is_padding[..., None], torch.inf).transpose(1, 2)
    scores = queries.new_empty((len(cu_q) - 1, heads, max_q, max_k))
    torch.sub(_hidden(cu_k, max_q, max_k, causal, dtype), padded_lse[..., None], out=scores)
    probabilities = scores.view(-1, max_q, max_k)
    probabilities.baddbmm_(queries, keys.transpose(1, 2), alpha=scale).exp_()

    rowsum = (dout.to(dtype) * out).sum(-1)[tokens_q].transpose(1, 2).reshape(-1, max_q, 1)
    dscores = torch.bmm(douts, values.transpose(1, 2))
    kept = probabilities
    if p > 0:
        kept = _padded_factors(rows, heads, tokens_q, max_k, p, rng, site, dtype)
        kept.mul_(probabilities)
    dscores.mul_(kept).addcmul_(probabilities, rowsum, value=-1.0).mul_(scale)

    slots_q = _slots(cu_q, rows, heads, max_q, seeing=cu_k)
    slots_k = _slots(cu_k, len(k), heads, max_k, seeing=cu_q)
    # Operands that have done their work lend their memory to the products.
    dv.copy_(_unpad(kept.transpose(1, 2), douts, slots_k, into=padded_v).view(v.shape))
    dk.copy_(_unpad(dscores.transpose(1, 2), queries, slots_k, into=padded_v).view(k.shape))
    dq.copy_(_unpad(dscores, keys, slots_q, into=padded_q).view(q.shape))


def _padded_tokens(cu: Tensor, longest: int) -> Tensor:
    """Packed row of each slot [B, L]; slots behind a sentence's end repeat its last row."""
    last = cu.diff().sub_(1).clamp_(min=0)
    position = torch.arange(longest, device=cu.device)
    tokens = cu[:-1, None] + torch.minimum(position, last[:, None])
    # An empty sentence borrows a row from the next one, the last of them from the one before.
    return tokens.clamp_(max=(cu[-1] - 1).clamp(min=0))


def _pad(x: Tensor, tokens: Tensor) -> Tensor:
    """x [T, H, D] -> [B * H * L + 1, D] in the working precision; the last row is zero."""
    rows, heads, width = x.shape
    step = x.stride(0)
    if x.stride(1) != width or step % width:
        x, step = x.contiguous(), heads * width
    # Strided rows as rows of width D: one gather makes the [B, H, L] order without a transpose.
    flat = x.as_strided(((rows - 1) * (step // width) + heads, width), (width, 1))
    head = torch.arange(heads, device=x.device)[:, None]
    index = (tokens[:, None].long() * (step // width) + head).view(-1)
    padded = x.new_empty((len(index) + 1, width), dtype=work_dtype(x))
    if x.dtype == padded.dtype:
        torch.index_select(flat, 0, index, out=padded[:-1])
    else:
        padded[:-1] = flat.index_select(0, index)
    padded[-1].zero_()
    return padded


def _slotted(padded: Tensor, longest: int) -> Tensor:
    """[B * H * L + 1, D] -> [B * H, L, D]."""
    return padded[:-1].view(-1, longest, padded.shape[1])


def _unpad(left: Tensor, right: Tensor, slots: Tensor, into: Tensor) -> Tensor:
    """(left @ right) [B * H, L, D] at the slots: [T * H, D]. Overwrites `into`, a result of _pad."""
    torch.bmm(left, right, out=_slotted(into, left.shape[1]))
    return into.index_select(0, slots)


def _slots(cu: Tensor, rows: int, heads: int, longest: int, seeing: Tensor) -> Tensor:
    """Slot in [B * H * L] of each packed row and head, [T * H]; the one behind the last holds 0.

    seeing: boundaries of the other side; rows whose sentence is empty there have no slot either.
    """
    row = torch.arange(rows, dtype=cu.dtype, device=cu.device)
    sentence = torch.bucketize(row, cu[1:], right=True)
    has_slot = sentence < len(cu) - 1
    sentence = sentence.clamp_(max=len(cu) - 2)
    has_slot &= seeing.diff()[sentence] > 0
    first = (sentence * heads * longest + (row - cu[sentence]))[:, None]
    slots = first + torch.arange(heads, device=cu.device) * longest
    nothing = (len(cu) - 1) * heads * longest
    return slots.masked_fill_(~has_slot[:, None], nothing).view(-1)


def _hidden(cu_k: Tensor, max_q: int, max_k: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """Minus infinity where a query must not see a key, else 0: [B, 1, 1 or Lq, Lk]."""
    key = torch.arange(max_k, device=cu_k.device)
    hidden = (key >= cu_k.diff()[:, None])[:, None, None]
    if causal:
        hidden = hidden | (key > torch.arange(max_q, device=cu_k.device)[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype, device=cu_k.device)
    return mask.masked_fill_(hidden, -torch.inf)


def _padded_factors(
    rows: int,
    heads: int,
    tokens_q: Tensor,
    max_k: int,
    p: float,
    rng: Tensor,
    site: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dropout's factors of the padded probabilities, [B * H, Lq, Lk]."""
    factors = torch.empty((rows * heads, max_k), dtype=dtype, device=rng.device)
    for part, factor in dropout_factors(rng, site, factors.shape, p, dtype):
        factors[part] = factor
    head = torch.arange(heads, device=rng.device)[:, None]
    index = tokens_q[:, None].long() * heads + head
    return factors.index_select(0, index.view(-1)).view(-1, tokens_q.shape[1], max_k)


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    p: float,
    rng: Tensor,
) -> None:
    check_tensor(op, "q", q, ("Tq", "H", "D"), FLOATS)
    check_tensor(op, "k", k, ("Tk", *q.shape[1:]), (q.dtype,), q)
    check_tensor(op, "v", v, k.shape, (q.dtype,), q)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(op, name, x)
    check_tensor(op, "cu_q", cu_q, ("B + 1",), (torch.int32,), q)
    check_tensor(op, "cu_k", cu_k, cu_q.shape, (torch.int32,), q)
    if len(cu_q) < 2:
        raise ValueError(f"{op}: cu_q must hold at least one sentence, got {len(cu_q)} boundaries")
    if min(max_q, max_k) < 0:
        raise ValueError(f"{op}: max_q and max_k must be >= 0, got {max_q} and {max_k}")
    check_dropout(op, p, rng, q)


def _attention_fwd_fake(q: Tensor, *arguments: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=work_dtype(q))


def _attention_bwd_fake(*arguments: object) -> None:
    return None


_FWD = register(
    "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, int max_q, int max_k,"
    " bool causal, float scale, float p, Tensor rng, int site) -> (Tensor out, Tensor lse)",
    attention_fwd_reference,
    _attention_fwd_fake,
)
_BWD = register(
    "attention_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_q,"
    " Tensor cu_k, int max_q, int max_k, bool causal, float scale, float p, Tensor rng, int site,"
    " Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()",
    attention_bwd_reference,
    _attention_bwd_fake,
)
