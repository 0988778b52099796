"""Common code of the launchers: their click command, and the call of fairseq.

All words that are not a launcher's own options are passed to fairseq unchanged and in the same
order. fairseq is imported only when there is something to run.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import click
from click.shell_completion import CompletionItem

from lightseq_fairseq import cli
from lightseq_fairseq.base import output
from lightseq_fairseq.base.errors import GPUHangs, StoppedBySignal
from lightseq_fairseq.cli.checks import Request, messages, parsing
from lightseq_fairseq.cli.checks.failures.cause import Cause
from lightseq_fairseq.cli.start.commands import CommandError, OneSentence, version
from lightseq_fairseq.cli.start.logs import LEVEL, LEVELS
from lightseq_fairseq.cli.start.old_lightseq import conflict
from lightseq_fairseq.cli.start.ranks import Ranks, forked, sent_to_ranks
from lightseq_fairseq.cli.words import command_lines, completions
from lightseq_fairseq.cli.words.argv import is_given
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.fairseq_compat.workers import no_loading_left

logger = logging.getLogger(__name__)


class Interrupted(CommandError):
    """Ends a command after Ctrl-C, SIGTERM or SIGUSR1; the exit status is 128 + signal number."""

    def __init__(self, program: str, sentence: str, number: int = signal.SIGINT) -> None:
        super().__init__(program, sentence, 128 + number)

    def show(self, file: Any = None) -> None:
        with output.may_be_unread():
            click.echo(f"{self.program}: {self.format_message()}", file=file, err=file is None)


class Abandoned(CommandError):
    """Ends a command whose GPU hangs, or of which a process has died, by os._exit: a normal exit
    would wait for it."""

    def show(self, file: Any = None) -> None:
        super().show(file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code)


class PassThrough(OneSentence):
    """A command that keeps unknown options, their order and ``--`` for another parser."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Handle "--" and -h before click does: it drops "--" and reads the h in -sch as -h.
        end = args.index("--") if "--" in args else len(args)
        own = ["--help" if word == "-h" else word for word in args[:end]]
        if not args:
            own = ["--help"]
        rest = super().parse_args(ctx, own)
        ctx.params["words"] = [*ctx.params["words"], *args[end:]]
        return rest

    def flags(self, words: list[str]) -> set[str]:
        """The flags of the command line ``words``: our own, and fairseq's."""
        command = str(self.name).removeprefix("lightseq-")
        return super().flags(words) | {*completions.flags(command, words)}

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Shell completion of our own flags, and of fairseq's."""
        command = str(self.name).removeprefix("lightseq-")
        flags = completions.flags(command, ctx.params["words"])
        theirs = [CompletionItem(flag) for flag in flags if flag.startswith(incomplete)]
        return [*super().shell_complete(ctx, incomplete), *theirs]


def launcher(command: str) -> Callable[[Callable[..., None]], click.Command]:
    """Decorator: makes ``lightseq-<command>`` from a function of (words, **own options)."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command(
            f"lightseq-{command}", PassThrough,
            context_settings={"ignore_unknown_options": True, "max_content_width": 100},
        )  # fmt: skip
        @click.argument(
            "words", nargs=-1, type=click.UNPROCESSED, metavar="[DATA] ...", shell_complete=_values
        )
        @click.option(
            "--fairseq-help", is_flag=True,
            help=f"List all flags of fairseq-{command}, which this command takes too. The list "
            "includes the flags of the arch, the task, the optimizer and so on that you name.",
        )  # fmt: skip
        @click.option(
            "--log-level", type=click.Choice(LEVELS), envvar=LEVEL,
            help="Which lines of the log the terminal shows: info (default), those that a person "
            "reads; debug, also all details of fairseq, its configuration and the model's modules.",
        )  # fmt: skip
        @version
        @functools.wraps(function)
        def body(
            words: list[str], fairseq_help: bool, log_level: str | None, **options: Any
        ) -> None:
            with environment(LEVEL, log_level):
                function([*words, "--help"] if fairseq_help else words, **options)

        return body

    return decorate


def _values(
    ctx: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Shell completion of a word that is no flag: a value of the flag before it, or a file name."""
    if names := completions.values(ctx.params["words"]):
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [CompletionItem(incomplete, type="file")]


