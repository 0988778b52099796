"""Launchers: fairseq's five commands with this package's parts registered.

A launcher answers ``--help`` by itself; everything that takes seconds to import waits until there
is work to do. `register` is that moment. In a rank that ``torch.multiprocessing.spawn`` started it
runs as soon as this package is imported: such a rank imports the console script's module again and
unpickles fairseq's configuration right after, with no launcher in between.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

__all__ = ["PROGRAM", "register"]

PROGRAM = "LIGHTSEQ_PROGRAM"  # an environment variable, while a launcher runs


# Program -> phases of `fairseq_compat.patching`; of fairseq's the names that --native takes.
_PHASES = {
    "lightseq-train": ("our trainer", "training"),
    "fairseq-train": ("fairseq's trainer", "training"),
    **{f"lightseq-{name}": ("our models",) for name in ("generate", "validate", "interactive")},
    **{
        f"fairseq-{name}": ("fairseq's models",) for name in ("generate", "validate", "interactive")
    },
}


def register() -> None:
    """Registers the plugins and puts this package's parts in place for the program that runs.

    The program is the name in ``sys.argv[0]``, which spawned ranks get from the environment, since
    that is the script's path while its module is imported again: ``lightseq-train``
    trains with our trainer, ``lightseq-generate``, ``-validate`` and ``-interactive`` build our
    model from checkpoints; under a ``fairseq-*`` name fairseq's own parts stay where they are, and
    its own model is built for every checkpoint. Either training ends as `training.process` says.

    Raises:
        UserError: fairseq is missing or cannot be used.
    """
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from lightseq_fairseq import plugins  # noqa: F401  (its import registers)
    from lightseq_fairseq.cli.start import logs
    from lightseq_fairseq.fairseq_compat import patching

    logs.leave_out_configurations()
    program = os.path.basename(os.environ.get(PROGRAM, sys.argv[0]))
    phases = ["model", "launcher", *_PHASES.get(program, ())]
    if not program.endswith("interactive"):
        phases.append("whole split")
    for phase in phases:
        patching.apply(phase)


# While the script's module is imported again, multiprocessing.parent_process() is still None; the
# name is set before.
if multiprocessing.current_process().name != "MainProcess":
    register()
