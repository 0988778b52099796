"""Calls in fairseq that still work but make hydra and torch warn; users cannot fix the calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lightseq_fairseq.fairseq_compat.overlay import Overlay

# "FutureWarning: torch.cuda.amp.autocast(args...) is deprecated" in the first update.
_AMP = Overlay(
    torch.cuda.amp,
    autocast=functools.partial(torch.amp.autocast, "cuda"),
    GradScaler=functools.partial(torch.amp.GradScaler, "cuda"),
)
TORCH = Overlay(torch, cuda=Overlay(torch.cuda, amp=_AMP))


def convert_namespace_to_omegaconf(original: Callable[[Any], Any], args: Any) -> Any:
    # fairseq composes its configuration as for hydra 1.0. Later versions print six warnings (twenty
    # lines) at the start of each command.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return original(args)
