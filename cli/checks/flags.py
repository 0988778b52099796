"""Checks of settings that our model lacks (errors) or that have no effect (notes).

The table is ``plugins.settings.SETTINGS``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words.argv import flag_of, is_given, is_native
from lightseq_fairseq.plugins import conditions, settings
from lightseq_fairseq.plugins.settings import REFUSED, SEVERAL_RANKS, WITHOUT, is_used, option


def name(action: argparse.Action) -> str:
    """The name used here for a setting: if it has several names, the one in fairseq's code."""
    read = flag_of(action.dest)
    return read if read in action.option_strings else [*action.option_strings, action.dest][0]


def supported(request: Request) -> None:
    """Checks the settings of a command, and prints a note for each one without effect.

    With --native, all settings are supported.

    Raises:
        UserError: an unsupported setting; the message names it, the reason and what to do.
    """
    command, args = request.command, request.args
    if is_native():
        return
    sentence = refusal(command, args)
    if sentence is not None:
        raise UserError(sentence)
    known = families.tasks().get(args.task)
    if known is not None and known.loaders:
        for note in notes(command, request.argv, request.parser, args):
            request.say(note)


def refusal(command: str, args: argparse.Namespace) -> str | None:
    """A sentence that names a setting that the command does not support, or None."""
    for flag, row in settings.rows(command, REFUSED):
        if is_used(flag, row, args):
            reason = row.reason.format(args=args)
            return f"lightseq-{command} does not support {flag} ({reason}): {row.way_out}."
    family = conditions.family_of(args.arch) if command == "train" else None
    if family is not None:
        # The model would report it too, but only after the data are loaded.
        from lightseq_fairseq.plugins.unsupported import unsupported_option

        unsupported = unsupported_option(args, family.supports)
        return None if unsupported is None else unsupported.sentence(args.arch)
    return None


def notes(
    command: str, argv: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Iterator[str]:
    """Yields a sentence for each setting of ``argv`` that has no effect."""
    family = conditions.family_of(args.arch) if command == "train" else None
    unread = settings.unread(command, args.task, family)
    of_search = _of_search() if families.classifies(args.task) and command == "interactive" else ()
    searches = command in ("generate", "interactive") and not of_search
    if searches and args.nbest > args.beam > 0 and not args.sampling:
        yield f"--nbest {args.nbest} gives {args.beam} hypotheses, as many as --beam."
    given = {name(a) for a in parser._actions if is_given(argv, a.option_strings)}
    for flag in sorted(given):
        if flag in of_search:
            typed = "--remove-bpe" if flag == "--post-process" else flag
            yield f"{typed} has no effect: a classifier does not use it."
        elif flag in unread:
            yield f"{flag} has no effect: fairseq-{command} does not use it."
        elif flag == "--post-process" and command == "eval-lm" and args.post_process != "@@ ":
            yield (
                "--remove-bpe has no effect: fairseq-eval-lm scores whole words with "
                "--remove-bpe '@@ '."
            )
        elif flag == "--ddp-backend" and conditions.has_adaptive_softmax(args):
            pass  # adaptive_loss reads it
        elif WITHOUT.get(flag) == SEVERAL_RANKS and command == "train" and has_one_rank(args):
            yield f"{flag} has no effect with one rank."
        elif flag in ("--sampling-topk", "--sampling-topp"):
            pass  # refused without --sampling
        # Not for validate, which reads the remaining configuration from the checkpoint.
        elif _lacks_its_whole(flag, parser, args) and command != "validate":
            yield f"{flag} has no effect without {WITHOUT[flag]}."
        elif command == "train" and flag in _unread_by_samples(args):
            yield f"{flag} has no effect with --sampling-method {args.sampling_method}."
        elif flag == "--fp32-reduce-scatter" and command == "train" and not _in_16_bits(args):
            yield f"{flag} has no effect without --fp16 or --bf16: gradients are float32 already."


def _of_search() -> frozenset[str]:
    """The settings of the search and of its results."""
    from fairseq.dataclass.configs import GenerationConfig

    others = ("post_process", "skip_invalid_size_inputs_valid_test")
    return frozenset(map(flag_of, (*GenerationConfig.__dataclass_fields__, *others)))


def _unread_by_samples(args: argparse.Namespace) -> tuple[str, ...]:
    """Settings of batches that fairseq does not use if they are sampled from language pairs."""
    if getattr(args, "sampling_method", "RoundRobin") == "RoundRobin":
        return ()
    # With more batches an update, the flag removes a last update of fewer batches.
    remainder = ("--skip-remainder-batch",) if [*args.update_freq] == [1] else ()
    return ("--data-buffer-size", "--grouped-shuffling", "--update-epoch-batch-itr", *remainder)


def _lacks_its_whole(flag: str, parser: argparse.ArgumentParser, args: argparse.Namespace) -> bool:
    """Whether the flag is a part of another setting, which is not set."""
    whole, _, choice = WITHOUT.get(flag, SEVERAL_RANKS).partition(" ")
    if not whole.startswith("--"):
        return False
    value = getattr(args, option(whole), None)
    return value != choice if choice else not value or value == parser.get_default(option(whole))


def _in_16_bits(args: argparse.Namespace) -> bool:
    return bool(args.fp16 or args.bf16)


def has_one_rank(args: argparse.Namespace) -> bool:
    """Whether the command runs as one process: neither one of several ranks nor their parent."""
    started = os.environ.get("WORLD_SIZE", "1") != "1" or args.distributed_port > 0
    return args.distributed_world_size == 1 and not started
