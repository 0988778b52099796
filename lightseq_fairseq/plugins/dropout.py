"""Where the dropout masks of our models come from when fairseq trains or calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.layers import draw_rng
from lightseq_fairseq.layers.dropout import numbered_passes


def dropout_rng(module: torch.nn.Module, device: torch.device) -> Tensor:
    """Dropout's rng for one pass: int64 [2].

    In evaluation nothing is drawn from torch's generator, as in fairseq's model. So fairseq's
    sampling search gives the same results for a ``--seed`` as with fairseq's model.
    """
    if module.training:
        return draw_rng(device)
    return torch.zeros(2, dtype=torch.int64, device=device)


def seed_of_masks(trainer: Any) -> int:
    """The seed of a fairseq trainer's masks; the number of updates is added to it.

    Each rank has its own.
    """
    seed: int = trainer.cfg.common.seed
    return seed + (trainer.data_parallel_rank << 32)


def train_step(original: Callable[..., Any], self: Any, *args: Any, **options: Any) -> Any:
    """fairseq's ``Trainer.train_step``; in it our layers draw nothing from torch's generator.

    That generator chooses the layers of layer drop, for example. The number of updates decides the
    masks, so a resumed run draws those of an uninterrupted one.
    """
    with numbered_passes(seed_of_masks(self) + self.get_num_updates()):
        return original(self, *args, **options)
