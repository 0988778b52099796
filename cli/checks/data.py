"""The kinds of data that fairseq's tasks read, which decide the checks of the data."""

from __future__ import annotations

from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.tasks.translation import TranslationTask

from lightseq_fairseq.cli.words.registries import function

# Kind of data -> a task of fairseq that reads it, and the methods that load its dictionaries and
# data. A task reads the same data if it has these methods; a subclass may override them.
_READERS: dict[str, tuple[type, tuple[str, ...]]] = {
    "sentence pairs": (TranslationTask, ("setup_task", "load_dictionary", "load_dataset")),
    "running text": (LanguageModelingTask, ("setup_task", "setup_dictionary", "load_dataset")),
    "text to mask": (MaskedLMTask, ("setup_task", "load_dataset")),
    "sentences with labels": (SentencePredictionTask, ("setup_task", "load_dataset")),
}


def kind(task: str) -> str | None:
    """The kind of data of a task: a name in `CHECKS`; None for a task that is not fairseq's."""
    cls = TASK_REGISTRY[task]
    for name, (reader, methods) in _READERS.items():
        if all(function(cls, method) is function(reader, method) for method in methods):
            return name
    return "other data of fairseq" if cls.__module__.startswith("fairseq.tasks.") else None
