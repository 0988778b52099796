"""Converts checkpoints of the original LightSeq (github.com/bytedance/lightseq) to fairseq's.

LightSeq stores the parameters of each layer in one vector, ``layers.<n>.para``. There are two
published layouts. In LightSeq 2 the vectors hold only the parameters, and the embeddings are a
table. LightSeq 3 adds the quantisation bounds, ``clip_max``: 12 numbers at the end of an encoder
layer, 24 after a decoder layer's own parameters, and one at the end of the embeddings, which are a
vector, too. In both layouts the vector of the first decoder layer ends with the key and value
projections of the cross attention of all layers.

Shapes: C = model width, F = ffn width, N = decoder layers, V = vocabulary, P = positions.
"""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import torch
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import saving
from lightseq_fairseq.checkpoints.names import native_cfg
from lightseq_fairseq.fairseq_compat.checkpoints import is_original_lightseq
from lightseq_fairseq.layers import sinusoidal_positions

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]  # by fairseq's name, in the order of the vector

_PAD = 1  # the pad index in all dictionaries of fairseq
_POSITIONS = 1024  # fairseq's default; LightSeq's table had 300
_CLIP_MAX = {"encoder": 12, "decoder": 24}
_MISMATCH = "its options belong to another model."

# Options that LightSeq's command line accepted and its model ignored, with neutral values.
_NEVER_READ = {
    "encoder_embed_path": None,
    "decoder_embed_path": None,
    "adaptive_softmax_cutoff": None,
    "no_token_positional_embeddings": False,
    "no_scale_embedding": False,
    "layernorm_embedding": False,
    "no_cross_attention": False,
    "cross_self_attention": False,
    "encoder_layerdrop": 0,
    "decoder_layerdrop": 0,
    "encoder_layers_to_keep": None,
    "decoder_layers_to_keep": None,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
    "checkpoint_activations": False,
    "offload_activations": False,
}
_ITS_OWN = ("use_torch_layer", "enable_quant", "quant_mode", "enable_GCQ", "GCQ_quantile")


