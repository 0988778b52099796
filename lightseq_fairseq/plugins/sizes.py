"""Archs that fairseq lacks: `register`, and those of ``ls_transformer`` with the sizes of published
models.

Their checkpoints name fairseq's arch transformer, with all sizes.
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


def register(model: str, name: str, own: dict[str, Any]) -> None:
    """Register an arch of a model; a flag of the command takes precedence over its own settings,
    as in fairseq's archs. The decoder's widths follow the encoder's."""

    def architecture(args: Any) -> None:
        for setting, value in own.items():
            setattr(args, setting, getattr(args, setting, value))
        base_architecture(args)

    register_model_architecture(model, name)(architecture)


def of_both(**settings: Any) -> dict[str, Any]:
    """The settings of encoder and decoder."""
    return {
        f"{side}_{setting}": value
        for side in ("encoder", "decoder")
        for setting, value in settings.items()
    }


for _name, (_layers, _width, _inner) in SIZES.items():
    register("ls_transformer", _name, {
        **of_both(layers=_layers, attention_heads=16, normalize_before=True),
        "encoder_embed_dim": _width, "encoder_ffn_embed_dim": _inner, "share_all_embeddings": True,
        "dropout": 0.1, "attention_dropout": 0.1,
    })  # fmt: skip
