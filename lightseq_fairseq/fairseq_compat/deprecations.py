"""Calls of fairseq that hydra and torch still serve, with a warning each time."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch
from fairseq.dataclass import utils as dataclass_utils
from fairseq.optim import amp_optimizer
from fairseq.tasks import fairseq_task

from lightseq_fairseq.fairseq_compat.overlay import Overlay


def repair() -> None:
    """Spares the user warnings that only fairseq's authors could act on."""
    _repair_autocast()
    _silence_hydra()


def _repair_autocast() -> None:
    # "FutureWarning: torch.cuda.amp.autocast(args...) is deprecated" in the first update.
    amp = Overlay(
        torch.cuda.amp,
        autocast=functools.partial(torch.amp.autocast, "cuda"),
        GradScaler=functools.partial(torch.amp.GradScaler, "cuda"),
    )
    for module in (fairseq_task, amp_optimizer):
        module.torch = Overlay(torch, cuda=Overlay(torch.cuda, amp=amp))


def _silence_hydra() -> None:
    # fairseq composes its configuration in the way of hydra 1.0; later ones answer with six
    # warnings, twenty lines, at the start of each command.
    name = "convert_namespace_to_omegaconf"
    original = getattr(dataclass_utils, name)

    @functools.wraps(original)
    def convert_namespace_to_omegaconf(args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return original(args)

    for module_name, module in list(sys.modules.items()):  # imported by name nearly everywhere
        if module_name.startswith("fairseq") and getattr(module, name, None) is original:
            setattr(module, name, convert_namespace_to_omegaconf)
