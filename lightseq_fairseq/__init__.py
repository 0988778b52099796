"""Accelerated training of fairseq's translation Transformer.

``import lightseq_fairseq`` loads neither torch nor fairseq: a submodule is imported when it is
first touched. The tuple below names them in the order in which a batch meets them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__version__ = "0.2.0"

_SUBMODULES = (
    "errors",  # what the user did wrong, in one sentence
    "cli",  # the command that was typed
    "startup",  # import fairseq, typed anywhere in this environment
    "fairseq_compat",  # fairseq, made importable on a current Python and torch
    "plugins",  # model, criterion and optimizer as fairseq sees them
    "training",  # sentence pairs -> packed batch -> update
    "packing",  # rows of a batch end to end, in one block
    "layers",  # embedding -> encoder -> decoder -> criterion, and back
    "ops",  # what a layer calls: signature, readable reference
    "library",  # the same ops as CUDA kernels
    "parameters",  # flat parameters and flat gradient, which the optimizer updates
    "generation",  # the trained model, translating
    "checkpoints",  # what is left on disk
)

__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> ModuleType:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
