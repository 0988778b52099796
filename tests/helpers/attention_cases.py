"""Cases of attention, for tests on a CPU and on a GPU."""

from __future__ import annotations

import torch
from helpers.ops_testing import (
    assert_cast_of,
    assert_kernel_as_good_as,
    flat,
    has_fp8,
    leaf,
    make_cast,
    make_rng,
)

from lightseq_fairseq import ops
from lightseq_fairseq.ops.casting import E4M3

SITE = 9
TAIL_Q, TAIL_K = 5, 3  # rows of the bucket after the last sentence
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("out", "lse", "dq", "dk", "dv")

# Query lengths, and key lengths if they differ. Kernels have tiles of 128, 64 or 32 rows, slots of
# 16 rows or more, and 16 rows per warp.
LENGTHS = {
    "edges": ([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 1], None),
    "ragged": ([28, 7, 41, 200, 19, 3, 66, 30, 24, 11, 150, 37, 90, 22, 54, 13], None),
    "long": ([512, 5, 300, 40], None),
    "cross": ([30, 1, 64, 20, 140, 3, 260, 9], [25, 40, 1, 130, 20, 300, 128, 9]),
    "holes": ([0, 3, 0, 40, 200, 6, 0], [4, 0, 0, 30, 0, 150, 140]),
    "unused": ([17, 150, 4, *[0] * 600], None),
    "tiles": ([129, 160, 161, 192, 255, 256, 257, 384], [130, 300, 128, 191, 64, 257, 33, 385]),
}


class Case:
    """Packed tensors for one set of lengths as in the layers: q, k, v are column blocks of wider
    matrices, and rows that belong to no sentence are NaN."""

    def __init__(
        self, lengths, dtype, causal=False, p=0.0, heads=3, width=64, device="cuda", window=0
    ):
        torch.manual_seed(0)
        self.rng = make_rng(device=device)
        self.lengths_q, self.lengths_k = lengths[0], lengths[1] or lengths[0]
        self.dtype, self.causal, self.p, self.scale = dtype, causal, p, width**-0.5
        self.window = window
        self.cu_q, self.cu_k = (
            torch.tensor([0, *x]).cumsum(0).int().to(device)
            for x in (self.lengths_q, self.lengths_k)
        )
        if lengths[1] is None:
            self.cu_k = self.cu_q
        self.used_q, self.used_k = sum(self.lengths_q), sum(self.lengths_k)
        if lengths[1] is None:
            self.q, self.k, self.v = self.blocks(3, self.used_q, TAIL_Q, heads, width)
        else:
            (self.q,) = self.blocks(1, self.used_q, TAIL_Q, heads, width)
            self.k, self.v = self.blocks(2, self.used_k, TAIL_K, heads, width)
        (self.dout,) = self.blocks(1, self.used_q, TAIL_Q, heads, width)

    def blocks(self, count, used, tail, heads, width):
        x = torch.randn(used + tail, count, heads, width, device=self.rng.device).to(self.dtype)
        x[used:] = torch.nan
        return x.unbind(1)

    @property
    def qkv(self):
        return self.q, self.k, self.v

    def settings(self, dropout=True):
        longest = max(self.lengths_q), max(self.lengths_k)
        p = self.p if dropout else 0.0
        return (
            self.cu_q,
            self.cu_k,
            *longest,
            self.causal,
            self.window,
            self.scale,
            ops.Dropout(p, self.rng, SITE),
        )

    def kernel(self):
        """(out, lse, dq, dk, dv), with buffers that were NaN before."""
        poison(self.q)
        out, lse, _ = ops.attention_fwd(*self.qkv, *self.settings())
        gradients = [like(x) for x in self.qkv]
        ops.attention_bwd(self.dout, *self.qkv, out, lse, *self.settings(), *gradients)
        return out, lse, *gradients

    def exact(self):
        """The reference in float64."""
        qkv = [x.double() for x in self.qkv]
        forward, backward = (ops.REFERENCES[f"attention_{name}"] for name in ("fwd", "bwd"))
        out, lse, _ = forward(*qkv, *flat(self.settings()))
        gradients = [torch.empty_like(x) for x in qkv]
        backward(self.dout.double(), *qkv, out, lse, *flat(self.settings()), *gradients)
        return out, lse, *gradients

    def plain(self, dtype=None):
        """The same by torch ops in a dtype, or the case's own, sentence by sentence."""
        dtype = dtype or self.dtype
        q, k, v = (leaf(x, dtype) for x in self.qkv)
        rows, heads, _ = q.shape
        keep = ops.attention_keep_mask(
            self.rng, SITE, torch.arange(rows * heads).to(q.device), max(1, *self.lengths_k), self.p
        ).view(rows, heads, -1)
        out = torch.zeros_like(q, requires_grad=False)
        lse = q.new_zeros(rows, heads)
        cu_q, cu_k = self.cu_q.tolist(), self.cu_k.tolist()
        for b, (length_q, length_k) in enumerate(zip(self.lengths_q, self.lengths_k, strict=True)):
            if length_q == 0 or length_k == 0:
                continue
            mine, seen = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            scores = self.scale * torch.einsum("ihd,jhd->ihj", q[mine], k[seen])
            if self.causal:
                hidden = torch.ones(length_q, length_k, device=q.device).triu(1).bool()
                scores = scores.masked_fill(hidden[:, None], -torch.inf)
            if self.window:
                place = torch.arange(length_q, device=q.device)
                far = (place - place[:, None]).abs() > self.window
                scores = scores.masked_fill(far[:, None], -torch.inf)
            lse[mine] = scores.logsumexp(-1).detach()
            weights = scores.softmax(-1) * keep[mine, :, :length_k] / (1 - self.p)
            out[mine] = torch.einsum("ihj,jhd->ihd", weights, v[seen])
        if out.requires_grad:
            (out * self.dout.to(dtype).nan_to_num(0.0)).sum().backward()
        gradients = (torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v))
        return out.detach(), lse, *(x.nan_to_num(0.0) for x in gradients)


