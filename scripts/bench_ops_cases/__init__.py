"""The cases of `bench_ops.py`: every op in the shapes of a t2t-big Transformer, and its baselines.

A case is one op in one direction. It states the minimum bytes that it must move (each operand read
or written once) and, for matrix products, its floating-point operations. All systems of the case
are measured against these numbers:

* ours: the public functions of `lightseq_fairseq.ops`, with outputs allocated as layers do it.
* eager: the formula in eager torch, in training mode; backward is autograd's.
* compile: torch.compile of the same formula, with the backward that it generates.
* library: a kernel that torch includes. linear: torch.mm, without biases; linear_layer,
  linear_activation and activation_linear: torch.mm, and one kernel each for bias, activation and
  their gradients; fp8_linear: torch._scaled_mm; attention: the varlen FlashAttention-2; adam_step:
  AdamW(fused=True), with a cast of the gradient to float32 before it and a copy to the 16-bit
  weights after it.
* apex: FusedAdam in place of AdamW, if apex can be imported.

Symbols in names of cases and in comments: T tokens, C width, F FFN width, V vocabulary size, H
heads, D head width, K inputs and N outputs; in generation N is the number of hypotheses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .activation_linear import activation_linear
from .adam import adam
from .attention import attention
from .beam_search import beam_search
from .bias_activation_dropout import bias_activation_dropout
from .case import Case, Make, Sizes
from .cross_entropy import cross_entropy
from .decode_attention import decode_attention
from .dropout_residual_layer_norm import dropout_residual_layer_norm
from .embedding import embedding
from .fp8 import fp8_casts, fp8_layer_norm, fp8_linear, fp8_linear_activation, fp8_update
from .linear import linear, linear_few_rows, linear_layer
from .linear_activation import linear_activation

__all__ = ["Case", "Sizes", "cases"]

#: Cases that exist for every number of tokens, in the order of the data flow.
BUILDERS = (
    embedding,
    linear,
    linear_layer,
    linear_activation,
    activation_linear,
    attention,
    dropout_residual_layer_norm,
    bias_activation_dropout,
    cross_entropy,
    fp8_casts,
    fp8_layer_norm,
    fp8_linear,
    fp8_linear_activation,
)
#: Cases without a number of tokens: a decode step, and the update.
OTHER_BUILDERS = (linear_few_rows, decode_attention, beam_search, adam, fp8_update)


def cases(sizes: Sizes, tokens: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Yield all cases, each with new inputs; those of the previous case can be freed."""
    make = Make(dtype, device)
    for build in BUILDERS:
        for count in tokens:
            torch.manual_seed(3)
            yield from build(sizes, count, make)
    for build_other in OTHER_BUILDERS:
        torch.manual_seed(3)
        yield from build_other(sizes, make)
