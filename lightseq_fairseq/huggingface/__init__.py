"""Hugging Face models whose layers this package computes: the same objects, several times as fast.

import lightseq_fairseq.huggingface as lightseq
model = lightseq.accelerate(model)
"""

from lightseq_fairseq.huggingface.accelerated import Coverage, accelerate, report, restore

__all__ = ["Coverage", "accelerate", "report", "restore"]
