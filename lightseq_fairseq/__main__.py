"""``python -m lightseq_fairseq``: all commands, even if their scripts are not on the PATH."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import click

from lightseq_fairseq.cli.lightseq import COMMANDS, ByJob, module_of
from lightseq_fairseq.cli.start.commands import version


class _Commands(ByJob):
    """Imports a command's module when the command is run or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(module_of(cmd_name)).main
        return command


@click.group(
    "python -m lightseq_fairseq",
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"max_content_width": 100},
)
@version
@click.pass_context
def main(context: click.Context) -> None:
    """Train and use fairseq's Transformers, accelerated.

    A COMMAND is the same as lightseq-COMMAND: python -m lightseq_fairseq train is lightseq-train.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    else:
        # Spawned ranks import the main module again, but not if its name ends in __main__. They
        # need the import: it registers this package's models with fairseq.
        spec = importlib.util.find_spec(module_of(context.invoked_subcommand))
        sys.modules["__main__"].__spec__ = spec


if __name__ == "__main__":
    main()
