"""Checks before fairseq starts, for bad input that fairseq reports late or misleadingly.

They read the parsed flags, the dictionaries and the data files' indices; nothing is created and no
model is loaded. For tasks other than translation, most of the input is left to fairseq.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightseq_fairseq.cli.refusals import flags
from lightseq_fairseq.cli.refusals.messages import Request
from lightseq_fairseq.cli.start import (
    command_lines,
    preflight_checkpoints,
    preflight_values,
    registries,
)
from lightseq_fairseq.cli.start.defaults import is_given, value
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.fairseq_compat import patching


@contextmanager
def checks(
    command: str, request: Request, passed: Callable[[], None] | None = None
) -> Iterator[None]:
    """Within the block the checks run after fairseq has parsed the command line.

    ``request.args`` is set to the parsed namespace. In training the parser also accepts
    --pack-tokens, which fairseq adds to the model's configuration, and --fp8, which is added to the
    section "common". The trainer finds them there, also in spawned ranks.

    Args:
        command: train, generate, ...
        passed: called if the checks have passed.

    Raises:
        UserError: an unknown name, an unsupported setting, missing data, or a precision that the
            machine does not support.
    """

    def parse_and_check(
        parse: Callable[..., Any],
        parser: argparse.ArgumentParser, input_args: Any = None, *more: Any, **keywords: Any,
    ) -> Any:  # fmt: skip
        names(parser, request.argv)
        words = sys.argv[1:] if input_args is None else list(input_args)
        if "--help" in words:
            words.remove("--help")
            command_lines.with_all_flags(command, parse, parser, words)
        if command == "train":
            registries.check_task(request.argv)
            # Not in the namespace unless given; the launcher's --help explains them.
            for flag in ("--pack-tokens", "--fp8"):
                parser.add_argument(
                    flag, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )
        parsed = parse(parser, input_args, *more, **keywords)
        # fairseq-validate parses several times; check only the first result.
        if isinstance(parsed, argparse.Namespace) and not vars(request.args):
            request.args = parsed
            if os.path.basename(sys.argv[0]).startswith("lightseq-"):  # not for native runs
                flags.check(command, request.argv, parser, parsed)
            inputs(command, request.argv, parsed)
            if passed is not None:
                passed()
        return parsed

    with ExitStack() as replaced:
        replaced.enter_context(
            patching.within("fairseq.options:parse_args_and_arch", parse_and_check)
        )
        if command == "train":
            target = "fairseq_cli.train:convert_namespace_to_omegaconf"
            replaced.enter_context(patching.within(target, with_fp8, by="cli.start.preflight"))
        yield


def with_fp8(convert: Callable[..., Any], args: argparse.Namespace) -> Any:
    """fairseq's configuration; ``common.fp8`` exists and is True if --fp8 is set."""
    cfg = convert(args)
    if getattr(args, "fp8", False):
        from omegaconf import open_dict

        with open_dict(cfg.common):  # fairseq's section has no such setting
            cfg.common.fp8 = True
    return cfg


