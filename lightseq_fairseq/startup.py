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

from lightseq_fairseq.base import import_hook

TYPE_CHECKING = False
if TYPE_CHECKING:  # every Python process imports this module: import only what is loaded anyway
    from collections.abc import Callable

FILE = "lightseq_fairseq_startup.pth"
SWITCH = "LIGHTSEQ_FAIRSEQ_HOOK"

# Python executes a line of a .pth file that begins with "import". This one must not fail, whatever
# else is installed.
_LINE = (
    f"import os, sys; os.environ.get({SWITCH!r}) != '0' "
    "and 'lightseq_fairseq.startup' not in sys.orig_argv and "
    r'exec("try:\n import lightseq_fairseq.startup as s\n s.watch()\nexcept Exception:\n pass")'
)


def watch() -> None:
    """Prepare fairseq when it is first imported in this process."""
    import_hook.watch(_find)


def _find() -> Callable[[], None]:
    from lightseq_fairseq import fairseq_compat

    return fairseq_compat.prepare


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
