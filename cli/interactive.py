"""``lightseq-interactive``: fairseq-interactive that builds this package's model."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from lightseq_fairseq.cli.start.defaults import is_given, with_options
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq
from lightseq_fairseq.cli.translate.cached_config import looked_up_once
from lightseq_fairseq.cli.translate.cpu_samples import left_on_cpu
from lightseq_fairseq.cli.translate.output import Lines, UnknownWords


@launcher("interactive")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Translate lines from the terminal, a pipe or a file (--input).

    Takes every option of fairseq-interactive, and checkpoints that lightseq-train or fairseq-train
    wrote:

    \b
        lightseq-interactive data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --beam 4 --remove-bpe < test.bpe.de

    A line is translated as soon as it is read, and printed at once. With --buffer-size N lines
    wait for each other and are translated together, in batches of --batch-size or --max-tokens.
    """
    run_fairseq("interactive", words, native=native, complete=_one_process, around=_translate)


class _AtOnce(Lines):
    """Standard output that is flushed after each line; to a pipe Python would buffer 8 KB."""

    def __init__(self) -> None:
        self.terminal = sys.stdout
        self.unknown = UnknownWords()

    def line(self, line: str) -> None:
        print(line, file=self.terminal, flush=True)
        if line.startswith("S-"):
            self.unknown.count(line)


def _translate(fairseq_main: Callable[[Any], None], cfg: Any) -> None:
    out = _AtOnce()
    try:
        with contextlib.redirect_stdout(out), left_on_cpu():
            fairseq_main(looked_up_once(cfg))
    except Exception as error:
        # fairseq's number counts within the buffer; all lines before the buffer are translated.
        found = re.match(r"Size of sample #(\d+)", str(error))
        if found is None:
            raise
        number = out.unknown.sources + int(found[1])
        text = f"Size of sample #{number}{str(error)[found.end() :]}"
        raise type(error)(text).with_traceback(error.__traceback__) from error
    finally:
        if (note := out.unknown.sentence()) is not None:
            click.echo(f"lightseq-interactive: note: {note}", err=True)


def _one_process(argv: list[str]) -> list[str]:
    """``argv`` for one process; fairseq would start one per GPU, all reading the same input."""
    ranks = ("--distributed-world-size", "--distributed-port", "--distributed-init-method")
    if is_given(argv, ranks):
        return argv
    return with_options(argv, ("--distributed-world-size", "1"))


if __name__ == "__main__":
    main()
