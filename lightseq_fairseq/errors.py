"""The one exception for input that the user can correct."""

from __future__ import annotations


class UserError(ValueError):
    """A request that cannot be honoured as it stands.

    The message is one clear sentence (two at most): what is wrong and what to do about it. The
    launchers print it without a traceback and leave with a non-zero exit status.
    """
