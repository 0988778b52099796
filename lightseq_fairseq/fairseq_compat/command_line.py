"""Repairs of how fairseq parses ``--arch``, ``--bf16`` and ``--lr``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from typing import Any

from fairseq import models, utils

from lightseq_fairseq.base.errors import UserError


def check_arch(name: str) -> None:
    """Raises UserError, naming the closest matches, unless fairseq knows the architecture."""
    known = {*models.ARCH_MODEL_REGISTRY, *models.MODEL_DATACLASS_REGISTRY}
    if name in known:
        return
    close = difflib.get_close_matches(name, sorted(known), n=3)
    ours = ", ".join(sorted(arch for arch in known if arch.startswith("ls_transformer")))
    hint = f"did you mean {' or '.join(close)}?" if close else f"use {ours}, or one of fairseq's."
    raise UserError(f"There is no arch named {name}: {hint}")


def parse_args_and_arch(
    original: Callable[..., Any],
    parser: argparse.ArgumentParser,
    input_args: list[str] | None = None,
    parse_known: bool = False,
    suppress_defaults: bool = False,
    modify_parser: Any = None,
) -> Any:
    """Checks the architecture first, keeps ``--bf16`` on the GPU and reads ``--lr`` as a list."""
    given = sys.argv[1:] if input_args is None else input_args

    def check_then_modify(parser: argparse.ArgumentParser) -> None:
        # fairseq calls this after it has imported --user-dir, so all names are registered, and
        # before argparse would answer an unknown name with a list of all 300 known ones.
        arch = _arch(parser, given)
        if arch is not None:
            check_arch(arch)
        _mend_values(parser)
        if modify_parser is not None:
            modify_parser(parser)

    tpu = "--tpu" in given
    try:
        parsed = original(parser, input_args, parse_known, suppress_defaults, check_then_modify)
    except ValueError as error:
        if "--tpu" in str(error) and not tpu:
            raise UserError("--fp16 and --bf16 cannot be used together: remove one.") from error
        raise
    args = parsed[0] if parse_known else parsed
    # In fairseq "--bf16" also sets --tpu, and a GPU run stops with "module 'torch_xla'" errors.
    if getattr(args, "tpu", False) and not tpu:
        args.tpu = False
    return parsed


def _arch(parser: argparse.ArgumentParser, given: list[str]) -> str | None:
    if not any(action.dest == "arch" for action in parser._actions):
        return None
    arch_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arch_parser.add_argument("--arch", "-a")
    return arch_parser.parse_known_args(given)[0].arch


def _mend_values(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if action.dest == "lr":
            # In commands other than training, only the lr scheduler defines --lr. fairseq then
            # keeps it as a string or None, and fails when it converts it to a list.
            action.type = _rates
            action.default = argparse.SUPPRESS if action.default is None else action.default
        elif action.default == "???" and action.type is float:
            # --max-lr: argparse would try to parse its default "???" as a number.
            action.required, action.default = True, None
        elif action.dest == "update_epoch_batch_itr":
            # The flag needs a value and accepts only Python literals, such as True: otherwise
            # "malformed node or string".
            action.type = _truth


def _rates(text: str) -> list[float]:
    try:
        rates: list[float] = utils.eval_str_list(text)
    except Exception as error:
        raise argparse.ArgumentTypeError(
            f"{text} is not a learning rate: write a number, or one for each epoch, as in 0.1,0.05"
        ) from error
    return rates


def _truth(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither True nor False: use one of them")
    return text.capitalize()


def build_model(original: Callable[..., Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    # For a checkpoint of an architecture that is not registered here, fairseq formats its own error
    # message wrongly: "IndexError: Replacement index 1 out of range".
    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
    if name:
        check_arch(name)
    return original(cfg, *args, **kwargs)
