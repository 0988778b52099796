"""fairseq options that our models do not support, and why."""

from __future__ import annotations

from argparse import Namespace

from fairseq.models.transformer import TransformerConfig

ACTIVATIONS = ("relu", "gelu", "gelu_accurate")

# (flag, the attribute of fairseq's namespace that it sets, why it is not supported)
UNSUPPORTED = (
    ("--adaptive-softmax-cutoff", "adaptive_softmax_cutoff", "the loss needs every logit"),
    ("--adaptive-input", "adaptive_input", "the embedding is one table"),
    ("--tie-adaptive-weights", "tie_adaptive_weights", "the embedding is one table"),
    ("--quant-noise-pq", "quant_noise_pq", "the fused layers have no quantisation noise"),
    ("--quant-noise-scalar", "quant_noise_scalar", "the fused layers have no quantisation noise"),
    ("--no-cross-attention", "no_cross_attention", "every decoder layer attends to the source"),
    ("--cross-self-attention", "cross_self_attention", "source and target are packed apart"),
    # Offloading before checkpointing: fairseq's --offload-activations also sets the latter, which
    # the user did not give.
    ("--offload-activations", "offload_activations", "layers keep what backward needs"),
    ("--checkpoint-activations", "checkpoint_activations", "layers keep what backward needs"),
    ("--base-layers", "base_layers", "mixture-of-experts layers are not fused"),
    ("--character-embeddings", "character_embeddings", "the embedding is one table of tokens"),
    ("--scale-fc", "scale_fc", "the layers have no LayerNorm within a sublayer"),
    ("--scale-attn", "scale_attn", "the layers have no LayerNorm within a sublayer"),
    ("--scale-heads", "scale_heads", "heads are not scaled one by one"),
    ("--scale-resids", "scale_resids", "the residual is added as it is"),
    ("--char-inputs", "char_inputs", "the embedding is one table of tokens"),
    ("--encoder-xformers-att-config", "encoder_xformers_att_config", "attention is our own"),
    ("--decoder-xformers-att-config", "decoder_xformers_att_config", "attention is our own"),
    ("--pipeline-model-parallel", "pipeline_model_parallel", "all layers lie in one flat buffer"),
    ("--quantization-config-path", "quantization_config_path", "layers read weights directly"),
    ("--amp", "amp", "the fused layers run in one precision; use --fp16 or --bf16"),
)  # fmt: skip


# Those of UNSUPPORTED that language models support.
ADAPTIVE = ("--adaptive-softmax-cutoff", "--adaptive-input", "--tie-adaptive-weights")


def unsupported_option(args: Namespace, adaptive: bool = False) -> str | None:
    """A sentence that names an option that our model does not support, or None.

    adaptive: whether the model supports the options of ``ADAPTIVE``.
    """
    for flag, name, reason in UNSUPPORTED:
        if getattr(args, name, None) and not (adaptive and flag in ADAPTIVE):
            return _sentence(flag, reason)
    activation = getattr(args, "activation_fn", "relu")
    if activation not in ACTIVATIONS:
        return _sentence(
            f"--activation-fn {activation}", f"only {', '.join(ACTIVATIONS)} are fused"
        )
    if getattr(args, "ddp_backend", None) == "fully_sharded":
        return _sentence("--ddp-backend fully_sharded", "parameters live in one flat buffer")
    return None


def unsupported_width(cfg: TransformerConfig) -> str | None:
    """A sentence that names a width that the CUDA kernels do not support, or None."""
    for name, side in (("encoder", cfg.encoder), ("decoder", cfg.decoder)):
        heads = side.attention_heads
        for flag, width, most in (
            (f"--{name}-embed-dim {side.embed_dim}", side.embed_dim, 8192),
            (f"--{name}-ffn-embed-dim {side.ffn_embed_dim}", side.ffn_embed_dim, 1 << 20),
            (f"--{name}-attention-heads {heads}", side.embed_dim // heads, 128),
        ):
            if width % 8 or width > most:
                what = "the width of a head" if "heads" in flag else "it"
                limit = f" up to {most}" if most < 1 << 20 else ""
                return _sentence(
                    flag, f"on a GPU {what} must be a multiple of 8{limit}, is {width}"
                )
    return None


def _sentence(flag: str, reason: str) -> str:
    return (
        f"ls_transformer does not support {flag} ({reason}): drop it, or train with fairseq's own "
        "layers by adding --native."
    )
