"""``lightseq``: lists all commands by job, and makes Tab complete their words in a shell."""

from __future__ import annotations

import importlib
from typing import Any

import click
from click.shell_completion import get_completion_class

from lightseq_fairseq.cli.start.commands import CommandError, OneSentenceGroup, version
from lightseq_fairseq.cli.words import synonyms

JOBS = {
    "Prepare data": ("preprocess",),
    "Train": ("train", "hydra-train", "validate"),
    "Translate, continue prompts, or classify": ("generate", "interactive", "serve", "score"),
    "Language models": ("eval-lm",),
    "Checkpoints": ("average", "export", "import"),
    "Check and measure": ("doctor", "profile", "bench"),
}
COMMANDS = tuple(name for names in JOBS.values() for name in names)


def module_of(command: str) -> str:
    """The module of ``lightseq-<command>``; Python reserves the name import."""
    module = command.replace("-", "_")
    return f"lightseq_fairseq.cli.{module}{'_' if command == 'import' else ''}"


class ByJob(OneSentenceGroup):
    """A group whose help lists all commands of the package by job.

    Attributes:
        prefix: of their names in the list.
    """

    prefix = ""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = [name] if name in COMMANDS else synonyms.nearest(name, COMMANDS)
            known = f"{ctx.command_path} --help lists the commands."
            advice = f"did you mean {self.prefix}{close[0]}?" if close else known
            raise CommandError(ctx.command_path, f"There is no command {name}: {advice}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = len(self.prefix) + max(map(len, COMMANDS))
        for job, names in JOBS.items():
            with formatter.section(job):
                rows = []
                for name in names:
                    command: click.Command = importlib.import_module(module_of(name)).main
                    says = command.get_short_help_str(limit=200)  # write_dl wraps it
                    rows.append((f"{self.prefix}{name}".ljust(width), says))
                formatter.write_dl(rows)


class Overview(ByJob):
    """The group ``lightseq``, of which the commands of the list are not subcommands."""

    prefix = "lightseq-"


@click.group(
    "lightseq",
    cls=Overview,
    invoke_without_command=True,
    context_settings={"max_content_width": 100},
)
@version
@click.pass_context
def main(context: click.Context) -> None:
    """Train and use fairseq's Transformers, accelerated: the commands by job.

    Each has --help. To let Tab complete names and flags, see lightseq completion --help.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes Tab complete all commands in a shell.

    \b
        lightseq completion bash >~/.lightseq-completion
        echo '. ~/.lightseq-completion' >>~/.bashrc
    """
    complete = get_completion_class(shell)
    assert complete is not None  # click has all three
    for name in ("lightseq", *(f"lightseq-{command}" for command in COMMANDS)):
        variable = f"_{name}_complete".replace("-", "_").upper()
        click.echo(complete(main, {}, name, variable).source())


if __name__ == "__main__":
    main()
