"""Repairs of how fairseq parses ``--arch``, ``--bf16`` and ``--lr``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from typing import Any

from fairseq import models, utils
from fairseq.tasks import TASK_REGISTRY

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import PREFIX, Family


def check_arch(name: str, task: str | None = None) -> None:
    """Raises UserError, naming the closest matches, unless fairseq knows the architecture.

    task: of the command, whose data the matches train on; None: unknown.
    """
    known = {*models.ARCH_MODEL_REGISTRY, *models.MODEL_DATACLASS_REGISTRY}
    if name in known:
        return
    close = difflib.get_close_matches(name, sorted(known), n=12)
    if close and _family_of(close[0]) is not None:  # else it may be like others of fairseq
        close = [arch for arch in close if _fits(arch, task)] or close
    ours = [arch for arch in sorted(known) if arch.startswith("ls_transformer")]
    ours = [arch for arch in ours if _fits(arch, task)] or ours
    hint = f"use {', '.join(ours)}, or one of fairseq's."
    if close:
        hint = f"did you mean {' or '.join(close[:3])}?"
    raise UserError(f"There is no arch named {name}: {hint}")


def _family_of(arch: str) -> Family | None:
    """The family of an arch of ours, or of the one that an arch of fairseq corresponds to."""
    names = arch, f"{PREFIX}{arch}"
    found = (getattr(models.ARCH_MODEL_REGISTRY.get(name), "family", None) for name in names)
    return next((family for family in found if isinstance(family, Family)), None)


def _fits(arch: str, task: str | None) -> bool:
    """Whether an arch of a known family trains on the data of the task."""
    family = _family_of(arch)
    if task is None or task not in TASK_REGISTRY:
        return True
    return family is not None and family.has_task(TASK_REGISTRY[task])


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
            check_arch(arch, _value(given, "--task") or "translation")
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
    return _value(given, "--arch", "-a")


def _value(given: list[str], *flags: str) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*flags, dest="value")
    found: str | None = parser.parse_known_args(given)[0].value
    return found


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
