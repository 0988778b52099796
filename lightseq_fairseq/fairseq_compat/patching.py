"""Replaces names of fairseq, as the list ``lightseq_fairseq.patches`` says.

The replacement of an entry is defined in the module that it belongs to. Most often it is a function
that gets the original function, then the original's arguments.

    apply("repair")                  replaces the names of a phase, permanently
    within("module:name", wrapper)   replaces one name in a with block

Calling either of them twice is safe. Nothing else in this package assigns to names of fairseq;
`test_patching` checks this.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NamedTuple

PACKAGE = "lightseq_fairseq"

# Phase -> when its names are replaced.
PHASES = {
    "import": "while fairseq is imported; then undone",
    "repair": "by fairseq_compat.prepare(): by every launcher, --user-dir and the startup hook",
    "model": "when one of our models is built, also with --user-dir",
    "launcher": "by every launcher",
    "whole split": "by every launcher but lightseq-interactive",
    "training": "by lightseq-train",
    "our trainer": "by lightseq-train with an ls_ component",
    "fairseq's trainer": "by lightseq-train without an ls_ component, or with --native",
    "our models": "by lightseq-generate, -validate, -interactive and -eval-lm",
    "fairseq's models": "by lightseq-generate, -validate, -interactive and -eval-lm with --native",
    "saving": "when training with an ls_ component begins",
    "scoped": "while a block of our code runs; then undone",
}


class Patch(NamedTuple):
    """One name that is replaced."""

    phase: str  #: when it is replaced: a key of PHASES
    target: str  #: the name: "module:name" or "module:Class.name"
    by: str  #: "module:name" of the replacement; for "scoped", of the code that replaces it
    why: str  #: what goes wrong without the replacement, or what the replacement adds
    instead: bool = False  #: the replacement is the new value, not a wrapper of the old one
    when: str = ""  #: "module:name" of a function: does this fairseq need it? "" means always
    everywhere: bool = False  #: also replace it in modules that imported it, and in subclasses


# State of this process; a reload of this module keeps it.
_replacements: dict[Patch, Any] = globals().get("_replacements", {})
_is_needed: dict[str, bool] = globals().get("_is_needed", {})  # results, by Patch.when
_undone: set[Patch] = globals().get("_undone", set())


@functools.cache
def listed() -> tuple[Patch, ...]:
    """``PATCHES``, imported by its name like the replacements: it names things of all floors."""
    found: tuple[Patch, ...] = importlib.import_module(f"{PACKAGE}.patches").PATCHES
    return found


def apply(phase: str) -> None:
    """Replaces the names of a phase, except those already replaced or not needed by this fairseq.

    Raises:
        ImportError, AttributeError: a name does not exist; then nothing has been replaced.
    """
    found = [(*_place(p.target), _ours(p.by), p) for p in listed() if p.phase == phase]
    for owner, name, ours, patch in found:
        if _is_in_place(patch, getattr_static(owner, name)) or not _needs(patch):
            continue
        for holder in _holders(owner, name) if patch.everywhere else [owner]:
            new = ours if patch.instead else around(getattr_static(holder, name), ours)
            setattr(holder, name, new)
            if holder is owner:
                _replacements[patch] = new


@contextmanager
def within(target: str, ours: Any, by: str = "") -> Iterator[None]:
    """Replaces a listed name within the block, by ``ours`` or by a wrapper that calls ``ours``.

    by: the start of the entry's ``by``, if the list has several entries for the name.
    If other code replaces the same name within the block, the end of the block undoes that, too.
    """
    (patch,) = (
        p
        for p in listed()
        if p.target == target and p.phase in ("import", "scoped") and p.by.startswith(by)
    )
    owner, name = _place(target)
    before, was_inherited = getattr_static(owner, name), name not in vars(owner)
    _replacements[patch] = ours if patch.instead else around(before, ours)
    setattr(owner, name, _replacements[patch])
    try:
        yield
    finally:
        if was_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        # Kept, it would keep what it refers to: a trainer with its model and optimizer.
        _replacements.pop(patch, None)
        _undone.add(patch)


def around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``original`` that calls ``ours`` with ``original`` and the arguments.

    TorchScript would compile the source of ``original`` with the globals of this module. So replace
    a method that it compiles with a function of its own (``instead``).
    """

    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        return ours(original, *args, **keywords)

    return call


def state(patch: Patch) -> str:
    """The state of an entry in this process, as a short text."""
    module, _, path = patch.target.partition(":")
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        value = getattr_static(value, name, None)
    if _is_in_place(patch, value):
        return "applied"
    if not _is_needed.get(patch.when, True):
        return "not needed"
    return "undone" if patch in _undone else "not applied here"


def report() -> Iterator[str]:
    """The lines of `lightseq-doctor --verbose`: each entry by phase, with its state and reason."""
    for phase, when in PHASES.items():
        yield f"{phase}: {when}"
        for patch in listed():
            if patch.phase == phase:
                yield f"  {patch.target} ({state(patch)})"
                yield f"      {patch.why} [{patch.by}]"


def _ours(name: str) -> Any:
    module, _, path = name.partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), path)


def _place(target: str) -> tuple[Any, str]:
    """(module or class, name in it) of a target.

    Raises:
        ImportError, AttributeError: it does not exist.
    """
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    getattr_static(owner, name)
    return owner, name


def _needs(patch: Patch) -> bool:
    if patch.when and patch.when not in _is_needed:  # tested once: the repair removes the symptom
        _is_needed[patch.when] = _ours(patch.when)()
    return _is_needed.get(patch.when, True)


def _is_in_place(patch: Patch, value: Any) -> bool:
    """Whether a name's value is the entry's replacement, or a wrapper of it."""
    while value is not None and patch in _replacements:
        if value is _replacements[patch]:
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def _holders(owner: Any, name: str) -> list[Any]:
    """Owners of the name: ``owner`` and the subclasses that define it, or, if ``owner`` is a
    module, all modules of fairseq that bind the name to the same value."""
    if isinstance(owner, type):
        heirs: list[Any] = [owner]
        for heir in heirs:  # the list grows: subclasses of subclasses
            heirs += [child for child in heir.__subclasses__() if child not in heirs]
        return [heir for heir in heirs if name in vars(heir)]
    modules = [module for key, module in sys.modules.items() if key.startswith("fairseq")]
    value = getattr_static(owner, name)
    return [module for module in modules if vars(module).get(name) is value]
