"""fairseq options that the ls_ models do not support, and why."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerConfig

from lightseq_fairseq.plugins import settings
from lightseq_fairseq.plugins.settings import MODEL, REFUSED, option


class Unsupported(NamedTuple):
    """An option that a model does not support: the flag, perhaps with its value, and why.

    by_arch: whether the arch sets it, and perhaps no flag of the command.
    """

    flag: str
    reason: str
    by_arch: bool = False

    def sentence(self, arch: str) -> str:
        """The message for a user of ``arch``: what is wrong, why, and what to do."""
        way_out = "use another arch, because this one sets it" if self.by_arch else "remove it"
        return (
            f"{arch} does not support {self.flag} ({self.reason}): {way_out}, or add --native to "
            "use fairseq's own layers."
        )


def set_by_arch(args: Any, name: str) -> bool:
    """Whether an option of a model has the value that its arch sets.

    args: the model's options, a Namespace or a section of a configuration.
    """
    arch = getattr(args, "arch", None) or getattr(args, "_name", None)
    mine = getattr(settings_of(arch), name, None)
    return mine is not None and mine == getattr(args, name, None)


def settings_of(arch: str | None) -> Namespace:
    """The options that an arch sets if no flag does."""
    options = Namespace()
    with contextlib.suppress(AttributeError):  # some archs read what only a flag sets
        ARCH_CONFIG_REGISTRY.get(arch, lambda options: None)(options)
    return options


def unsupported_option(args: Namespace, supports: Sequence[str] = ()) -> Unsupported | None:
    """An option that the ls_ model does not support, or None.

    supports: the options that other families refuse and that the model's family supports.
    """
    for flag, row in settings.rows(MODEL, REFUSED):
        name = option(flag)
        value = getattr(args, name, None)
        is_set = value and value != -1  # -1: every head and block is kept
        if flag not in supports and (is_set if row.used is None else row.used(args)):
            shown = flag if row.used is None else f"{flag} {value}"
            return Unsupported(shown, row.reason, set_by_arch(args, name))
    return None


def unsupported_width(cfg: TransformerConfig) -> Unsupported | None:
    """A width that the CUDA kernels do not support, or None."""
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
                reason = f"on a GPU {what} must be a multiple of 8{limit}, but is {width}"
                return Unsupported(flag, reason)
    return None
