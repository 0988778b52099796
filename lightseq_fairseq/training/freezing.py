"""``--freeze``: the parameters that a run does not train.

They keep their values, and have neither gradients nor a state of the optimizer. A checkpoint has
them as any other: fairseq reads it, and a run without the flag can fine-tune from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.plugins.flat_model import FlatModel


def trained(model: nn.Module) -> list[Tensor]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def freeze(model: Any, patterns: str | None) -> None:
    """Freeze the parameters of a model whose names match; None: nothing.

    patterns: with commas between them. A pattern is a part of a name from dot to dot, such as
        encoder or layers.0.fc1. In each word between dots, * ? [] have their meaning in file names.
        A parameter with several names, such as a shared table, is frozen if one of them matches.

    Raises:
        UserError: a pattern matches no parameter, or none is left.
    """
    if patterns is None:
        return
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns.split(","):
        found = [parameter for name, parameter in named if matches(name, pattern.strip())]
        if not found:
            words = sorted({w for name, _ in named for w in name.split(".") if not w.isdigit()})
            raise UserError(
                f"--freeze {pattern} matches no parameter of the model, whose names have these "
                f"parts: {', '.join(words)}."
            )
        for parameter in found:
            parameter.requires_grad_(False)
    if not trained(model):
        raise UserError(f"--freeze {patterns} leaves no parameter to train: name fewer.")
    if isinstance(model, FlatModel):
        model.flatten()


def matches(name: str, pattern: str) -> bool:
    """Whether adjacent words of a name match the words of a pattern."""
    words, wanted = name.split("."), pattern.split(".")
    starts = range(len(words) - len(wanted) + 1)
    return any(_all_match(words[start:], wanted) for start in starts)


def _all_match(words: Sequence[str], wanted: Sequence[str]) -> bool:
    return all(fnmatchcase(word, each) for word, each in zip(words, wanted, strict=False))
