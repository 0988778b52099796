"""Calls in fairseq that still work but make hydra and torch warn; users cannot fix the calls.

`WARNINGS` names every Python warning that this package silences.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

#: (category, regular expression for the beginning of the message)
WARNINGS: tuple[tuple[type[Warning], str], ...] = (
    # Python, once, when it compiles fairseq's strings: before 3.12 and since.
    (DeprecationWarning, r".*invalid escape sequence"),
    (SyntaxWarning, r".*invalid escape sequence"),
    # torch 2.13, and 2.14 in another category: fairseq decorates functions when it is imported.
    (DeprecationWarning, r"`torch\.jit\.script` is deprecated"),
    (FutureWarning, r"`torch\.jit\.script` is deprecated"),
    # hydra 1.1 and later: fairseq composes its configuration as for hydra 1.0.
    (UserWarning, r"hydra\.experimental\.(initialize|compose)\(\) is no longer experimental"),
    (UserWarning, r"Future Hydra versions will no longer change working directory"),
    (UserWarning, r"\s*The version_base parameter is not specified"),
    (UserWarning, r"In '.*': Usage of deprecated keyword in package header"),
    (UserWarning, r"\s*'.*' is validated against ConfigStore schema with the same name"),
    (UserWarning, r"\s*The strict flag in the compose API is deprecated"),
    # torch: fairseq always asks for pinned memory, gathers numbers of ranks in a torch.cuda tensor,
    # and its decoder mixes types of masks.
    (UserWarning, r"'pin_memory' argument is set as true but no accelerator is found"),
    (UserWarning, r"The torch\.cuda\.\*DtypeTensor constructors are no longer recommended"),
    (UserWarning, r"Support for mismatched key_padding_mask and attn_mask is deprecated"),
)


def silence() -> None:
    """Silence `WARNINGS` in this process."""
    for category, message in WARNINGS:
        warnings.filterwarnings("ignore", message, category)


@contextmanager
def silenced() -> Iterator[None]:
    """Silence `WARNINGS` within the block."""
    with warnings.catch_warnings():
        silence()
        yield


def convert_namespace_to_omegaconf(original: Callable[[Any], Any], args: Any) -> Any:
    with silenced():
        return original(args)
