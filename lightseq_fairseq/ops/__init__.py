"""The ops, in the order in which a training step uses them.

Each op has a file, and usually a forward and a backward (`lightseq::<stem>_fwd`, `_bwd`). Its
definition is a NamedTuple of the arguments. The methods check the arguments, give the output shapes
and compute the result in plain torch: that reference is the CPU kernel and the oracle of the tests.
From the definition, `registry.define` derives the schema and the public function exported here,
which checks its arguments and calls the op.
"""
# ruff: noqa: F401, I001  (for others to import, in the order of use)

from __future__ import annotations

from lightseq_fairseq.base import library

from .arguments import Cast, Dropout, Quantised, WeightCast
from .philox import attention_keep_mask, dropout_mask, keep_mask
from .embedding import (
    embedding_bwd,
    embedding_fwd,
    embedding_layer_norm_bwd,
    embedding_layer_norm_fwd,
)
from .linear import linear_bwd, linear_fwd
from .rotary_embedding import rotary_embedding
from .attention import attention_bwd, attention_fwd
from .decode_attention import decode_cross_attention, decode_self_attention
from .dropout_residual_layer_norm import (
    dropout_residual_layer_norm_bwd,
    dropout_residual_layer_norm_fwd,
)
from .bias_activation_dropout import bias_activation_dropout_bwd, bias_activation_dropout_fwd
from .gated_activation import gated_activation_bwd, gated_activation_fwd
from .linear_activation import linear_activation_fwd
from .activation_linear import activation_linear_bwd
from .fp8_quantise import fp8_quantise
from .fp8_transpose import fp8_transpose
from .fp8_scales import fp8_scales
from .fp8_weights import fp8_weights
from .cross_entropy import cross_entropy_bwd, cross_entropy_fwd, cross_entropy_fwd_bwd
from .column_sum import defer_column_sums, flush_column_sums
from .block_repeats import block_repeats
from .beam_search import beam_candidates, beam_sample
from .beam_advance import beam_advance
from .update_scalars import update_scalars
from .adam import adam_norm, adam_step, join_floats, split_floats
from .registry import REFERENCES

library.load()  # registers the CUDA kernels; an op without one runs its reference on the GPU
