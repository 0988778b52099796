"""Repairs during fairseq's import, and of hydra's plugin loading at the first command line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.fairseq_compat import deprecations, patching
from lightseq_fairseq.fairseq_compat.overlay import Overlay

# Import name -> name in the package index, where the two differ.
_DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "sklearn": "scikit-learn",
    "antlr4": "antlr4-python3-runtime",
}


def import_fairseq(install_command: str) -> str:
    """Imports fairseq with all its models and tasks and returns its version.

    Raises:
        UserError: a package that fairseq imports is missing; the message says how to install it.
    """
    # Hide a speech task's advice to install tensorboardX.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    try:
        with (
            patching.within("dataclasses:dataclass", dataclass),
            _scikit_learn_placeholders(),
            deprecations.silenced(),
            _root_logger_kept(),
        ):
            # fairseq imports hydra.conf only when it parses a command line, but hydra's dataclasses
            # need the repair as well.
            importlib.import_module("hydra.conf")
            fairseq = importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "fairseq", "torch", *sys.stdlib_module_names):
            raise
        package = _DISTRIBUTIONS.get(missing, missing)
        raise UserError(
            f"fairseq needs {package}, which is not installed: run pip install {package} "
            f"(everything that fairseq needs: {install_command})"
        ) from error
    return str(fairseq.__version__)


def dataclass(original: Callable[..., Any], cls: type | None = None, /, **options: Any) -> Any:
    # Python 3.11 refuses a field default of an unhashable class, and a dataclass with eq is
    # unhashable: "mutable default <class 'CommonConfig'> for field common is not allowed". Giving
    # the classes of fairseq and hydra object's hash allows instances as defaults. A default_factory
    # is no alternative: fairseq's hydra_init reads the default instances.
    def decorate(cls: type) -> type:
        made: Any = original(cls, **options)
        root = made.__module__.partition(".")[0]
        if made.__hash__ is None and root in ("fairseq", "hydra", "omegaconf"):
            made.__hash__ = object.__hash__
        return made

    return decorate if cls is None else decorate(cls)


@contextlib.contextmanager
def _scikit_learn_placeholders() -> Iterator[None]:
    # The head and fairseq-fixed always import scikit-learn and scipy, which only audio
    # classification and sentence prediction use: "No module named 'sklearn'". The placeholders
    # raise a UserError only when such a function is called.
    placeholders: dict[str, types.ModuleType] = {}
    for package, child in (("sklearn", "metrics"), ("scipy", "stats")):
        if importlib.util.find_spec(package) is None:
            parent = _Placeholder(package)
            setattr(parent, child, _Placeholder(f"{package}.{child}"))
            placeholders[package] = parent
            placeholders[f"{package}.{child}"] = getattr(parent, child)
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for name in placeholders:
            del sys.modules[name]


class _Placeholder(types.ModuleType):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        package = self.__name__.partition(".")[0]
        package = _DISTRIBUTIONS.get(package, package)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise UserError(
                f"This part of fairseq needs {package}, which is not installed: run pip install "
                f"{package}."
            )

        return missing


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    # Some of fairseq's speech modules configure the root logger when they are imported. In stock
    # fairseq, fairseq_cli configures it first, before it imports fairseq. Here fairseq is imported
    # first, and fairseq_cli's configuration would be ignored: the training log would go to stderr,
    # in fairseq-fixed in another format and at level DEBUG. So restore the root logger.
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def hydra_wants_find_module() -> bool:
    # hydra before 1.3 loads its plugins with importer.find_module, which Python 3.12 has removed:
    # "'FileFinder' object has no attribute 'find_module'" when the first command line is parsed.
    from hydra.core import plugins

    source = inspect.getsource(plugins.Plugins)
    is_gone = not hasattr(importlib.machinery.FileFinder, "find_module")
    return is_gone and "find_module" in source and "find_spec" not in source


def _walk_packages(*args: Any, **kwargs: Any) -> Iterator[Any]:
    for found in pkgutil.walk_packages(*args, **kwargs):
        yield _FindModule(found.module_finder), found.name, found.ispkg


PKGUTIL = Overlay(pkgutil, walk_packages=_walk_packages)


class _FindModule:
    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_module(self, name: str) -> Any:
        return self._finder.find_spec(name).loader
