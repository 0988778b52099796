"""How an op of this project comes to be: one definition, from which all else follows.

A definition is the typed tuple of the op's arguments with a reference, a check and a shape function
as its methods. The reference is plain torch. It is the op's CPU kernel, the oracle of the tests,
and what a GPU runs where the compiled library is missing; that attaches the CUDA kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from lightseq_fairseq.library import REFERENCES

# FRAGMENT and not DEF: the compiled library opens the same namespace to attach its kernels.
_LIBRARY = torch.library.Library("lightseq", "FRAGMENT")

#: A tensor that the op writes.
Written = Annotated[Tensor, "written"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Definition(Protocol[R_co]):
    """A NamedTuple whose fields are the op's arguments; annotations and defaults are its schema's.

    Types: Tensor, `Written`, int, float, bool, str, and `| None` of these.
    A class whose reference returns something also has a method ``shape``: the same for tensors
    without values, empty ones of the right shape, dtype and strides.
    """

    def check(self, op: str) -> None:
        """Raise a ValueError that begins with ``op`` where an argument cannot be used."""

    def reference(self) -> R_co:
        """What the op computes: None, a Tensor, or a tuple of ``Annotated[Tensor, name]``."""

    def __iter__(self) -> Iterator[Any]: ...


def define(name: str, definition: Callable[P, Definition[R]]) -> Callable[P, R]:
    """Define ``lightseq::<name>`` and return its public function.

    That takes the definition's fields, by position or name, checks them and calls the op. The op
    itself takes them by position; its reference becomes the CPU kernel and is put in REFERENCES.
    """

    def reference(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():  # as in a backward pass and in translating
            return construct(*arguments).reference()
        # The layers know the derivatives; the reference's steps, some of which write in place, must
        # not be recorded.
        with torch.no_grad():
            return construct(*arguments).reference()

    def shape(*arguments: Any) -> Any:
        return construct(*arguments).shape() if hasattr(construct, "shape") else None

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = definition(*args, **kwargs)
        arguments.check(name)
        result: R = op(*arguments)
        return result

    construct: Any = definition
    _LIBRARY.define(name + _signature(construct))
    _LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"lightseq::{name}", shape, lib=_LIBRARY)
    REFERENCES[name] = reference
    op = getattr(torch.ops.lightseq, name).default
    functools.update_wrapper(call, construct, updated=())
    call.__name__ = call.__qualname__ = name
    return call


def _signature(definition: Any) -> str:
    """Arguments and results of a definition in the words of torch's schemas.

    Not by ``torch.library.infer_schema``, whose results have no names and whose ints are SymInt:
    the compiled library's kernels take int.
    """
    hints = get_type_hints(definition, include_extras=True)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    arguments = []
    for field in definition._fields:
        kinds = get_args(hints[field])
        optional = "?" if NoneType in kinds else ""
        kind = kinds[0] if optional else hints[field]
        word = f"Tensor({next(letters)}!)" if kind == Written else kind.__name__
        default = definition._field_defaults.get(field, ...)
        arguments.append(f"{word}{optional} {field}" + ("" if default is ... else f"={default}"))
    result = get_type_hints(definition.reference, include_extras=True)["return"]
    results = "Tensor" if result is Tensor else "()"
    if get_args(result):
        results = ", ".join(f"Tensor {named.__metadata__[0]}" for named in get_args(result))
        results = f"({results})"
    return f"({', '.join(arguments)}) -> {results}"
