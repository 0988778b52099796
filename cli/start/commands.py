"""Common code of our own commands and the launchers: ``--version``, one-sentence errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from lightseq_fairseq import __version__
from lightseq_fairseq.cli.start import command_lines

_Command = TypeVar("_Command")


class CommandError(click.ClickException):
    """Ends a command for a known reason; the message is one sentence."""

    def __init__(self, program: str, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.program = program
        self.exit_code = status  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(f"{self.program}: error: {self.format_message()}", file=file, err=file is None)


class _Own(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        assert self.name is not None
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = {flag for parameter in self.params for flag in parameter.opts}
            sentence = command_lines.unknown_flag(self.name, error.option_name, known)
            raise CommandError(self.name, sentence) from error
        except click.UsageError as error:
            raise CommandError(self.name, " ".join(error.format_message().split())) from error


def own(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator: makes the command ``name`` from a function and the click decorators below it."""
    settings = {"max_content_width": 100}
    return lambda body: click.command(name=name, cls=_Own, context_settings=settings)(version(body))


def version(command: _Command) -> _Command:
    """Decorator: adds ``--version`` to a command."""
    option = click.version_option(__version__, message="%(prog)s %(version)s")
    return option(command)  # type: ignore[type-var]
