"""Prepares fairseq when it is first imported: see ``lightseq_fairseq.startup``."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # every Python process imports this module: import only what is loaded anyway
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

    Find = Callable[[], Callable[[], None]]  # imports and returns `fairseq_compat.prepare`


class Finder:
    """Finds fairseq with the other finders, and prepares it when it is loaded."""

    def __init__(self, find: Find) -> None:
        self.find = find

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "fairseq" or name in sys.modules:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _prepares(loader.exec_module, self.find)
        return spec


def _prepares(load: Callable[[Any], None], find: Find) -> Callable[[Any], None]:
    def exec_module(module: Any) -> None:
        unwatch()
        try:
            from lightseq_fairseq.base import errors

            prepare = find()
        except Exception:  # if our installation is broken, import fairseq without us
            return load(module)
        del sys.modules["fairseq"]  # prepare() imports it again; the import returns that module
        try:
            prepare()
        except errors.UserError as error:
            if "fairseq" not in sys.modules:
                watch(find)  # try again at the next import: what is missing may be installed then
                raise ImportError(str(error), name="fairseq") from error
            print(f"lightseq_fairseq: {error}", file=sys.stderr)  # imported, but not patched
        return None

    return exec_module


def watch(find: Find) -> None:
    """Install the finder, which acts on the first import of fairseq."""
    unwatch()
    sys.meta_path.insert(0, Finder(find))


def is_watching() -> bool:
    """Whether an import of fairseq would now be prepared."""
    return "fairseq" not in sys.modules and any(isinstance(f, Finder) for f in sys.meta_path)


def unwatch() -> None:
    """Remove the finder: Python imports fairseq without preparing it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