def run_fairseq(
    command: str,
    words: Sequence[str],
    native: bool | Callable[[], bool] = False,
    complete: Callable[[list[str]], list[str]] | None = None,
    announce: Callable[[Request], None] | None = None,
    around: Callable[[Callable[[argparse.Namespace], Any], argparse.Namespace], None] | None = None,
) -> None:
    """Runs the module of ``fairseq_cli`` for a command on ``words``.

    Args:
        command: the name after "lightseq-" and "fairseq-", such as eval-lm.
        native: use fairseq's own model and trainer (see `lightseq_fairseq.cli.register`). A
            function is called when importing fairseq is allowed.
        complete: returns the final words; called when importing torch is allowed.
        announce: called after the checks of the final words have passed; may change numbers in
            these words and in the parsed namespace.
        around: called instead of fairseq's ``main``, with ``main`` and its argument.

    Raises:
        CommandError: the input is wrong; the message says how.
        SystemExit: fairseq's parser rejected the words and has printed why.
    """
    # torch reads these variables when it is imported, which is below. By default waiting CPU
    # threads spin; with a second busy program on the machine, training was 30 times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Batches of many shapes leave gaps in segments of GPU memory that have a fixed size. With
    # segments that grow, training needed 15% less memory.
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") is None:  # the older name of the variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch.cuda.is_available() would use CUDA, and then this process could not be forked.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # If a rank cannot reach another one, torch would log each try with twenty lines of C++ trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not native and is_given(words, ("--retain-dropout",)):
        # fairseq enables its dropout modules for this flag; the fused layers drop only in training.
        click.echo(
            f"lightseq-{command}: note: this run uses fairseq's own layers, because "
            "--retain-dropout needs dropout after training, which the fused layers do not have.",
            err=True,
        )
        native = True
    request = Request(words, command=command)
    if (explanation := conflict()) is not None:
        click.echo(f"lightseq-{command}: warning: {explanation}", err=True)
    with ExitStack() as around_all:
        ranks = around_all.enter_context(sent_to_ranks()) if command == "train" else Ranks()
        around_all.enter_context(sentences(f"lightseq-{command}", request, ranks))
        parts = "fairseq" if (native() if callable(native) else native) else "lightseq"
        program = f"{parts}-{command}"
        around_all.enter_context(typed(program, words))
        around_all.enter_context(environment(cli.PROGRAM, program))  # for spawned ranks
        cli.register()
        if command == "train":
            around_all.enter_context(forked())
        if complete is not None:
            sys.argv[1:] = request.argv = complete(sys.argv[1:])
        module = importlib.import_module(f"fairseq_cli.{command.replace('-', '_')}")
        around_all.enter_context(command_lines.refused_in_a_sentence(command))
        around_all.enter_context(parsing.checked(request, announce))
        if around is not None:
            around_all.enter_context(patching.within(f"fairseq_cli.{command}:main", around))
        # Training has its own block, in each rank.
        loading = nullcontext() if command == "train" else no_loading_left()
        with loading, no_group_left():
            module.cli_main()


@contextmanager
def typed(program: str, words: Sequence[str]) -> Iterator[None]:
    """Sets ``sys.argv``, from which fairseq reads the command, within the block."""
    saved = sys.argv
    sys.argv = [program, *words]
    try:
        yield
    finally:
        sys.argv = saved


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Sets an environment variable within the block; spawned processes see it. None: no change."""
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            del os.environ[name]


@contextmanager
def no_group_left() -> Iterator[None]:
    """Destroys the process group that a rank has created, unless an error ends the block.

    fairseq leaves the group to Python's exit, where a thread of gloo sometimes aborts the process.
    """
    from torch import distributed

    was_there = distributed.is_initialized()
    yield
    if distributed.is_initialized() and not was_there:
        distributed.destroy_process_group()


@contextmanager
def sentences(program: str, request: Request, ranks: Ranks) -> Iterator[None]:
    """Turns errors that the user can correct into `CommandError`; others keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(program, _interrupted(request, "interrupted")) from None
    except Exception as error:
        failure = Cause.of(error)
        ended_by = failure.text if failure.kind == StoppedBySignal.__name__ else ranks.told
        if ended_by is not None:
            number = signal.Signals[ended_by]
            how = "interrupted" if number == signal.SIGINT else f"stopped by {ended_by}"
            raise Interrupted(program, _interrupted(request, how), number) from None
        sentence = messages.explain(error, request)
        if sentence is not None:
            logger.debug("explained to the user as: %s", sentence, exc_info=error)
            stop = Abandoned if isinstance(error, GPUHangs) else CommandError
            raise stop(program, sentence) from error
        if isinstance(error, EOFError):  # click would print "Aborted!" and nothing else
            traceback.print_exc()
            raise SystemExit(1) from error
        raise


def _interrupted(request: Request, how: str) -> str:
    if not hasattr(request.args, "max_update"):
        return f"{how}."
    suffix = request.args.checkpoint_suffix
    last = os.path.join(request.args.save_dir, f"checkpoint_last{suffix}.pt")
    if not os.path.isfile(last):
        return f"{how} before the first checkpoint; the same command starts anew."
    begins = [flag for flag in messages.BEGINNING if is_given(request.argv, (flag,))]
    without = f" without {' '.join(begins)}" if begins else ""
    return f"{how}; the same command{without} resumes from {last}."