def like(x):
    """A buffer of NaN with the strides of x, a column block of a wider matrix."""
    rows, heads, width = x.shape
    wide = torch.full((rows, x.stride(0)), torch.nan, dtype=x.dtype, device="cuda")
    return wide[:, : heads * width].unflatten(1, (heads, width))


def poison(q):
    """Leave NaN in the memory that torch.empty returns next."""
    blocks = [torch.full(q.shape, torch.nan, dtype=q.dtype, device="cuda") for _ in range(2)]
    dtypes = torch.float32, torch.float64  # of lse
    blocks += [torch.full(q.shape[:2], torch.nan, dtype=dtype, device="cuda") for dtype in dtypes]
    del blocks


def check(case):
    for name, ours, plain, exact in zip(
        NAMES, case.kernel(), case.plain(), case.exact(), strict=True
    ):
        used = case.used_k if name in ("dk", "dv") else case.used_q
        assert ours[used:].eq(0).all(), f"{name}: rows past the last sentence"
        if name == "lse":
            assert ours.dtype == (torch.float64 if case.dtype == torch.float32 else torch.float32)
            ours = ours.float()
        assert_kernel_as_good_as(ours, plain, exact, name, half_roundings=0.5)
    if case.dtype == torch.bfloat16 and case.q[0].numel() % 16 == 0 and has_fp8():
        check_casts(case)


def check_casts(case):
    """The casts are bit for bit those of the results without a cast, which do not change."""
    out, lse, *gradients = case.kernel()
    cast = make_cast(2.0**-9, "cuda")
    poison(case.q)
    *ours, values = ops.attention_fwd(*case.qkv, *case.settings(), cast)
    torch.testing.assert_close(ours, [out, lse], rtol=0, atol=0, equal_nan=True)
    assert_cast_of(out.flatten(1), [values], cast)
    memory = column_slices(case)
    q_cast, k_cast = make_cast(2.0**-5, "cuda"), make_cast(2.0**-13, "cuda")
    given = case.dout, *case.qkv, out, lse, *case.settings()
    ops.attention_bwd(*given, *memory, q_cast, k_cast)
    for part, cast in ((slice(0, 1), q_cast), (slice(1, 3), k_cast)):
        exact = torch.cat([x.flatten(1) for x in gradients[part]])
        values = torch.cat([x.flatten(1).view(torch.uint8) for x in memory[part]])
        assert_cast_of(exact, [values], cast)


def column_slices(case):
    """Memory for dq, dk and dv in E4M3 as in the layers; all NaN."""
    rows_q, rows_k = len(case.q), len(case.k)
    blocks = [(rows_q, 3)] if case.lengths_q is case.lengths_k else [(rows_q, 1), (rows_k, 2)]
    heads, width = case.q.shape[1:]
    memory = [torch.full((r, n, heads, width), 0x7F, dtype=torch.uint8) for r, n in blocks]
    return [x for m in memory for x in m.to(case.q.device).view(E4M3).unbind(1)]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
