"""Checks of text to noise, in one language or in several, and of its noise."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.pairs import folders_of
from lightseq_fairseq.cli.checks.text import dictionary, files
from lightseq_fairseq.cli.words.argv import flag_of

_MODES = ("none", "complete", "complete_doc", "eos")
_SHARES = ("mask", "mask_random", "rotate", "permute_sentences")
_LONGEST_MEAN = 16  # with a larger one, all spans of fairseq have the length 0
_LEAST = 3  # tokens of a block: <s>, a word and </s>


def text(request: Request) -> None:
    """Raises UserError if the data are no running text, or the noise cannot be made as asked."""
    _noise(request)
    _files(request)


def texts(request: Request) -> None:
    """As `text`, of data with a folder for each language."""
    args = request.args
    _noise(request)
    if not 0 <= args.multilang_sampling_alpha < float("inf"):
        raise UserError(
            f"--multilang-sampling-alpha is {args.multilang_sampling_alpha}: set it from 0, with "
            "which all languages have equal shares, to 1, with which the data decide."
        )
    _files(request, _languages(args))


def _languages(args: argparse.Namespace) -> list[str]:
    """The languages of the run, in the order of their tokens."""
    folder = folders_of(args)[0]
    there = sorted(x for x in os.listdir(folder) if os.path.isdir(os.path.join(folder, x)))
    languages = there if args.langs is None else args.langs.split(",")
    missing = [language for language in languages if language not in there]
    if missing or not languages:
        what = f"no folder {missing[0]}" if missing else "no folder of a language"
        raise UserError(
            f"{folder} contains {what}: binarise the text of each language with "
            "lightseq-preprocess --only-source into a folder of its own there, all with the "
            "dictionary dict.txt of the whole."
        )
    return languages


def _files(request: Request, languages: Sequence[str] = ()) -> None:
    """Checks the files; says which words the task adds to the dictionary."""
    args, words = request.args, dictionary(request.args)
    tokens = [f"[{x}]" for x in languages] if getattr(args, "add_lang_token", False) else []
    added = [word for word in (*tokens, "<mask>") if word not in words]
    for word in added:
        words.add_symbol(word)
    if added and request.command == "train" and os.environ.get("RANK", "0") == "0":
        click.echo(
            f"lightseq-train: note: dict.txt lacks {' '.join(added)}, so --task {args.task} adds "
            f"{'it' if len(added) == 1 else 'them'} at the end: the model has {len(words)} words",
            err=True,
        )
    files(request, words, languages or [""])


def _noise(request: Request) -> None:
    """Raises UserError if the blocks or their noise cannot be made as asked."""
    args = request.args
    if args.sample_break_mode not in _MODES:
        raise UserError(
            f"--sample-break-mode {args.sample_break_mode} is unknown: use one of "
            f"{', '.join(_MODES)}."
        )
    if args.tokens_per_sample < _LEAST:
        raise UserError(
            f"--tokens-per-sample must be at least {_LEAST}: a block has <s>, words and </s>."
        )
    for name in _SHARES:
        if not 0 <= getattr(args, name) <= 1:
            flag = flag_of(name)
            raise UserError(f"{flag} is {getattr(args, name)}: it is a share, from 0 to 1.")
    if args.insert < 0:
        raise UserError(f"--insert is {args.insert}: it must be at least 0.")
    if args.replace_length not in (-1, 0, 1):
        raise UserError(
            f"--replace-length is {args.replace_length}: use 0, 1 or -1, which keeps the number "
            "of tokens."
        )
    if not 0 < args.poisson_lambda <= _LONGEST_MEAN:
        raise UserError(
            f"--poisson-lambda is {args.poisson_lambda}: the mean length of a span must be above 0 "
            f"and at most {_LONGEST_MEAN}. BART's is 3.5."
        )
    if request.command == "train":  # else the checkpoint has the other settings
        _together(args)


def _together(args: argparse.Namespace) -> None:
    """Raises UserError if settings contradict each other."""
    positions = min(args.max_source_positions, args.max_target_positions)
    if args.tokens_per_sample > positions and args.sample_break_mode != "eos":
        raise UserError(
            f"--tokens-per-sample is {args.tokens_per_sample}, but the model has {positions} "
            "positions: lower the first, or raise --max-source-positions and "
            "--max-target-positions."
        )
    if args.sample_break_mode != "eos" and args.tokens_per_sample * (1 + args.insert) > positions:
        raise UserError(
            f"--insert {args.insert} makes a block of {args.tokens_per_sample} tokens longer than "
            f"the {positions} positions of the model: lower --tokens-per-sample, or raise "
            "--max-source-positions and --max-target-positions."
        )
    if args.mask_length == "subword" and args.replace_length == -1:
        raise UserError(
            "--mask-length subword needs --replace-length 0 or 1, but both have fairseq's "
            "defaults or these values: set --mask-length span-poisson --replace-length 1, as for "
            "BART."
        )
