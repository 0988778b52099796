"""What `bench_ops.py` times: every op on the shapes of a t2t-big Transformer, beside plain torch.

A case is one op in one direction. It declares once the least bytes it must move (each operand read
or written once) and, for products, its operations; every system is measured against the same count.

* ours: the public functions of `lightseq_fairseq.ops`, with their outputs allocated as layers do.
* eager: the formula in plain torch, in training mode; its backward is autograd's.
* compile: torch.compile of that same formula; its backward is the one that it generates.
* library: a kernel that torch brings along. linear: torch.mm, without biases; linear_layer and
  relu_linear: it and a kernel each for bias, ReLU and their gradients; attention: the varlen
  FlashAttention-2; adam_step: AdamW(fused=True) between a cast to float32 and a copy-out.
* apex: its FusedAdam in the same place, where apex imports.

T tokens, C width, F ffn width, V vocabulary, H heads, D head width, K inputs and N outputs; in
generation N hypotheses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .adam import adam
from .attention import attention
from .beam_search import beam_search
from .bias_activation_dropout import bias_activation_dropout
from .case import Case, Make, Sizes
from .cross_entropy import cross_entropy
from .decode_attention import decode_attention
from .dropout_residual_layer_norm import dropout_residual_layer_norm
from .embedding import embedding
from .linear import linear, linear_few_rows, linear_layer
from .relu_linear import relu_linear

__all__ = ["Case", "Sizes", "cases"]

#: Cases that exist for every number of tokens, in the order of the data.
BUILDERS = (
    embedding,
    linear,
    linear_layer,
    relu_linear,
    attention,
    dropout_residual_layer_norm,
    bias_activation_dropout,
    cross_entropy,
)
#: Those that know no tokens: a step of generation, and the update.
OTHER_BUILDERS = (linear_few_rows, decode_attention, beam_search, adam)


def cases(sizes: Sizes, tokens: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    """All cases, each with fresh inputs that its predecessor's need not outlive."""
    make = Make(dtype, device)
    for build in BUILDERS:
        for count in tokens:
            torch.manual_seed(3)
            yield from build(sizes, count, make)
    for build_other in OTHER_BUILDERS:
        torch.manual_seed(3)
        yield from build_other(sizes, make)
