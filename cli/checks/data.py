"""The kinds of data that fairseq's tasks read, which decide the checks of the data."""

from __future__ import annotations

from fairseq.tasks import TASK_REGISTRY

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import named
from lightseq_fairseq.cli.words.registries import function


def kind(task: str) -> str | None:
    """The kind of data of a task: a name in `CHECKS`; None for a task that is not fairseq's.

    A task that has the methods of one in `families` reads the same data; a subclass may override
    them.
    """
    cls = TASK_REGISTRY[task]
    for known in families.tasks().values():
        methods = [(function(cls, x), function(named(known.place), x)) for x in known.loaders]
        if methods and all(one is other for one, other in methods):
            return known.data
    return "other data of fairseq" if cls.__module__.startswith("fairseq.tasks.") else None
