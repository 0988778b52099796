"""Checks of single values: numbers, and text that fairseq evaluates later."""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import typing
from collections.abc import Callable
from typing import Any

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words import completions, synonyms
from lightseq_fairseq.cli.words.argv import flag_of


def path(request: Request) -> None:
    """Raises UserError if no checkpoint is named; replaces the folder of a run by its best one."""
    given = getattr(request.args, "path", None)
    if given is None:
        raise UserError(
            "--path is missing: add the checkpoint, for example "
            "--path checkpoints/checkpoint_best.pt."
        )
    request.args.path = os.pathsep.join(map(checkpoint_in, given.split(os.pathsep)))


def input_file(request: Request) -> None:
    """Prints a note if the file of --input is empty. That is no error: so is the result."""
    path = request.args.input
    is_empty = os.path.isfile(path) and os.path.getsize(path) == 0
    if is_empty and os.environ.get("RANK", "0") == "0":
        click.echo(f"note: {path} is empty, so there is nothing to do.", err=True)


def texts(request: Request) -> None:
    """Raises UserError on text that fairseq cannot evaluate, on NaN, and on unknown joiners or
    detokenizers."""
    command, args = request.command, request.args
    for name, (is_right, example) in _EVALUATED.items():
        text = getattr(args, name, None)
        if isinstance(text, str) and not is_right(text):
            raise UserError(f"{flag_of(name)} {text} cannot be read: write it like {example}.")
    if getattr(args, "eval_bleu", False):
        _search_settings(json.loads(args.eval_bleu_args))
    from fairseq.data.data_utils import post_process
    from fairseq.data.encoders import TOKENIZER_REGISTRY

    for name, value in vars(args).items():
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"{flag_of(name)} is nan: use a number.")
    if command == "eval-lm" and args.post_process not in (None, "subword_nmt", "@@ "):
        raise UserError(
            f"--remove-bpe {args.post_process} is unknown in lightseq-eval-lm: use --remove-bpe "
            "'@@ ', which scores the words of subword-nmt instead of its subwords, or remove it."
        )
    flag, symbol = joiner(command, args)
    if symbol == "@@":
        raise UserError(
            f"{flag} @@ removes the marks but does not join the subwords: use {flag} without a "
            "value."
        )
    try:
        post_process("", symbol)
    except NotImplementedError as error:
        raise UserError(
            f"{flag} {symbol} is unknown: use {flag} without a value for @@, or with the value "
            "sentencepiece, wordpiece, letter, silence, _EOW or none."
        ) from error
    detokenizer = getattr(args, "eval_bleu", False) and args.eval_bleu_detok
    if detokenizer and detokenizer not in TOKENIZER_REGISTRY:
        known = ", ".join(sorted(TOKENIZER_REGISTRY))
        raise UserError(f"--eval-bleu-detok {detokenizer} is unknown: choose one of {known}.")


# Ranges of numbers: (pattern of the names of settings, test of a value, range for the message).
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        r"beam|nbest|update_freq|distributed_world_size|(max_tokens|batch_size)(_valid)?|"
        r"required_(batch_size|seq_len)_multiple|(save|validate|log)_interval|"
        r"(en|de)coder_(attention_heads|(ffn_)?embed_dim)",
        lambda count: count >= 1,
        "at least 1",
    ),
    # A dropout of 1 leaves nothing of the activations, and a layerdrop of 1 no layer to train.
    (
        r"\w*drop\w*|label_smoothing|adam_betas|(slowmo_)?momentum|adadelta_rho|beta1",
        lambda rate: 0 <= rate < 1,
        "at least 0 and below 1",
    ),
    (
        r"word_blanking_prob|eos_prob_threshold|quant_noise_(pq|scalar)|ema_decay|zoneout",
        lambda rate: 0 <= rate <= 1,
        "from 0 to 1",
    ),
    (
        r"((min|max)_)?lr|lr_(shrink|decay)|(init|final)_lr_scale|end_learning_rate|"
        r"weight_decay|\w+_eps",
        lambda rate: rate >= 0,
        "at least 0",
    ),
    # A term of a sum, and numbers whose range depends on another one.
    (r"max_len_b|distributed_rank|context_window", lambda _: True, "any number"),
)


def numbers(request: Request) -> None:
    """Raises UserError on counts that are too low, an invalid rank, and rates out of their range.

    Flags that only a --user-dir defines may have any value.
    """
    args = request.args
    known = {*completions.flags(request.command, request.argv), *completions.of_archs()}
    for action in request.parser._actions:
        limits = _range(action)
        if limits is None or not known & {*action.option_strings}:
            continue
        is_right, wanted = limits
        for number in _numbers(getattr(args, action.dest, None)):
            if not is_right(number):
                flag = flag_of(action.dest)
                raise UserError(f"{flag} is {number}: it must be {wanted}.")
    rank, ranks = args.distributed_rank, args.distributed_world_size
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(
            f"--distributed-rank is {rank}, but --distributed-world-size is {ranks}: the rank "
            f"must be at least 0 and below {ranks}."
        )