def names(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Raises UserError if a task, optimizer, ... is not registered, and names the closest ones.

    `fairseq_compat` checks the arch, which may also come from a checkpoint.
    """
    from fairseq.registry import REGISTRIES

    for action in parser._actions:
        if action.dest in ("task", *REGISTRIES) and action.choices is not None:
            name = value(argv, action.option_strings)
            if name is not None and name not in action.choices:
                what = action.dest.replace("_", " ")
                longer = [choice for choice in action.choices if choice.startswith(name)][:3]
                close = longer or difflib.get_close_matches(name, action.choices, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(close)}?" if close else ""
                raise UserError(
                    f"There is no {what} named {name}: "
                    f"{hint or f'--fairseq-help lists the choices of {action.option_strings[0]}.'}"
                )


def inputs(command: str, argv: Sequence[str], args: argparse.Namespace) -> None:
    """Raises UserError on input that the command cannot use; ``args`` is fairseq's namespace."""
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.masked_lm import MaskedLMTask
    from fairseq.tasks.sentence_prediction import SentencePredictionTask

    # These import numpy, which --help does not need.
    from lightseq_fairseq.cli.start import preflight_classes, preflight_data, preflight_text

    if command != "train" and getattr(args, "path", None) is None:
        raise UserError(
            "--path is missing: add the checkpoint, for example "
            "--path checkpoints/checkpoint_best.pt."
        )
    preflight_values.values(command, args)
    numbers(args)
    backend(argv, args)
    preflight_values.unknown_words(args)
    preflight_values.length_penalty(args)
    language_model(command, args)
    sentence_prediction(args)
    if command == "generate" and args.constraints:  # with --native; else flags.check refuses it
        raise UserError(
            "--constraints reads constraints from lines of text, but a binarised test set contains "
            "none: remove it, or translate with lightseq-interactive."
        )
    if command == "train":
        precision(args)
        pack_tokens(args)
        fp8(args)
        preflight_checkpoints.first(args)
        preflight_checkpoints.best_metric(args)
    elif command == "validate":
        preflight_checkpoints.head(args, args.path, "train another head")
    if _reads_sentence_pairs(args.task):
        preflight_data.data(command, args)
    elif _reads_running_text(args.task):
        preflight_text.text(command, args)
    elif _loads_as(args.task, MaskedLMTask, "setup_task", "load_dataset"):
        preflight_text.masked_text(command, args)
    elif _loads_as(args.task, SentencePredictionTask, "setup_task", "load_dataset"):
        preflight_classes.classes(command, args)
    elif TASK_REGISTRY[args.task].__module__.startswith("fairseq.tasks."):
        preflight_data.sentences(command, args)


# Options of generation -> why a language model cannot use them.
_OF_TRANSLATION = {
    "constraints": "its search has no constraints",
    "print_alignment": "it has no source to align with",
    "replace_unk": "it has no source to copy words from",
}


def language_model(command: str, args: argparse.Namespace) -> None:
    """Raises UserError for an option of translation where a language model generates text."""
    if command not in ("generate", "interactive") or args.task != "language_modeling":
        return
    for name, reason in _OF_TRANSLATION.items():
        if getattr(args, name, None):
            raise UserError(
                f"--{name.replace('_', '-')} cannot be used with a language model, because "
                f"{reason}: remove it."
            )


def sentence_prediction(args: argparse.Namespace) -> None:
    """Raises UserError if the task lacks settings that are flags of its criterion."""
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.sentence_prediction import SentencePredictionTask

    is_task = issubclass(TASK_REGISTRY[args.task], SentencePredictionTask)
    if is_task and not hasattr(args, "regression_target"):
        raise UserError(
            f"--criterion is {args.criterion}, but --task {args.task} needs the criterion of "
            "sentences with labels: set --criterion sentence_prediction."
        )


def _reads_sentence_pairs(task: str) -> bool:
    """Whether the task loads dictionaries and data with the methods of fairseq's translation task;
    a subclass may override them."""
    from fairseq.tasks.translation import TranslationTask

    return _loads_as(task, TranslationTask, "setup_task", "load_dictionary", "load_dataset")


def _reads_running_text(task: str) -> bool:
    """Like `_reads_sentence_pairs`, for fairseq's language modeling task."""
    from fairseq.tasks.language_modeling import LanguageModelingTask

    return _loads_as(task, LanguageModelingTask, "setup_task", "setup_dictionary", "load_dataset")


def _loads_as(task: str, fairseqs: type, *names: str) -> bool:
    """Whether methods of the task are those of a class of fairseq's."""
    from fairseq.tasks import TASK_REGISTRY

    return all(
        registries.function(TASK_REGISTRY[task], name) is registries.function(fairseqs, name)
        for name in names
    )


_FROM_NONE = ("num_workers", "seed")
_FROM_ONE = (
    *("beam", "nbest", "update_freq", "max_tokens", "batch_size", "distributed_world_size"),
    *("required_batch_size_multiple", "required_seq_len_multiple"),
    *("save_interval", "validate_interval", "log_interval"),
)


def numbers(args: argparse.Namespace) -> None:
    """Raises UserError on counts that are too low, an invalid rank, and rates outside [0, 1)."""
    for least, counted in enumerate((_FROM_NONE, _FROM_ONE)):
        for name in counted:
            found = getattr(args, name, None)
            counts = found if isinstance(found, list) else [found]
            for count in counts:
                if count is not None and count < least:
                    raise UserError(
                        f"--{name.replace('_', '-')} is {count}: it must be at least {least}."
                    )
    rank, ranks = args.distributed_rank, args.distributed_world_size
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(
            f"--distributed-rank is {rank}, but --distributed-world-size is {ranks}: the rank "
            f"must be at least 0 and below {ranks}."
        )
    if not registries.is_fused(getattr(args, "arch", None)):  # fairseq checks its own models
        return
    for name in ("dropout", "attention_dropout", "activation_dropout", "relu_dropout",
                 "label_smoothing"):  # fmt: skip
        rate = getattr(args, name, None) or 0
        if not 0 <= rate < 1:
            raise UserError(
                f"--{name.replace('_', '-')} is {rate}: it must be at least 0 and below 1."
            )


def backend(argv: Sequence[str], args: argparse.Namespace) -> None:
    """Selects the gloo backend for ranks without GPUs; fairseq's default, NCCL, needs GPUs."""
    import torch

    flag = "--distributed-backend"
    if flags.has_one_rank(args) or (torch.cuda.is_available() and not args.cpu):
        return
    if args.distributed_backend != "nccl":
        return
    if is_given(argv, (flag,)):
        raise UserError(
            f"{flag} nccl needs a GPU, but this run uses none: use {flag} gloo, or remove it."
        )
    args.distributed_backend = "gloo"


def precision(args: argparse.Namespace) -> None:
    """Raises UserError for fairseq's flat fp16 optimizer without a GPU: it uses a CUDA device."""
    import torch

    flat = args.fp16 and not (args.memory_efficient_fp16 or args.fp16_no_flatten_grads)
    if flat and (args.cpu or not torch.cuda.is_available()):
        raise UserError(
            "--fp16 needs a GPU, but this run uses none: remove it, or use --bf16, which also "
            "works on a CPU."
        )


def fp8(args: argparse.Namespace) -> None:
    """Raises UserError if --fp8 cannot be used; the trainer checks the model and the GPU."""
    if not hasattr(args, "fp8"):
        return
    ours = os.path.basename(sys.argv[0]) == "lightseq-train"
    if not ours or not registries.is_fused(args.arch):
        raise UserError(
            "--fp8 needs our layers: use an --arch that begins with ls_, without --native, or "
            "remove --fp8."
        )
    if not args.bf16:
        raise UserError("--fp8 needs --bf16, the precision of everything but products: add --bf16.")


def pack_tokens(args: argparse.Namespace) -> None:
    """Raises UserError if --pack-tokens does not fit the model, its data or the batch flags."""
    if not hasattr(args, "pack_tokens"):
        return
    from fairseq.models import ARCH_MODEL_REGISTRY

    from lightseq_fairseq.plugins.flat_model import SENTENCE_PAIRS

    ours = os.path.basename(sys.argv[0]) == "lightseq-train"
    if not ours or not getattr(ARCH_MODEL_REGISTRY.get(args.arch), "packs_tokens", False):
        raise UserError(
            "--pack-tokens needs a model that trains on packed tokens: use an --arch that begins "
            "with ls_transformer, without --native, or remove --pack-tokens."
        )
    if ARCH_MODEL_REGISTRY[args.arch].data is not SENTENCE_PAIRS:
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
