"""Modules of Hugging Face whose class is a subclass of ours, and what they count."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lightseq_fairseq.huggingface.covered import NotCovered


@dataclass
class Coverage:
    """How often our layers computed, and why Hugging Face's did instead.

    Attributes:
        calls: of an accelerated forward or ``generate``.
        fallbacks: reason -> how often Hugging Face's ran.
    """

    calls: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"accelerated: {self.calls} calls"]
        lines += [f"Hugging Face's forward: {n} calls, because {why}"
                  for why, n in self.fallbacks.most_common()]  # fmt: skip
        return "\n".join(lines)

    def falls_back(self, reason: NotCovered, method: str) -> None:
        """Count a call of Hugging Face's own ``method``; the first one of a reason warns."""
        if not reason.is_usual and str(reason) not in self.fallbacks:
            text = f"lightseq: Hugging Face's own {method} runs, because {reason}."
            warnings.warn(text, stacklevel=3)
        self.fallbacks[str(reason)] += 1


class Swapped:
    """Mixin of the subclasses; ``_original`` is the class of Hugging Face.

    An instance keeps our state in ``_lightseq``, which no file has.
    """

    _lightseq: Any
    _original: type

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A file has Hugging Face's object, so that it can be loaded without this package."""
        state = {name: value for name, value in vars(self).items() if name != "_lightseq"}
        return object.__new__, (self._original,), state

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


def subclass(original: Any, mixin: type, **methods: Any) -> Any:
    """A subclass with these methods. Its name and module are those of ``original``, by which
    transformers finds what it records."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__,
             "__doc__": original.__doc__, "_original": original, **methods}  # fmt: skip
    return type(original.__name__, (mixin, original), names)
