"""Makes ``import fairseq`` work everywhere in this Python: fairseq-train, a converter, a notebook.

``python -m lightseq_fairseq.startup`` writes a .pth file with one line into this Python's
site-packages; scripts/setup.sh does so too. With this line, Python installs an import finder at
start-up, before the other finders. The finder acts on one name only: it lets
`fairseq_compat.prepare` do the first import of fairseq. Without this, fairseq 0.12.2 fails with
"mutable default <class 'CommonConfig'>" on Python 3.11 and later. ``--remove`` deletes the file,
and LIGHTSEQ_FAIRSEQ_HOOK=0 disables it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # every Python process imports this module: import only what is loaded anyway
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from typing import Any

FILE = "lightseq_fairseq_startup.pth"
SWITCH = "LIGHTSEQ_FAIRSEQ_HOOK"

# Python executes a line of a .pth file that begins with "import". This one must not fail, whatever
# else is installed.
_LINE = (
    f"import os, sys; os.environ.get({SWITCH!r}) != '0' "
    "and 'lightseq_fairseq.startup' not in sys.orig_argv and "
    r'exec("try:\n import lightseq_fairseq.startup as s\n s.watch()\nexcept Exception:\n pass")'
)


class Finder:
    """Finds fairseq with the other finders, and prepares it when it is loaded."""

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
        except Exception:  # if our installation is broken, import fairseq without us
            return load(module)
        del sys.modules["fairseq"]  # prepare() imports it again; the import returns that module
        try:
            fairseq_compat.prepare()
        except errors.UserError as error:
            if "fairseq" not in sys.modules:
                watch()  # try again at the next import: what is missing may be installed by then
                raise ImportError(str(error), name="fairseq") from error
            print(f"lightseq_fairseq: {error}", file=sys.stderr)  # imported, but not patched
        return None

    return exec_module


def watch() -> None:
    """Install the finder, which acts on the first import of fairseq."""
    unwatch()
    sys.meta_path.insert(0, Finder())


def is_watching() -> bool:
    """Whether an import of fairseq would now be prepared."""
    return "fairseq" not in sys.modules and any(isinstance(f, Finder) for f in sys.meta_path)


def unwatch() -> None:
    """Remove the finder: Python imports fairseq without preparing it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]


def location() -> str:
    """Path of the .pth file for the Python that runs this; the file need not exist."""
    import sysconfig

    return os.path.join(sysconfig.get_path("purelib"), FILE)


def main(words: list[str]) -> str | None:
    """Write or remove the file; returns an error message if this fails, else None."""
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
        return f"{path} cannot be changed ({error.strerror}): run this as the owner of that file."
    print(f"{path} is {'removed' if words else 'written: from now on, import fairseq works'}")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
