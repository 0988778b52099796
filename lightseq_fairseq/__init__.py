"""Accelerated training of fairseq's Transformers.

``import lightseq_fairseq`` loads neither torch nor fairseq: a submodule is imported when it is
first touched. The tuple below names them in the order in which a batch meets them. From Python,
``lightseq_fairseq.Translator`` translates with a trained model, ``LanguageModel`` continues prompts
with one, ``RobertaModel`` fills in masks and classifies with one, and ``layers`` trains one.
"""

from __future__ import annotations

import importlib

# Not typing's: Python imports this module at its start where the start-up hook is written.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lightseq_fairseq.language_model import LanguageModel as LanguageModel
    from lightseq_fairseq.roberta import RobertaModel as RobertaModel
    from lightseq_fairseq.translator import Translator as Translator

__version__ = "0.2.0"

_SUBMODULES = (
    "errors",  # what the user did wrong, in one sentence
    "cli",  # the command that was typed
    "translator",  # the same for translation, from Python
    "language_model",  # and for text by a language model
    "pretrained",  # what both have in common
    "roberta",  # and for masked words, features and classes
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
