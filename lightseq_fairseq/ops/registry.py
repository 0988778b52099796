"""`define` registers an op with torch from one definition.

A definition is a NamedTuple of the op's arguments, with a check, a shape function and a reference
as methods. The reference is plain torch. It is the CPU kernel and the oracle of the tests; a GPU
runs it if the compiled library, which registers the CUDA kernels, has no kernel for the op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from types import NoneType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

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

    Types: Tensor, `Written`, int, float, bool, str, and `| None` of these. Also a group, which is a
    NamedTuple of these (`arguments`), ``group | None`` and ``Tensor | group``; the schema has the
    group's fields in its place. Of a missing group, all are None; a Tensor in the place of a group
    is its first field.
    If the reference returns a result, the class also needs a method ``shape``. It returns
    uninitialised tensors of the result's shape, dtype and strides, without reading any values.
    """

    def check(self, op: str) -> None:
        """Raise a ValueError that begins with ``op`` if an argument is invalid."""

    def reference(self) -> R_co:
        """Compute the result: None, a Tensor, or a tuple of tensors."""

    def __iter__(self) -> Iterator[Any]: ...


def define(name: str, definition: Callable[P, Definition[R]], results: str = "") -> Callable[P, R]:
    """Define ``lightseq::<name>`` and return its public function.

    results: if the reference returns a tuple, the names of its tensors in the schema.

    The public function takes the definition's fields by position or name, checks them and calls the
    op. The op itself takes them by position, without groups. The reference becomes its CPU kernel
    and is added to REFERENCES.
    """
    fields = _fields(definition)

    def reference(*arguments: Any) -> Any:
        with ExitStack() as around:
            if torch.is_grad_enabled():
                # The layers implement the derivatives. Autograd must not record the reference's
                # steps, some of which write in place.
                around.enter_context(torch.no_grad())
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):  # autocast has no effect on kernels either
                    around.enter_context(torch.autocast(device, enabled=False))
            return construct(*_grouped(fields, arguments)).reference()

    def shape(*arguments: Any) -> Any:
        if hasattr(construct, "shape"):
            return construct(*_grouped(fields, arguments)).shape()
        return None

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        arguments = definition(*args, **kwargs)
        arguments.check(name)
        result: R = op(*_flat(fields, arguments))
        return result

    construct: Any = definition
    _LIBRARY.define(name + _signature(construct, fields, results))
    _LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"lightseq::{name}", shape, lib=_LIBRARY)
    REFERENCES[name] = reference
    op = getattr(torch.ops.lightseq, name).default
    functools.update_wrapper(call, construct, updated=())
    call.__name__ = call.__qualname__ = name
    return call


class _Argument(NamedTuple):
    """An argument of the op: its name and type in the schema, and its default (... if none)."""

    name: str
    kind: Any
    is_optional: bool
    default: Any


class _Field(NamedTuple):
    """A field of a definition: the class of the group, if it is one, and its arguments."""

    group: Any
    arguments: list[_Argument]


def _fields(definition: Any) -> list[_Field]:
    hints = get_type_hints(definition, include_extras=True)
    fields = []
    for name in definition._fields:
        default = definition._field_defaults.get(name, ...)
        kinds = _kinds(hints[name])
        group = next((kind for kind in kinds if hasattr(kind, "_fields")), None)
        if group is None:
            fields.append(_Field(None, [_Argument(name, kinds[0], NoneType in kinds, default)]))
            continue
        arguments = []
        for place, (inner, hint) in enumerate(get_type_hints(group, include_extras=True).items()):
            kind, *others = _kinds(hint)
            # All are None without the group; all but the first, if a Tensor takes its place.
            may_lack = NoneType in (*kinds, *others) or (Tensor in kinds and place > 0)
            arguments.append(_Argument(f"{name}_{inner}", kind, may_lack, default))
        fields.append(_Field(group, arguments))
    return fields


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the type alone."""
    return (hint,) if get_origin(hint) in (None, Annotated) else get_args(hint)


def _flat(fields: list[_Field], values: Iterable[Any]) -> list[Any]:
    """The values of a definition's fields as arguments of the op."""
    flat: list[Any] = []
    for (group, arguments), value in zip(fields, values, strict=True):
        if group is None:
            flat.append(value)
        elif isinstance(value, group):
            flat += value
        else:
            flat += (value, *[None] * (len(arguments) - 1))
    return flat


def _grouped(fields: list[_Field], flat: Sequence[Any]) -> list[Any]:
    """The inverse of `_flat`. torch leaves out arguments at the end that have their default."""
    values, given = [], iter(flat)
    for group, arguments in fields:
        parts = [next(given, argument.default) for argument in arguments]
        is_group = group is not None and (
            not arguments[-1].is_optional or any(part is not None for part in parts[1:])
        )
        values.append(group(*parts) if is_group else parts[0])
    return values


def _signature(definition: Any, fields: list[_Field], results: str) -> str:
    """Arguments and results of a definition as a torch schema string.

    ``torch.library.infer_schema`` is not used: it gives results no names, and makes ints SymInt,
    while the compiled kernels take int.
    """
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    arguments = []
    for name, kind, is_optional, default in (a for field in fields for a in field.arguments):
        word = f"Tensor({next(letters)}!)" if kind == Written else kind.__name__
        optional, given = "?" * is_optional, "" if default is ... else f"={default}"
        arguments.append(f"{word}{optional} {name}{given}")
    result = get_type_hints(definition.reference)["return"]
    named = ", ".join(f"Tensor {each}" for each in results.split())
    returned = "Tensor" if result is Tensor else f"({named})"
    return f"({', '.join(arguments)}) -> {returned}"
