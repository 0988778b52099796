"""``--version``, the same for every command."""

from __future__ import annotations

from typing import TypeVar

import click

from lightseq_fairseq import __version__

_Command = TypeVar("_Command")


def version(command: _Command) -> _Command:
    """Decorator: the command takes ``--version``."""
    option = click.version_option(__version__, message="%(prog)s %(version)s")
    return option(command)  # type: ignore[type-var]
