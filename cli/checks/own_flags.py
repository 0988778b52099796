"""The flags of lightseq-train that fairseq does not have: parsing and checks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words import registries
from lightseq_fairseq.cli.words.argv import is_native

_LORA = {"lora_rank": int, "lora_alpha": float, "lora_dropout": float, "lora_on": str}
# Of these, fairseq's section "common" has no setting.
_OF_COMMON = ("fp8", "freeze", *_LORA)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to fairseq's parser; the launcher's --help explains them.

    A flag that is not set is not in the namespace.
    """
    for flag in ("--pack-tokens", "--fp8"):
        parser.add_argument(
            flag, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    for name, kind in {"freeze": str, **_LORA}.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def with_own(convert: Callable[..., Any], args: argparse.Namespace) -> Any:
    """fairseq's configuration; ``common.fp8`` and so on exist if these flags are set."""
    cfg = convert(args)
    found = {
        name: getattr(args, name) for name in _OF_COMMON if getattr(args, name, None) is not None
    }
    if found:
        from omegaconf import open_dict

        with open_dict(cfg.common):
            cfg.common.update(found)
    return cfg


def pack_tokens(request: Request) -> None:
    """Raises UserError if --pack-tokens does not fit the model, its data or the batch flags."""
    args = request.args
    if not hasattr(args, "pack_tokens"):
        return
    from fairseq.models import ARCH_MODEL_REGISTRY

    if is_native() or not getattr(ARCH_MODEL_REGISTRY.get(args.arch), "packs_tokens", False):
        raise UserError(
            "--pack-tokens needs a translation model or BART that trains on packed tokens: use an "
            "--arch that begins with ls_, without --native, or remove --pack-tokens."
        )
    if not ARCH_MODEL_REGISTRY[args.arch].family.packs_pairs:
        # The flag would not reach the model anyway: if a model's configuration is a dataclass,
        # fairseq drops all other settings.
        raise UserError(
            f"--pack-tokens counts the tokens of sentence pairs, but --arch {args.arch} trains on "
            "other data: remove --pack-tokens."
        )
    if args.max_tokens is None:
        raise UserError(
            "--pack-tokens fills batches up to --max-tokens, which is not set: set it, or remove "
            "--pack-tokens."
        )
    if getattr(args, "num_batch_buckets", 0):
        raise UserError(
            "--pack-tokens fills batches by their tokens, but --num-batch-buckets by their "
            "sentences: remove one of the two."
        )


def fp8(request: Request) -> None:
    """Raises UserError if --fp8 cannot be used; the trainer checks the model and the GPU."""
    args = request.args
    if not hasattr(args, "fp8"):
        return
    if is_native() or not registries.is_fused(args.arch):
        raise UserError(
            "--fp8 needs our layers: use an --arch that begins with ls_, without --native, or "
            "remove --fp8."
        )
    if not args.bf16:
        raise UserError("--fp8 needs --bf16, the precision of everything but products: add --bf16.")


def lora(request: Request) -> None:
    """Raises UserError if --lora-rank or a flag that belongs to it cannot be used."""
    args = request.args
    given = {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in _LORA}
    first = next((flag for flag, value in given.items() if value is not None), None)
    if first is None:
        return
    if given["--lora-rank"] is None:
        raise UserError(
            f"{first} needs --lora-rank, as in --lora-rank 16: add it, or remove {first}."
        )
    if is_native() or not registries.is_fused(args.arch):
        raise UserError(
            "--lora-rank needs our layers: use an --arch that begins with ls_, without --native, "
            "or remove --lora-rank."
        )
    for flag, least, fits in (
        ("--lora-rank", "at least 1", lambda value: value >= 1),
        ("--lora-alpha", "above 0", lambda value: 0 < value < math.inf),
        ("--lora-dropout", "at least 0 and below 1", lambda value: 0 <= value < 1),
    ):
        value = given[flag]
        if value is not None and not fits(value):
            raise UserError(f"{flag} is {value}, but must be {least}: change it.")