def _range(action: argparse.Action) -> tuple[Callable[[float], bool], str] | None:
    """(test of a value of the flag, range for the message); None if it may have any value."""
    for pattern, is_right, wanted in _RANGES:
        if re.fullmatch(pattern, action.dest):
            return is_right, wanted
    # Other counts; if the default is negative, negative numbers turn something off.
    if action.type is int and not any(x < 0 for x in _numbers(action.default)):
        return (lambda count: count >= 0), "at least 0"
    return None


def _numbers(value: Any) -> list[float]:
    """The numbers in the value of a setting."""
    if isinstance(value, str):  # such as that of --adam-betas
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, TypeError, ValueError):
            return []
    return [x for x in (value if isinstance(value, (list, tuple)) else [value]) if _is_number(x)]


def criterion_of_classes(request: Request) -> None:
    """Raises UserError if the task lacks settings that are flags of its criterion."""
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.sentence_prediction import SentencePredictionTask

    args = request.args
    is_task = issubclass(TASK_REGISTRY[args.task], SentencePredictionTask)
    if is_task and not hasattr(args, "regression_target"):
        raise UserError(
            f"--criterion is {args.criterion}, but --task {args.task} needs the criterion of "
            "sentences with labels: set --criterion sentence_prediction."
        )


def joiner(command: str, args: argparse.Namespace) -> tuple[str, str | None]:
    """(flag, value) of the setting with which the command joins subwords of translations."""
    if command in ("generate", "interactive"):
        return "--remove-bpe", args.post_process
    if command == "train" and getattr(args, "eval_bleu", False):
        return "--eval-bleu-remove-bpe", args.eval_bleu_remove_bpe
    return "--remove-bpe", None


def _search_settings(given: dict[str, Any]) -> None:
    """Raises UserError on unknown settings in --eval-bleu-args, which fairseq would ignore."""
    from fairseq.dataclass.configs import GenerationConfig

    known = typing.get_type_hints(GenerationConfig)
    for name, value in given.items():
        if name not in known:
            close = synonyms.nearest(name, known, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else "use settings such as beam and lenpen."
            raise UserError(f"--eval-bleu-args contains the unknown setting {name}: {hint}")
        for kind, is_right, wanted in _KINDS:
            if known[name] is kind and not is_right(value):
                raise UserError(f"{name} in --eval-bleu-args is {json.dumps(value)}: use {wanted}.")
        if name in ("beam", "nbest") and value < 1:
            raise UserError(f"{name} in --eval-bleu-args is {value}: it must be at least 1.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# For settings of the search: (type, test of a value, description for the message).
_KINDS: tuple[tuple[type, Callable[[Any], bool], str], ...] = (
    (bool, lambda value: isinstance(value, bool), "true or false"),
    (int, lambda value: _is_number(value) and float(value).is_integer(), "a whole number"),
    (float, _is_number, "a number"),
)


def _python(text: str) -> ast.expr | None:
    """The text parsed as a Python expression; None if it is not one, or contains a name."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return None if any(isinstance(node, ast.Name) for node in ast.walk(tree)) else tree


def _is_tuple(count: int) -> Callable[[str], bool]:
    def is_tuple(text: str) -> bool:
        tree = _python(text)
        if isinstance(tree, (ast.Tuple, ast.List)):
            return len(tree.elts) == count
        return tree is not None and not isinstance(tree, (ast.Constant, ast.Dict))

    return is_tuple


def _is_dict(text: str) -> bool:
    tree = _python(text)
    return tree is not None and not isinstance(tree, (ast.Constant, ast.Tuple, ast.List))


def _is_schedule(text: str) -> bool:
    """Whether ``--lr-scheduler manual`` can read the text: epochs or updates -> learning rates."""
    try:
        rates = ast.literal_eval(text.replace(" ", ""))
        return all(
            re.fullmatch(r"\d+(,\d+)*|\d+-\d+", when) is not None and float(rate) >= 0
            for when, rate in rates.items()
        )
    except (SyntaxError, ValueError, TypeError, AttributeError):
        return False


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


# Settings whose text fairseq evaluates: (test, example for the message).
_EVALUATED: dict[str, tuple[Callable[[str], bool], str]] = {
    "adam_betas": (_is_tuple(2), "'(0.9, 0.98)'"),
    "phase_ratio": (_is_tuple(3), "'(0.1, 0.4, 0.5)'"),
    "optimizer_overrides": (_is_dict, "\"{'weight_decay': 0.1}\""),
    "model_overrides": (_is_dict, "\"{'data': 'data-bin'}\""),
    "epoch2lr": (_is_schedule, "\"{'1-2': 0.001, '3': 0.0005}\""),
    "update2lr": (_is_schedule, "\"{'100': 0.001, '200': 0.0005}\""),
    "eval_bleu_args": (_is_json, "'{\"beam\": 4}'"),
    "eval_bleu_detok_args": (_is_json, '\'{"lang": "de"}\''),
}
