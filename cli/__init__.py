"""Launchers: fairseq's commands with this package's plugins and patches.

A launcher answers ``--help`` without slow imports. fairseq and torch are imported only when there
is work to do; then `register` is called. A rank started by ``torch.multiprocessing.spawn`` has no
launcher: it imports the console script's module again and then unpickles fairseq's configuration.
Therefore `register` runs there as soon as this package is imported.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys

__all__ = ["PROGRAM", "register"]

PROGRAM = "LIGHTSEQ_PROGRAM"  # environment variable with the program's name while a launcher runs


_READERS = ("generate", "validate", "interactive", "eval-lm")  # of checkpoints
# Program -> phases of `fairseq_compat.patching`. With --native the program is fairseq-<command>.
_PHASES = {
    "lightseq-train": ("our trainer", "training"),
    "fairseq-train": ("fairseq's trainer", "training"),
    **{f"lightseq-{name}": ("our models",) for name in _READERS},
    **{f"fairseq-{name}": ("fairseq's models",) for name in _READERS},
}


def register() -> None:
    """Registers the plugins and applies the patches of the program that runs.

    The program is the name in ``sys.argv[0]``. Spawned ranks take it from the environment, because
    there ``sys.argv[0]`` is the script's path while its module is imported again.

    ``lightseq-train`` trains with our trainer. ``lightseq-generate``, ``-validate``,
    ``-interactive`` and ``-eval-lm`` build our model from checkpoints. The ``fairseq-*`` names
    (--native) keep fairseq's own trainer, and build fairseq's own model for every checkpoint.
    Training by either name runs in `training.process`, which handles signals and the run's folder.

    Raises:
        UserError: fairseq is missing or cannot be used.
    """
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from lightseq_fairseq import plugins  # noqa: F401  (its import registers)
    from lightseq_fairseq.cli.start import logs
    from lightseq_fairseq.fairseq_compat import deprecations, patching

    # Else Python takes a second at its end to search all that is imported for garbage.
    atexit.register(gc.freeze)
    logs.set_up()
    deprecations.silence()
    program = os.path.basename(os.environ.get(PROGRAM, sys.argv[0]))
    phases = ["model", "launcher", *_PHASES.get(program, ())]
    if not program.endswith("interactive"):
        phases.append("whole split")
    for phase in phases:
        patching.apply(phase)


# Test the process name: it is already set while the script's module is imported again, whereas
# multiprocessing.parent_process() is still None.
if multiprocessing.current_process().name != "MainProcess":
    register()
