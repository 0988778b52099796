"""Atomic writes of a command's output file, also if a signal ends the command."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from lightseq_fairseq.base import files, signals
from lightseq_fairseq.base.errors import UserError

# The option of the commands that translate.
output_text = click.option(
    "--output-text", metavar="FILE", type=click.Path(path_type=Path),
    help="Also write the best translation of each sentence to this file: plain text in the order "
    "of the input, with an empty line for a sentence that was skipped.",
)  # fmt: skip


@contextmanager
def text_output(path: Path) -> Iterator[TextIO]:
    """`files.atomic_writer` for UTF-8 text. A pipe or a device is written directly.

    Raises:
        UserError: as for `files.atomic_writer`.
        SystemExit: on SIGTERM or SIGHUP, with the shell's exit status, 128 + signal number.
    """
    with (
        signals.handled(_leave, signal.SIGTERM, signal.SIGHUP),
        files.atomic_writer(path, streams=True) as file,
    ):
        text = io.TextIOWrapper(file, encoding="utf-8", line_buffering=file.isatty())
        yield text
        text.flush()


def refuse_inputs(outputs: Mapping[str, Path | None], *inputs: str | Path | None) -> None:
    """Raises UserError if an output, by its flag, is one of the files that the command reads."""
    for flag, path in outputs.items():
        for each in map(Path, [each for each in inputs if each is not None]):
            if path is not None and path.exists() and each.exists() and path.samefile(each):
                raise UserError(f"{flag} {path} is a file that this command reads: use another.")


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
