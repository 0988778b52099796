"""Archs of ``ls_transformer`` with the sizes of published models that fairseq has no arch for.

Checkpoints name fairseq's arch transformer, with all sizes.
"""

from __future__ import annotations

from typing import Any

from fairseq.models import register_model_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture

# Arch -> layers of each side, C, inner width of the feed-forward layers. Pre-norm, 16 heads, one
# table of embeddings, fairseq's sinusoidal positions. Sources: fairseq's examples/m2m_100 and, of
# its branch nllb, sweep/sweep_mmt.py.
SIZES = {
    "ls_transformer_m2m_100_418m": (12, 1024, 4096),
    "ls_transformer_m2m_100_1_2b": (24, 1024, 8192),
    "ls_transformer_nllb_600m": (12, 1024, 4096),
    "ls_transformer_nllb_1_3b": (24, 1024, 8192),
    "ls_transformer_nllb_3_3b": (24, 2048, 8192),
}


def _set(name: str, layers: int, width: int, inner: int) -> None:
    """Register an arch; a flag of the command takes precedence, as in fairseq's archs."""
    own: dict[str, Any] = {
        "encoder_embed_dim": width, "encoder_ffn_embed_dim": inner,  # and so the decoder's
        "share_all_embeddings": True, "dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip
    for side in ("encoder", "decoder"):
        own |= {
            f"{side}_layers": layers, f"{side}_attention_heads": 16,
            f"{side}_normalize_before": True,
        }  # fmt: skip

    def architecture(args: Any) -> None:
        for setting, value in own.items():
            setattr(args, setting, getattr(args, setting, value))
        base_architecture(args)

    register_model_architecture("ls_transformer", name)(architecture)


for _name, _sizes in SIZES.items():
    _set(_name, *_sizes)