def to_native(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Convert to a checkpoint of a native fairseq Transformer that computes the same function.

    Two differences remain: the epsilon of LayerNorm (1e-8 in LightSeq, 1e-5 in fairseq), and the
    quantisation, which is dropped. LightSeq's sinusoidal positions begin two rows before fairseq's,
    so they become learned positions with LightSeq's values. Its gelu is fairseq's gelu_accurate.
    Its output projection is the target embedding.

    Args:
        checkpoint: with "args" (or "cfg", after fairseq 0.10.2) and "model".

    Returns:
        "args", "model" in float32 and the entries that fairseq needs to start a run; no optimizer
        state.

    Raises:
        UserError: the weights do not match the options, or no fairseq Transformer computes the
            same function.
    """
    args: Any = checkpoint.get("args") or (checkpoint.get("cfg") or {}).get("model")
    source: Tensors = {
        name: value.float() for name, value in checkpoint["model"].items() if torch.is_tensor(value)
    }
    _check(args, source)
    model: Tensors = {}
    for side in ("encoder", "decoder"):
        model[f"{side}.version"] = torch.tensor([3.0])
        model |= _embeddings(args, source, side)
        for n in range(getattr(args, f"{side}_layers")):
            model |= _layer(args, source, side, n)
        model |= _last_norm(args, source, side)
    tables = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if torch.equal(*(model[name] for name in tables)):
        model[tables[1]] = model[tables[0]]
    model["decoder.output_projection.weight"] = model[tables[1]]
    return saving.without_optimizer(_native_args(args, model), model)


def _check(args: Any, source: Tensors) -> None:
    if not is_original_lightseq(source):
        raise UserError(
            "this is not a checkpoint of the original LightSeq, whose layers are flat vectors "
            "(para). A checkpoint of fairseq needs no conversion."
        )
    if not isinstance(args, Namespace):
        raise UserError(
            "the checkpoint has no options (args), which are needed to split the vectors: use a "
            "checkpoint that LightSeq's training wrote."
        )
    if args.encoder_embed_dim != args.decoder_embed_dim:
        raise UserError(
            f"encoder and decoder differ in width, but LightSeq needs equal widths: {_MISMATCH}"
        )
    for side in ("encoder", "decoder"):
        if not getattr(args, f"{side}_normalize_before") and f"{side}.layer_norm.weight" in source:
            raise UserError(
                f"the post-norm {side} ends with a LayerNorm, as in early versions of LightSeq. No "
                "Transformer of fairseq has one there, so the checkpoint cannot be converted."
            )


def _named(source: Tensors, name: str) -> Tensor:
    if name not in source:
        raise UserError(f"the checkpoint has no {name}, which its options require: {_MISMATCH}")
    return source[name]


def _layer(args: Namespace, source: Tensors, side: str, n: int) -> Tensors:
    """Parameters in a layer's vector, by fairseq's names.

    The first decoder layer's vector also holds the cross-attention keys and values of all layers.
    """
    name = f"{side}.layers.{n}.para"
    vector = _named(source, name).flatten()
    width, ffn = args.encoder_embed_dim, getattr(args, f"{side}_ffn_embed_dim")
    own, memory = _own_shapes(width, ffn, side), Shapes()
    if (side, n) == ("decoder", 0):
        keys_and_values = (args.decoder_layers, 2, width)
        memory = {"weight": (*keys_and_values, width), "bias": keys_and_values}
    plain = sum(map(math.prod, [*own.values(), *memory.values()]))
    if vector.numel() - plain not in (0, _CLIP_MAX[side]):
        raise UserError(
            f"{name} has {vector.numel():,} numbers, but the checkpoint's options require "
            f"{plain:,} or, with quantisation bounds, {plain + _CLIP_MAX[side]:,}: {_MISMATCH}"
        )
    cut = _cut(vector, own)
    model = {f"{side}.layers.{n}.{part}": value for part, value in cut.items()}
    behind = vector[vector.numel() - sum(map(math.prod, memory.values())) :]
    for kind, stacked in _cut(behind, memory).items():
        for layer, pair in enumerate(stacked):
            for p, value in zip("kv", pair, strict=True):
                model[f"decoder.layers.{layer}.encoder_attn.{p}_proj.{kind}"] = value
    return model


def _own_shapes(width: int, ffn: int, side: str) -> Shapes:
    """Shapes of a layer's own parameters, in the order of its vector.

    q, k and v of self-attention are stored as one matrix [3 C, C]: the rows of q, then k, then v.
    """
    shapes: Shapes = {}
    projections = {"self_attn": "qkv", "encoder_attn": "q"}
    for block in ("self_attn", "encoder_attn")[: 1 if side == "encoder" else 2]:
        shapes |= {f"{block}.{p}_proj.weight": (width, width) for p in projections[block]}
        shapes |= {f"{block}.{p}_proj.bias": (width,) for p in projections[block]}
        shapes |= {f"{block}.out_proj.weight": (width, width), f"{block}.out_proj.bias": (width,)}
        shapes |= {f"{block}_layer_norm.{kind}": (width,) for kind in ("weight", "bias")}
    shapes |= {"fc1.weight": (ffn, width), "fc1.bias": (ffn,)}
    shapes |= {"fc2.weight": (width, ffn), "fc2.bias": (width,)}
    return shapes | {f"final_layer_norm.{kind}": (width,) for kind in ("weight", "bias")}


def _cut(vector: Tensor, shapes: Shapes) -> Tensors:
    """Split the start of ``vector`` into consecutive views of these shapes."""
    sizes = list(map(math.prod, shapes.values()))
    pieces = vector[: sum(sizes)].split(sizes)
    return {
        name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


def _last_norm(args: Namespace, source: Tensors, side: str) -> Tensors:
    """The LayerNorm after a pre-norm stack; {} if there is none."""
    off = side == "decoder" and getattr(args, "no_decoder_final_norm", False)
    if off or not getattr(args, f"{side}_normalize_before"):
        return {}
    names = [f"{side}.layer_norm.{kind}" for kind in ("weight", "bias")]
    return {name: _named(source, name) for name in names}


def _embeddings(args: Namespace, source: Tensors, side: str) -> Tensors:
    """Table [V, C] and positions [_PAD + 1 + P, C] of one side."""
    name, width = f"{side}.embed_tokens", args.encoder_embed_dim
    in_vector = f"{name}.para" in source
    found = source[f"{name}.para"] if in_vector else _named(source, f"{name}.embeddings")
    if found.numel() % width > 1:  # one extra number is clip_max
        raise UserError(
            f"{name} has {found.numel():,} numbers, no multiple of the width {width}: {_MISMATCH}"
        )
    rows = found.flatten()[: found.numel() // width * width].view(-1, width)
    if in_vector and (args.encoder_learned_pos or args.decoder_learned_pos):
        shared = side == "encoder" or args.share_all_embeddings
        longest = args.max_source_positions if shared else args.max_target_positions
        rows, positions = rows[:-longest], rows[-longest:]
    else:
        # sinusoidal_positions sets the pad's row to zero; with padding_idx=-1 that is the last row,
        # which is dropped.
        positions = sinusoidal_positions(_POSITIONS + 1, width, padding_idx=-1)[:-1]
    return {
        f"{name}.weight": rows,
        f"{side}.embed_positions.weight": torch.nn.functional.pad(positions, (0, 0, _PAD + 1, 0)),
    }


def _native_args(args: Namespace, model: Tensors) -> Namespace:
    """The options that make fairseq build ``model``."""
    tables = [model[f"{side}.embed_tokens.weight"] for side in ("encoder", "decoder")]
    changed = {
        **vars(native_cfg(args)),
        **_NEVER_READ,
        "task": "translation",
        "encoder_learned_pos": True,
        "decoder_learned_pos": True,
        "share_all_embeddings": tables[0] is tables[1],
        "share_decoder_input_output_embed": True,
        "decoder_output_dim": args.decoder_embed_dim,
        "decoder_input_dim": args.decoder_embed_dim,
    }
    if changed["arch"] not in ARCH_MODEL_INV_REGISTRY["transformer"]:
        changed["arch"] = "transformer"  # a user's own architecture; args hold all its options
    for side, option in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
        changed[option] = len(model[f"{side}.embed_positions.weight"]) - _PAD - 1
    if getattr(args, "activation_fn", "relu") == "gelu":
        changed["activation_fn"] = "gelu_accurate"
    return Namespace(**{name: value for name, value in changed.items() if name not in _ITS_OWN})
