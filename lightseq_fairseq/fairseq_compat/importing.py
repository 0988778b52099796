"""What fairseq needs while it is imported, and hydra when the first command line is parsed."""

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
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightseq_fairseq.errors import UserError
from lightseq_fairseq.fairseq_compat import patching
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
        UserError: a package that fairseq imports is missing; the sentence says how to install it.
    """
    importlib.import_module("torch")  # outside of the blocks below, which are for fairseq's import
    try:
        with (
            patching.within("dataclasses:dataclass", dataclass),
            _scikit_learn_placeholders(),
            _warnings_silenced(),
            _root_logger_kept(),
        ):
            # fairseq loads hydra's configuration classes only when a command line is parsed.
            importlib.import_module("hydra.conf")
            fairseq = importlib.import_module("fairseq")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "fairseq", "torch", *sys.stdlib_module_names):
            raise
        package = _DISTRIBUTIONS.get(missing, missing)
        raise UserError(
            f"fairseq needs {package}, which is not installed: pip install {package} "
            f"(everything that fairseq needs: {install_command})"
        ) from error
    return str(fairseq.__version__)


def dataclass(original: Callable[..., Any], cls: type | None = None, /, **options: Any) -> Any:
    # Python 3.11 refuses a field default whose class is unhashable, and a dataclass with eq is:
    # "mutable default <class 'CommonConfig'> for field common is not allowed". With object's hash
    # the classes of fairseq and hydra keep instances as defaults, which fairseq's hydra_init reads
    # (a default_factory would hide them from it).
    def decorate(cls: type) -> type:
        made: Any = original(cls, **options)
        root = made.__module__.partition(".")[0]
        if made.__hash__ is None and root in ("fairseq", "hydra", "omegaconf"):
            made.__hash__ = object.__hash__
        return made

    return decorate if cls is None else decorate(cls)


@contextlib.contextmanager
def _scikit_learn_placeholders() -> Iterator[None]:
    # The head and fairseq-fixed import scikit-learn (and scipy) for audio classification and
    # sentence prediction unconditionally: "No module named 'sklearn'", for a user who translates.
    # The names that those modules bind complain when they are called.
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
            raise UserError(f"this part of fairseq needs {package}: pip install {package}")

        return missing


@contextlib.contextmanager
def _warnings_silenced() -> Iterator[None]:
    # Invalid escapes in fairseq's strings (SyntaxWarning from Python 3.12 on), torch.jit.script
    # decorators (DeprecationWarning from torch 2.13 on) and the like, and the advice of a task for
    # speech to install tensorboardX: nobody who trains can act on them.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        for category in (DeprecationWarning, SyntaxWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    # Some of fairseq's speech modules configure the root logger when they are imported. fairseq_cli
    # does so before it imports fairseq; coming second it would be ignored, and the training log
    # would go to stderr, in fairseq-fixed in another format and at level DEBUG.
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def hydra_wants_find_module() -> bool:
    # hydra before 1.3 loads its plugins through importer.find_module, which Python 3.12 lacks:
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
