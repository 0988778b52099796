"""Cases of ops/attention.py.

In batches of WMT-like sentences, eager pads its packed rows, calls scaled_dot_product_attention
with a mask, and packs the result. (FlashAttention accepts no mask and cuDNN is off, so torch uses
its memory-efficient kernel.) This is the fastest eager code, except for nested tensors; these call
the kernel of the system library, the varlen FlashAttention-2. Unlike fairseq's batches, these have
sentences of very different lengths, so eager and compile compute much padding: compare with
library.

Batches of equal sentences of 128 to 4096 tokens, and the lengths of BERT's pre-training, compare
ours with the two fast kernels that torch includes, FlashAttention-2 and cuDNN. Our gradients are
the same bits for the same input; by default those of the libraries are not, so FlashAttention-2
also runs in its deterministic form. torch offers no deterministic cuDNN attention, and none of
packed rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.ops.casting import E4M3

from .batch import bert_lengths, segments
from .case import SITE, Case, Formula, Make, Run, Sizes, without_autograd
from .fp8 import cast_of

LONG = 512  # tokens per sentence in the case "long"
LENGTHS, BATCH = (128, 256, 512, 1024, 2048, 4096), 16384  # of equal sentences, and their sum
HEAD_WIDTHS = {64: "", 128: ".w128"}  # and their part of a case's name

Systems = dict[str, Callable[[], Run]]


def attention(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    target, source = segments(tokens, make.device)
    lengths = torch.full((-(-tokens // LONG),), LONG, device=make.device)
    lengths[-1] -= lengths.sum() - tokens
    long = Segments.from_lengths(lengths)
    for shape, queries, keys, causal in (
        ("self", target, target, False),
        ("causal", target, target, True),
        ("cross", target, source, False),
        ("long", long, long, False),
    ):
        width = sizes.width // sizes.heads
        inputs = _Inputs(make, sizes.heads, width, sizes.dropout, queries, keys, causal)
        yield from inputs.cases(shape, inputs.formula().systems(), inputs.flash())
        if make.dtype == torch.bfloat16:
            yield from inputs.with_casts(shape)
    if tokens == BATCH and make.dtype != torch.float32 and make.device != "cpu":
        yield from _long_sentences(sizes, make)


def _long_sentences(sizes: Sizes, make: Make) -> Iterator[Case]:
    """Yield the cases of ours and the libraries' kernels alone, with dropout and without."""
    batches = []
    for n, width, causal in itertools.product(LENGTHS, HEAD_WIDTHS, (False, True)):
        name = f"{n}{HEAD_WIDTHS[width]}{'.causal' * causal}"
        batches.append((name, torch.full((BATCH // n,), n), width, causal))
    batches.append(("512.bertmix", bert_lengths(BATCH), 64, False))
    yield from _windows(sizes, make)
    for shape, lengths, width, causal in batches:
        sentences = Segments.from_lengths(lengths.to(make.device))
        for p, part in ((sizes.dropout, ""), (0.0, ".nodrop")):
            heads = sizes.width // width
            inputs = _Inputs(make, heads, width, p, sentences, sentences, causal)
            deterministic = {}, {"library_deterministic": inputs.flash_deterministic}
            yield from inputs.cases(shape + part, inputs.flash(), inputs.cudnn(), deterministic)


def _windows(sizes: Sizes, make: Make) -> Iterator[Case]:
    """Yield the cases of windows of 64 tokens on each side, as ModernBERT's."""
    for n in LENGTHS:
        sentences = Segments.full((BATCH // n, n), make.device)
        heads = sizes.width // 64
        inputs = _Inputs(make, heads, 64, 0.0, sentences, sentences, False, window=64)
        yield from inputs.cases(f"{n}.window.nodrop", inputs.flash())


@dataclass
class _Inputs:
    """The tensors of a case, and its systems: for forward, and for backward."""

    make: Make
    heads: int
    head_width: int
    p: float
    queries: Segments
    keys: Segments
    causal: bool
    window: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    dout: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.q, self.k, self.v = (
            x.detach().requires_grad_() for x in self._heads_of(self.make.rows)
        )
        self.dout = self.make.rows(*self.q.shape)
        self.rng = self.make.rng()
        self.lengths = (
            self.queries.cu_seqlens, self.keys.cu_seqlens, self.queries.max_len, self.keys.max_len,
        )  # fmt: skip
        self.scale = self.head_width**-0.5

    def _heads_of(self, new: Callable[..., Tensor]) -> list[Tensor]:
        """Return new tensors in the layout of q, k and v that GEMMs write: three in one product,
        or q in one and k, v in another."""
        rows_q, rows_k = len(self.queries.index), len(self.keys.index)
        blocks = [(rows_q, 3)] if self.queries is self.keys else [(rows_q, 1), (rows_k, 2)]
        return [x for r, n in blocks for x in new(r, n, self.heads, self.head_width).unbind(1)]

    def cases(self, shape: str, *systems: tuple[Systems, Systems]) -> Iterator[Case]:
        fwd, bwd = self.ours()
        for more_fwd, more_bwd in systems:
            fwd, bwd = {**fwd, **more_fwd}, {**bwd, **more_bwd}
        rows, q, k, lse = self._bytes()
        # Backward need not read out: rowsum(P * dP), computed on the chip, is rowsum(dO * O).
        yield Case(f"attention_fwd.{shape}/T{rows}", 2 * q + 2 * k + lse, fwd)
        yield Case(f"attention_bwd.{shape}/T{rows}", 3 * q + 4 * k + lse, bwd)

    def with_casts(self, shape: str) -> Iterator[Case]:
        """Forward that also casts its result, and backward that stores its results in E4M3."""
        rows, q, k, lse = self._bytes()
        options = (
            *self.lengths,
            self.causal,
            self.window,
            self.scale,
            ops.Dropout(self.p, self.rng, SITE),
        )
        cast = cast_of(self.make, 6.0)

        def forward() -> tuple[Tensor, ...]:
            out, _, values = ops.attention_fwd(self.q, self.k, self.v, *options, cast)
            return out, values

        def backward() -> tuple[Tensor, ...]:
            gradients = [x.view(E4M3) for x in self._heads_of(bytes_of)]
            ops.attention_bwd(*given, *gradients, cast, cast)
            return tuple(gradients)

        def bytes_of(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=self.q.device)

        out, log_sums, _ = ops.attention_fwd(self.q, self.k, self.v, *options)
        given = self.dout, self.q, self.k, self.v, out, log_sums, *options
        for way, moved, run in (
            ("fwd", 2 * q + 2 * k + lse + q // 2, forward),
            ("bwd", 2 * q + 2 * k + lse + q // 2 + k, backward),
        ):
            systems = {"ours": without_autograd(run)}
            yield Case(f"fp8_attention_{way}.{shape}/T{rows}", moved, systems)

    def _bytes(self) -> tuple[int, int, int, int]:
        """The number of queries, and the bytes of q, k and lse."""
        rows = len(self.queries.index)
        lse = (8 if self.q.dtype == torch.float32 else 4) * rows * self.heads
        return rows, self.q.nbytes, self.k.nbytes, lse

    def ours(self) -> tuple[Systems, Systems]:
        tensors = self.q, self.k, self.v
        options = (
            *self.lengths,
            self.causal,
            self.window,
            self.scale,
            ops.Dropout(self.p, self.rng, SITE),
        )

        def forward() -> tuple[Tensor]:
            return (ops.attention_fwd(*tensors, *options)[0],)

        def backward() -> Run:
            out, lse, _ = ops.attention_fwd(*tensors, *options)

            def run() -> list[Tensor]:
                grads = self._heads_of(self.make.empty)
                ops.attention_bwd(self.dout, *tensors, out, lse, *options, *grads)
                return grads

            return torch.no_grad()(run)

        return {"ours": without_autograd(forward)}, {"ours": backward}

    def formula(self) -> Formula:
        cu_k, max_q, max_k = self.keys.cu_seqlens, self.queries.max_len, self.keys.max_len
        hidden = torch.arange(max_k, device=self.make.device) >= cu_k.diff()[:, None]
        hidden = hidden[:, None, None, :].expand(-1, 1, max_q, -1)
        if self.causal:
            hidden = hidden | ~torch.ones_like(hidden[:1]).tril()
        if self.window:
            near = torch.ones_like(hidden[:1]).tril(self.window).triu(-self.window)
            hidden = hidden | ~near
        mask = torch.zeros(hidden.shape, dtype=self.make.dtype, device=self.make.device)
        mask.masked_fill_(hidden, -torch.inf)
        queries, keys = self.queries, self.keys

        def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
            q, k, v = (s.pad(x).transpose(1, 2) for s, x in ((queries, q), (keys, k), (keys, v)))
            attention = functional.scaled_dot_product_attention
            out = attention(q, k, v, mask, self.p, scale=self.scale)
            return (queries.pack(out.transpose(1, 2)),)

        return Formula(formula, (self.q, self.k, self.v), (self.dout,))

    def flash(self) -> tuple[Systems, Systems]:
        """FlashAttention-2 of torch: no kernel for float32, and none for a CPU."""
        if self.make.dtype == torch.float32 or self.make.device == "cpu":
            return {}, {}
        tensors = self.q, self.k, self.v
        sides = ("window_size_left", "window_size_right") if self.window else ()
        options = {"scale": self.scale, **dict.fromkeys(sides, self.window)}

        def forward() -> list[Tensor]:
            return torch.ops.aten._flash_attention_forward(
                *tensors, *self.lengths, self.p, self.causal, False, **options
            )

        def backward() -> Run:
            out, lse, seed, unused, _ = torch.no_grad()(forward)()
            return torch.no_grad()(
                lambda: torch.ops.aten._flash_attention_backward(
                    self.dout, *tensors, out, lse, *self.lengths, self.p, self.causal, seed,
                    unused, **options,
                )
            )  # fmt: skip

        return {"library": without_autograd(forward)}, {"library": backward}

    def flash_deterministic(self) -> Run:
        _, systems = self.flash()
        backward = systems["library"]()

        def run() -> object:
            torch.use_deterministic_algorithms(True)
            try:
                return backward()
            finally:
                torch.use_deterministic_algorithms(False)

        return run

    def cudnn(self) -> tuple[Systems, Systems]:
        """cuDNN's attention in torch, of dense tensors: sentences of one length."""
        length, rows = self.queries.max_len, len(self.queries.index)
        if length * self.queries.shape[0] != rows:
            return {}, {}
        aten = torch.ops.aten

        def dense(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, length)).transpose(1, 2)

        tensors = [dense(x) for x in (self.q, self.k, self.v)]
        dout = dense(self.dout)

        def forward() -> list[Tensor]:
            return aten._scaled_dot_product_cudnn_attention(
                *tensors, None, True, self.p, self.causal, scale=self.scale
            )

        def backward() -> Run:
            out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = torch.no_grad()(forward)()
            return torch.no_grad()(
                lambda: aten._scaled_dot_product_cudnn_attention_backward(
                    dout, *tensors, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, self.p,
                    self.causal, scale=self.scale,
                )
            )  # fmt: skip

        return {"cudnn": without_autograd(forward)}, {"cudnn": backward}
