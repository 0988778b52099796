"""``lightseq-preprocess``: fairseq-preprocess on a current Python and torch."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

import click

from lightseq_fairseq.base import files, utf8
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq


@launcher("preprocess")
@click.option(
    "--hf-tokenizer", metavar="PATH", type=click.Path(path_type=Path),
    help="Read raw text and split it by this tokenizer: a folder of Hugging Face transformers or "
    "of lightseq-import, or a tokenizer.json. Dictionaries have its words, unless --srcdict or "
    "--tgtdict is set.",
)  # fmt: skip
@click.option(
    "--sentencepiece", metavar="FILE[,FILE]",
    help="Like --hf-tokenizer, with a model of sentencepiece; two files, separated by a comma, are "
    "the source's and the target's.",
)  # fmt: skip
def main(words: list[str], hf_tokenizer: Path | None, sentencepiece: str | None) -> None:
    """Build dictionaries and binarise sentence pairs, or running text with --only-source.

    Takes every option of fairseq-preprocess:

    \b
        lightseq-preprocess -s en -t de --trainpref corpus/train.bpe --validpref corpus/valid.bpe \\
            --testpref corpus/test.bpe --destdir data-bin/wmt14_en_de --joined-dictionary

    With a tokenizer, the files are raw text, and the data folder keeps the tokenizer: later
    commands read and write raw text without a flag.

    A line ends at a line feed only: a carriage return within a line is a space. Files of one split
    with different numbers of lines are refused before anything is written.
    """
    if hf_tokenizer and sentencepiece:
        raise UserError("--hf-tokenizer and --sentencepiece cannot be used together: remove one.")
    paths = [hf_tokenizer] if hf_tokenizer else list(map(Path, (sentencepiece or "").split(",")))
    given = paths if hf_tokenizer or sentencepiece else []
    run_fairseq("preprocess", words, around=functools.partial(_preprocess, given))


def _preprocess(given: list[Path], fairseq_main: Callable[[Any], Any], args: Namespace) -> None:
    if not args.only_source and args.source_lang == args.target_lang is not None:
        raise UserError(
            f"--source-lang and --target-lang are both {args.source_lang}, so source and target "
            "would be the same file: give the files of the two sides different suffixes."
        )
    notes = []
    for paths in _splits(args):
        counts = {}
        for path in paths:
            counts[path], returns = _lines(path)
            if not counts[path]:
                raise UserError(f"{path} is empty: name a file with at least one line of text.")
            if returns:
                notes.append(_note(path, returns))
        if len(set(counts.values())) > 1 and not args.dict_only:
            told = ", ".join(f"{path} has {count} lines" for path, count in counts.items())
            raise UserError(
                f"{told}: line n of each file must belong to the same sentence pair. Add or remove "
                "lines until the numbers are equal."
            )
    if notes and args.alignfile:  # fairseq reads it with the two sides, by its own rule
        raise UserError(f"{notes[0]} --alignfile cannot be used with it: replace it by a space.")
    for note in notes:
        click.echo(f"lightseq-preprocess: note: {note}", err=True)
    if args.alignfile:
        _lines(args.alignfile)
    _join(args)
    with contextlib.ExitStack() as within:
        within.enter_context(files.no_empty_folder(args.destdir))
        try:
            os.makedirs(args.destdir, exist_ok=True)
            tempfile.TemporaryFile(dir=args.destdir).close()
        except OSError as error:
            why = f"--destdir {args.destdir} cannot be made or written to ({error.strerror})"
            raise UserError(f"{why}: choose another folder.") from error
        within.enter_context(_complete(args))
        if given:
            from lightseq_fairseq.checkpoints import raw_text  # imports fairseq
            from lightseq_fairseq.fairseq_compat import patching

            binarise = within.enter_context(raw_text.data_folder(given, args))
            name = "fairseq_cli.preprocess:_make_binary_dataset"
            within.enter_context(patching.within(name, binarise))
        fairseq_main(args)


@contextlib.contextmanager
def _complete(args: Namespace) -> Iterator[None]:
    """Removes the files that the block has written if it fails or is interrupted."""
    folder, before = Path(args.destdir), _written(args)
    is_new = not any(folder.iterdir())
    # On Ctrl-C, processes of --workers end without a traceback. Forgotten with ``args``.
    util.register_after_fork(args, lambda _: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        yield
    except BaseException:
        for path in _written(args) - before:
            path.unlink(missing_ok=True)
        log = folder / "preprocess.log"  # commands for other languages write to it, too
        if is_new and [*folder.iterdir()] == [log]:
            log.unlink()
        raise


def _written(args: Namespace) -> set[Path]:
    """The files in --destdir that this command writes, not those for other languages."""
    source, target = args.source_lang, args.target_lang
    dictionaries = {f"dict.{each}.txt" if each else "dict.txt" for each in (source, target)}
    split = re.compile(r"(train|valid|test)\d*(\.pt\d+)?\.(bin|idx)")  # of running text
    return {
        path
        for path in Path(args.destdir).iterdir()
        if path.name in dictionaries
        or f".{source}-{target}." in f"{path.name}."
        or (source is None and split.fullmatch(path.name))
    }


def _join(args: Namespace) -> None:
    """Sets both dictionaries if --joined-dictionary has one, and the folder has it already for the
    other language, from another pair: fairseq refuses to write that file again."""
    given, other = args.srcdict or args.tgtdict, None
    if args.joined_dictionary and given and not (args.srcdict and args.tgtdict):
        other = Path(
            args.destdir, f"dict.{args.target_lang if args.srcdict else args.source_lang}.txt"
        )
    if other is not None and other.is_file():
        from fairseq import tasks

        load = tasks.get_task(args.task).load_dictionary
        if load(given) == load(str(other)):
            args.srcdict = args.tgtdict = given
            args.joined_dictionary = False


def _splits(args: Namespace) -> Iterator[list[str]]:
    """The text files of each split: of both languages, and of their alignments.

    Raises:
        UserError: one of them does not exist. fairseq would already have made --destdir.
    """
    languages = [args.source_lang] if args.only_source else [args.source_lang, args.target_lang]
    several = [] if args.dict_only else f"{args.validpref or ''},{args.testpref or ''}".split(",")
    for prefix in filter(None, [args.trainpref, *several]):
        paths = [prefix if end is None else f"{prefix}.{end}" for end in languages]
        for path in paths:
            if not os.path.exists(path):
                named = args.only_source or None not in languages
                advice = (
                    "check the path"
                    if named
                    else f"add --source-lang and --target-lang, for the files {prefix}.<language>, "
                    "or --only-source"
                )
                raise UserError(f"{path} does not exist: {advice}.")
        aligned = [f"{prefix}.{args.align_suffix}"] if args.align_suffix else []
        yield [path for path in (*paths, *aligned) if os.path.isfile(path)]


def _lines(path: str) -> tuple[int, list[int]]:
    """(number of lines, numbers of the lines with a carriage return inside) of a text file.

    Raises:
        UserError: a line is not UTF-8.
    """
    count, returns = 0, []
    with open(path, "rb") as file:
        for count, line in enumerate(utf8.lines(file, path), 1):
            if "\r" in line.rstrip("\r\n"):
                returns.append(count)
    return count, returns


def _note(path: str, returns: list[int]) -> str:
    more = f", as {len(returns) - 1} other lines do" if len(returns) > 1 else ""
    return (
        f"Line {returns[0]} of {path} contains a carriage return (\\r){more}. It is read as a "
        "space, because lines end at a line feed (\\n) only."
    )


if __name__ == "__main__":
    main()
