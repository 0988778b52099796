"""Accelerated training of fairseq's Transformers.

``import lightseq_fairseq`` loads neither torch nor fairseq: a submodule is imported when it is
first used. The tuple below lists most submodules, roughly from the user to the files. From Python,
``lightseq_fairseq.Translator`` translates with a trained model, ``LanguageModel`` continues prompts
with one, ``RobertaModel`` fills in masks and classifies with one, and ``layers`` trains one.
"""

from __future__ import annotations

import importlib

# Not typing.TYPE_CHECKING: with the start-up hook (startup.py), every Python process imports this
# module when it starts, so it imports as little as possible.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lightseq_fairseq.language_model import LanguageModel as LanguageModel
    from lightseq_fairseq.roberta import RobertaModel as RobertaModel
    from lightseq_fairseq.translator import Translator as Translator

__version__ = "0.2.0"

_SUBMODULES = (
    "errors",  # errors that the user can correct, each in one sentence
    "cli",  # the commands
    "translator",  # translation from Python
    "language_model",  # text by a language model, from Python
    "pretrained",  # the common code of these two
    "roberta",  # masked words, features and classes, from Python
    "startup",  # makes import fairseq work everywhere in this environment
    "fairseq_compat",  # makes fairseq importable on a current Python and torch
    "plugins",  # model, criterion and optimizer, registered with fairseq
    "training",  # sentence pairs -> packed batch -> update
    "packing",  # the packed tokens of a batch, in one block of memory
    "layers",  # embedding -> encoder -> decoder -> criterion, forward and backward
    "ops",  # the ops that layers call: signatures and readable references
    "library",  # loads the CUDA kernels of these ops
    "parameters",  # flat parameters and flat gradients for the optimizer
    "generation",  # translation and text generation by a trained model
    "checkpoints",  # the saved files
)

_CLASSES = {
    "Translator": "translator",
    "LanguageModel": "language_model",
    "RobertaModel": "roberta",
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
