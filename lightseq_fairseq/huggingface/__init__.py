"""Hugging Face models whose layers this package computes: the same objects, several times as fast.

import lightseq_fairseq.huggingface as lightseq
model = lightseq.accelerate(model)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightseq_fairseq.huggingface.accelerated import Coverage, accelerate, report, restore
from lightseq_fairseq.huggingface.adamw import LightseqAdamW
from lightseq_fairseq.huggingface.loss import cross_entropy

if TYPE_CHECKING:
    from lightseq_fairseq.huggingface.trainer import Seq2SeqTrainer, Trainer

__all__ = [
    "Coverage",
    "LightseqAdamW",
    "Seq2SeqTrainer",
    "Trainer",
    "accelerate",
    "cross_entropy",
    "report",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name in ("Seq2SeqTrainer", "Trainer"):  # they import transformers' Trainer, for seconds
        from lightseq_fairseq.huggingface import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
