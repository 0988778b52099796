"""Common code of our own commands and the launchers: ``--version``, one-sentence errors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from lightseq_fairseq import __version__
from lightseq_fairseq.base import output
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.words import command_lines

_Command = TypeVar("_Command")
_SETTINGS = {"max_content_width": 100}


class CommandError(click.ClickException):
    """Ends a command for a known reason; the message is one sentence."""

    def __init__(self, program: str, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.program = program
        self.exit_code = status  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(f"{self.program}: error: {self.format_message()}", file=file, err=file is None)


class Written(click.Command):
    """A command that reports in one sentence that standard output cannot be written."""

    def main(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            with output.must_be_written():
                return super().main(*arguments, **keywords)
        except output.Unwritable as error:
            sentence = f"Standard output cannot be written ({error.reason}): write it elsewhere."
            CommandError(str(self.name), sentence).show()
            raise


class OneSentence(Written):
    """A command that reports wrong usage in one sentence, where click would print several lines,
    and a UserError without a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # that is shell completion
            names = _names(ctx)
            sentence = command_lines.mistyped(
                " ".join(names), args, functools.partial(self.flags, args)
            )
            if sentence is not None:
                raise CommandError(names[0], sentence)
        with _usage_errors(ctx):
            return super().parse_args(ctx, args)

    def flags(self, words: list[str]) -> set[str]:
        """The flags of the command line ``words``."""
        return _flags(self)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise CommandError(_names(ctx)[0], str(error)) from error


class OneSentenceGroup(Written, click.Group):
    """A group of commands that reports wrong usage in one sentence."""

    command_class = OneSentence

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:  # click prints the help
            return super().parse_args(ctx, args)
        with _usage_errors(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        with _usage_errors(ctx):
            return super().resolve_command(ctx, args)


def _names(ctx: click.Context) -> list[str]:
    """The name of the program, and that of its subcommand if there is one."""
    # python -m lightseq_fairseq has the commands as its subcommands; a command's own name begins
    # with lightseq-, and only lightseq-bench has subcommands of its own.
    names, outer = [str(ctx.command.name)], ctx.parent
    while outer is not None and not names[0].startswith("lightseq-"):
        names.insert(0, str(outer.command.name))
        outer = outer.parent
    return names


def _flags(command: click.Command) -> set[str]:
    """The command's own flags."""
    options = (word for parameter in command.params for word in parameter.opts)
    return {flag for flag in options if flag.startswith("-")}  # others are arguments


@contextmanager
def _usage_errors(ctx: click.Context) -> Iterator[None]:
    """Turns click's usage errors within the block into a `CommandError`."""
    names = _names(ctx)
    program = " ".join(names)
    try:
        yield
    except click.NoSuchOption as error:
        sentence = command_lines.unknown_flag(
            program, error.option_name, _flags(ctx.command), f"{program} --help lists all flags."
        )
        raise CommandError(names[0], sentence) from error
    except click.UsageError as error:
        says = command_lines.ended(error.format_message())
        raise CommandError(names[0], f"{says} See {program} --help.") from error


def own(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator: makes the command ``name`` from a function and the click decorators below it."""
    return lambda body: click.command(name, OneSentence, context_settings=_SETTINGS)(version(body))


def group(name: str) -> Callable[[Callable[..., None]], click.Group]:
    """Decorator: makes a command ``name`` with subcommands, which its method ``command`` adds."""
    return lambda body: click.group(name, OneSentenceGroup, context_settings=_SETTINGS)(
        version(body)
    )


def version(command: _Command) -> _Command:
    """Decorator: adds ``--version`` to a command."""

    def show(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
        if asked and not context.resilient_parsing:
            click.echo(f"{context.command_path} {__version__}")
            context.exit()

    option = click.option(
        "--version", is_flag=True, expose_value=False, is_eager=True, callback=show,
        help="Show the version and exit.",
    )  # fmt: skip
    return option(command)  # type: ignore[type-var]
