"""Accelerated training of fairseq's Transformers.

``import lightseq_fairseq`` loads neither torch nor fairseq: a folder is imported when it is first
used. The tuple below lists the folders, from the user down; each imports only what is below it.
From Python, ``lightseq_fairseq.Translator`` translates with a trained model, ``LanguageModel``
continues prompts with one, ``RobertaModel`` fills in masks and classifies with one, and ``layers``
trains one.
"""

from __future__ import annotations

import importlib

# Not typing.TYPE_CHECKING: with the start-up hook (startup.py), every Python process imports this
# module when it starts, so it imports as little as possible.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lightseq_fairseq.python.language_model import LanguageModel as LanguageModel
    from lightseq_fairseq.python.roberta import RobertaModel as RobertaModel
    from lightseq_fairseq.python.translator import Translator as Translator

__version__ = "0.2.0"

_SUBMODULES = (
    "cli",  # the commands
    "python",  # translation, text, masked words and classes, from Python
    "patches",  # all names of fairseq that this package replaces
    "training",  # fairseq's Trainer with the captured step; signals, checkpoints in the background
    "checkpoints",  # the saved files: names, loading, export
    "plugins",  # model, criterion and optimizer, registered with fairseq
    "startup",  # makes import fairseq work everywhere in this environment
    "fairseq_compat",  # makes fairseq importable on a current Python and torch
    "huggingface",  # models of transformers, computed by our layers
    "step",  # packed batch -> loss -> gradients -> update
    "generation",  # translation and text generation by a trained model
    "layers",  # embedding -> encoder -> decoder -> criterion, forward and backward
    "memory",  # packed batches, flat parameters, CUDA graphs, scales of fp8
    "ops",  # the ops that layers call: signatures and readable references
    "base",  # errors, files, and the compiled library
)

_CLASSES = {
    "Translator": "python.translator",
    "LanguageModel": "python.language_model",
    "RobertaModel": "python.roberta",
}

__all__ = ["LanguageModel", "RobertaModel", "Translator", "__version__", *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _CLASSES:
        return getattr(importlib.import_module(f"{__name__}.{_CLASSES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
