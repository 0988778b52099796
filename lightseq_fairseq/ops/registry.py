"""`define` registers an op with torch from one definition.

A definition is a NamedTuple of the op's arguments, with a check, a shape function and a reference
as methods. The reference is plain torch. It is the CPU kernel and the oracle of the tests; a GPU
runs it if the compiled library, which registers the CUDA kernels, has no kernel for the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import NoneType
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from lightseq_fairseq.base.library import REFERENCES

# FRAGMENT, not DEF: the compiled library opens the same namespace to register its kernels.
_LIBRARY = torch.library.Library("lightseq", "FRAGMENT")

#: A tensor that the op writes.
Written = Annotated[Tensor, "written"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Definition(Protocol[R_co]):
    """A NamedTuple whose fields, with their annotations and defaults, give the op's schema.

    Types: Tensor, `Written`, int, float, bool, str, and `| None` of these.
    If the reference returns a result, the class also needs a method ``shape``. It returns
    uninitialised tensors of the result's shape, dtype and strides, without reading any values.
    """

    def check(self, op: str) -> None:
        """Raise a ValueError that begins with ``op`` if an argument is invalid."""

    def reference(self) -> R_co:
        """Compute the result: None, a Tensor, or a tuple of ``Annotated[Tensor, name]``."""

    def __iter__(self) -> Iterator[Any]: ...


def define(name: str, definition: Callable[P, Definition[R]]) -> Callable[P, R]:
    """Define ``lightseq::<name>`` and return its public function.

    The public function takes the definition's fields by position or name, checks them and calls the
    op. The op itself takes them by position. The reference becomes its CPU kernel and is added to
    REFERENCES.
    """

    def reference(*arguments: Any) -> Any:
        with ExitStack() as around:
            if torch.is_grad_enabled():
                # The layers implement the derivatives. Autograd must not record the reference's
                # steps, some of which write in place.
                around.enter_context(torch.no_grad())
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):  # autocast has no effect on kernels either
                    around.enter_context(torch.autocast(device, enabled=False))
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
    """Arguments and results of a definition as a torch schema string.

    ``torch.library.infer_schema`` is not used: it gives results no names, and makes ints SymInt,
    while the compiled kernels take int.
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
