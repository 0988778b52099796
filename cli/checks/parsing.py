"""Runs the checks of a command line while fairseq parses it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightseq_fairseq.cli.checks import SETTINGS, WORDS, Request, own_flags, run
from lightseq_fairseq.cli.words import command_lines
from lightseq_fairseq.fairseq_compat import patching


@contextmanager
def checked(request: Request, passed: Callable[[Request], None] | None = None) -> Iterator[None]:
    """Within the block the checks run before and after fairseq parses the command line.

    ``request.args`` is set to the parsed namespace. In training the parser also accepts
    --pack-tokens, which fairseq adds to the model's configuration, and our other flags, which are
    added to the section "common". The trainer finds them there, also in spawned ranks.

    Args:
        passed: called with ``request`` if the checks have passed; may change it.

    Raises:
        UserError: an unknown name, an unsupported setting, missing data, or a precision that the
            machine does not support.
    """
    command = request.command

    def parse_and_check(
        parse: Callable[..., Any],
        parser: argparse.ArgumentParser, input_args: Any = None, *more: Any, **keywords: Any,
    ) -> Any:  # fmt: skip
        request.parser = parser
        run(WORDS, request)
        words = sys.argv[1:] if input_args is None else list(input_args)
        if "--help" in words:
            words.remove("--help")
            command_lines.with_all_flags(command, parse, parser, words)
        if command == "train":
            own_flags.add_to(parser)
        parsed = parse(parser, input_args, *more, **keywords)
        # fairseq-validate parses several times; check only the first result.
        if isinstance(parsed, argparse.Namespace) and not vars(request.args):
            request.args = parsed
            run(SETTINGS, request)
            if passed is not None:
                passed(request)
        return parsed

    with ExitStack() as replaced:
        replaced.enter_context(
            patching.within("fairseq.options:parse_args_and_arch", parse_and_check)
        )
        if command == "train":
            target = "fairseq_cli.train:convert_namespace_to_omegaconf"
            replaced.enter_context(
                patching.within(target, own_flags.with_own, by="cli.checks.parsing")
            )
        yield
