"""Cases of ops/attention.py.

Eager pads its packed rows, calls scaled_dot_product_attention with a mask, and packs the result.
(FlashAttention accepts no mask and cuDNN is off, so torch uses its memory-efficient kernel.) This
is the fastest eager code, except for nested tensors; these call the kernel of the system library,
the varlen FlashAttention-2. Unlike fairseq's batches, these have sentences of very different
lengths, so eager and compile compute much padding: compare with library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.packing import Segments

from .batch import segments
from .case import SITE, Case, Formula, Make, Run, Sizes, without_autograd

LONG = 512  # tokens per sentence in the case "long"


def attention(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    target, source = segments(tokens, make.device)
    yield from _attention("self", sizes, target, target, False, make)
    yield from _attention("causal", sizes, target, target, True, make)
    yield from _attention("cross", sizes, target, source, False, make)
    lengths = torch.full((-(-tokens // LONG),), LONG, device=make.device)
    lengths[-1] -= lengths.sum() - tokens
    long = Segments.from_lengths(lengths)
    yield from _attention("long", sizes, long, long, False, make)


def _attention(
    shape: str, sizes: Sizes, queries: Segments, keys: Segments, causal: bool, make: Make
) -> Iterator[Case]:
    heads, head_width, p, rng = sizes.heads, sizes.width // sizes.heads, sizes.dropout, make.rng()
    rows_q, rows_k = len(queries.index), len(keys.index)
    scale = head_width**-0.5
    # The layout that GEMMs write: q, k, v from one product, or q from one and k, v from another.
    blocks = [(rows_q, 3)] if queries is keys else [(rows_q, 1), (rows_k, 2)]

    def heads_of(new: Callable[..., Tensor]) -> list[Tensor]:
        return [x for r, n in blocks for x in new(r, n, heads, head_width).unbind(1)]

    q, k, v = (x.detach().requires_grad_() for x in heads_of(make.rows))
    dout = make.rows(rows_q, heads, head_width)
    cu_q, cu_k, max_q, max_k = queries.cu_seqlens, keys.cu_seqlens, queries.max_len, keys.max_len
    options = (causal, scale, p, rng, SITE)

    hidden = torch.arange(max_k, device=make.device) >= cu_k.diff()[:, None]
    hidden = hidden[:, None, None, :].expand(-1, 1, max_q, -1)
    if causal:
        hidden = hidden | ~torch.ones_like(hidden[:1]).tril()
    mask = torch.zeros(hidden.shape, dtype=make.dtype, device=make.device)
    mask.masked_fill_(hidden, -torch.inf)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        q, k, v = (s.pad(x).transpose(1, 2) for s, x in ((queries, q), (keys, k), (keys, v)))
        out = functional.scaled_dot_product_attention(q, k, v, mask, p, scale=scale)
        return (queries.pack(out.transpose(1, 2)),)

    def forward() -> tuple[Tensor]:
        return (ops.attention_fwd(q, k, v, cu_q, cu_k, max_q, max_k, *options)[0],)

    def ours_backward() -> Run:
        out, lse = ops.attention_fwd(q, k, v, cu_q, cu_k, max_q, max_k, *options)

        def run() -> list[Tensor]:
            grads = heads_of(make.empty)
            ops.attention_bwd(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, *options, *grads)
            return grads

        return torch.no_grad()(run)

    def flash_forward() -> list[Tensor]:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, p, causal, False, scale=scale
        )

    def flash_backward() -> Run:
        out, lse, seed, unused, _ = torch.no_grad()(flash_forward)()
        return torch.no_grad()(
            lambda: torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, seed, unused,
                scale=scale,
            )
        )  # fmt: skip

    fwd, bwd = Formula(formula, (q, k, v), (dout,)).systems()
    fwd, bwd = {"ours": without_autograd(forward), **fwd}, {"ours": ours_backward, **bwd}
    if make.dtype != torch.float32 and make.device != "cpu":
        fwd["library"], bwd["library"] = without_autograd(flash_forward), flash_backward
    lse_bytes = 4 * rows_q * heads
    # Backward need not read out: rowsum(P * dP), computed on the chip, replaces rowsum(dO * O).
    yield Case(f"attention_fwd.{shape}/T{rows_q}", 2 * q.nbytes + 2 * k.nbytes + lse_bytes, fwd)
    yield Case(f"attention_bwd.{shape}/T{rows_q}", 3 * q.nbytes + 4 * k.nbytes + lse_bytes, bwd)
