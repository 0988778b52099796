"""Messages for known failures, by the rules in `failures`.

`explain` returns a sentence for a failure that the user can correct. For any other failure it
returns None, and the traceback is shown. A rule recognises a failure by the words of its message
or the file that raised it, never by a general type alone: a bug must not look like bad input.
"""

from __future__ import annotations

from lightseq_fairseq.base.errors import GPUHangs, UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.failures import checkpoints, data, machine, settings
from lightseq_fairseq.cli.checks.failures.cause import Cause


def explain(error: BaseException, request: Request) -> str | None:
    """The message for ``error``, or None if it is not a known failure."""
    failure = Cause.of(error)
    if failure.kind in (UserError.__name__, GPUHangs.__name__):
        return failure.text
    for rule in (*data.RULES, *checkpoints.RULES, *settings.RULES, *machine.RULES):
        sentence = rule(failure, request)
        if sentence is not None:
            return sentence
    return None


# Flags for the start of a run; do not repeat them when the run is resumed.
BEGINNING = (
    *("--restore-file", "--reset-optimizer", "--reset-lr-scheduler"),
    *("--reset-dataloader", "--reset-meters"),
)
