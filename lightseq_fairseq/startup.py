"""``import fairseq`` by anybody in this Python: fairseq-train, a converter, a notebook.

``python -m lightseq_fairseq.startup`` writes one line into this Python's site-packages, as
scripts/setup.sh does. By it Python puts a finder in front of its others when it starts. That looks
at one name: the first import of fairseq becomes `fairseq_compat.prepare`'s. Otherwise 0.12.2 ends
in "mutable default <class 'CommonConfig'>" on Python 3.11 and later. ``--remove`` takes the line
away again, and LIGHTSEQ_FAIRSEQ_HOOK=0 leaves it without effect.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # every Python process imports this module: nothing that Python has not loaded
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

FILE = "lightseq_fairseq_startup.pth"
SWITCH = "LIGHTSEQ_FAIRSEQ_HOOK"

# Python runs a line that begins with "import", whatever else is installed when it comes to it.
_LINE = (
    f"import os, sys; os.environ.get({SWITCH!r}) != '0' "
    "and 'lightseq_fairseq.startup' not in sys.orig_argv and "
    r'exec("try:\n import lightseq_fairseq.startup as s\n s.watch()\nexcept Exception:\n pass")'
)


class Finder:
    """Finds fairseq where the others do, and has it prepared when it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "fairseq" or name in sys.modules:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = _prepares(loader.exec_module)
        return spec


def _prepares(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def exec_module(module: Any) -> None:
        unwatch()
        try:
            from lightseq_fairseq import errors, fairseq_compat
        except Exception:  # a broken installation of ours is no reason to keep fairseq back
            return load(module)
        del sys.modules["fairseq"]  # prepare() puts another one there, which the import returns
        try:
            fairseq_compat.prepare()
        except errors.UserError as error:
            if "fairseq" not in sys.modules:
                watch()  # for when what is missing has been installed
                raise ImportError(str(error), name="fairseq") from error
            print(f"lightseq_fairseq: {error}", file=sys.stderr)  # imported, but not repaired
        return None

    return exec_module


def watch() -> None:
    """Waits for the first import of fairseq."""
    unwatch()
    sys.meta_path.insert(0, Finder())


def is_watching() -> bool:
    """Whether fairseq would be prepared if it were imported now."""
    return "fairseq" not in sys.modules and any(isinstance(f, Finder) for f in sys.meta_path)


def unwatch() -> None:
    """Leaves the import of fairseq as Python has it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def location() -> str:
    """Where the line stands, or would stand, for the Python that runs this."""
    import sysconfig

    return os.path.join(sysconfig.get_path("purelib"), FILE)


def main(words: list[str]) -> str | None:
    """Writes the file, or removes it; returns the sentence that says why that is not possible."""
    path = location()
    if words not in ([], ["--remove"]):
        return "usage: python -m lightseq_fairseq.startup [--remove]"
    try:
        if not words:
            with open(path, "w") as file:
                file.write(_LINE + "\n")
        elif os.path.exists(path):
            os.remove(path)
    except OSError as error:
        return f"{path} cannot be changed ({error.strerror}): run this as the owner of this Python."
    print(f"{path} is {'gone' if words else 'written: import fairseq works by itself'}")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
