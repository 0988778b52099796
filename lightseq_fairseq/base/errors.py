"""Exceptions that the launchers report without a traceback, such as errors in the user's input."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU has run out of memory, by the text of the message.

    torch's allocator and our kernels (``csrc/common/check.h``) both use the words "out of memory",
    and fairseq searches for them.
    """
    return "out of memory" in str(error)


class UserError(ValueError):
    """A request that cannot be fulfilled, but that the user can correct.

    The message is one clear sentence (two at most): what is wrong and what to do about it. The
    launchers print it without a traceback and exit with a non-zero status.
    """


class GPUHangs(UserError):
    """The GPU has not finished its work within a time limit.

    After this, nothing may wait for the GPU, not even destructors of its tensors. So the launchers
    exit without Python's clean-up.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The GPU has not finished a step in {seconds:.0f} seconds, although a step usually "
            f"takes milliseconds: see nvidia-smi and the kernel log (dmesg, lines with Xid) for "
            f"the cause. To resume training from the last checkpoint, run the same command again."
        )


class Full(UserError):
    """So many requests wait that no other is taken."""


class Expired(UserError):
    """A request did not end before its deadline."""


class StoppedBySignal(Exception):
    """A signal has ended training after an update; a checkpoint is saved.

    The message is only the signal's name: ``SIGTERM``, ``SIGINT`` (Ctrl-C) or ``SIGUSR1``.
    """
