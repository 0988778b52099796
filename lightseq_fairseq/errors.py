"""Exceptions that the launchers explain: input that the user can correct, a GPU that hangs."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory did not suffice: torch's allocator says so in these words, and our
    kernels do (``csrc/common/check.h``), since fairseq looks for them.
    """
    return "out of memory" in str(error)


class UserError(ValueError):
    """A request that cannot be honoured as it stands.

    The message is one clear sentence (two at most): what is wrong and what to do about it. The
    launchers print it without a traceback and leave with a non-zero exit status.
    """


class GPUHangs(UserError):
    """The GPU does not finish what it was given in so many seconds.

    Nothing may wait for it any more, not even the destructors of what lies on it: the launchers
    leave without Python's clean-up.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The GPU has not finished a step in {seconds:.0f} seconds, which take milliseconds as "
            f"a rule: see nvidia-smi and the kernel's log (dmesg, lines with Xid) for what became "
            f"of it. A training goes on from its last checkpoint by the same command."
        )


class StoppedBySignal(Exception):
    """Training has ended after an update since the system asked for it; a checkpoint is saved.

    The message is the signal's name, ``SIGTERM`` or ``SIGUSR1``, and nothing else.
    """
