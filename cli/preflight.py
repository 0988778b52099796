"""Checks before fairseq starts, for bad input whose exception would come late or mislead.

They read the parsed flags and list directories; nothing is created or loaded. Input of tasks other
than translation is fairseq's own business.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightseq_fairseq.cli import flags
from lightseq_fairseq.cli.defaults import PREFIX, value
from lightseq_fairseq.cli.messages import Request
from lightseq_fairseq.errors import UserError


@contextmanager
def checks(command: str, request: Request) -> Iterator[None]:
    """Within it, fairseq's parsing of the command line is followed by the checks.

    ``request.args`` receives what fairseq has parsed. ``command``: train, generate, ... In training
    the parser takes --pack-tokens as well: fairseq makes it a part of the model's configuration,
    where the trainer finds it, also in ranks that are spawned.

    Raises:
        UserError: an unknown name, a setting that is not supported, missing data, a precision the
            machine has not.
    """
    from fairseq import options

    parse = options.parse_args_and_arch

    def parse_and_check(
        parser: argparse.ArgumentParser, input_args: Any = None, *more: Any, **keywords: Any
    ) -> Any:
        names(parser, request.argv)
        if command == "train":  # absent unless given; the launcher's --help explains it
            parser.add_argument(
                "--pack-tokens", action="store_true", default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )  # fmt: skip
        parsed = parse(parser, input_args, *more, **keywords)
        # fairseq-validate parses again for what was given, and in doing so once more for defaults.
        if isinstance(parsed, argparse.Namespace) and not vars(request.args):
            request.args = parsed
            if os.path.basename(sys.argv[0]).startswith("lightseq-"):  # else all is fairseq's
                flags.check(command, request.argv, parser, parsed)
            inputs(command, parsed)
        return parsed

    options.parse_args_and_arch = parse_and_check
    try:
        yield
    finally:
        options.parse_args_and_arch = parse


def names(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Refuses a task, optimizer, ... that is not registered, and names the closest ones.

    The arch, which native checkpoints name as well, is checked by `fairseq_compat`.
    """
    from fairseq.registry import REGISTRIES

    for action in parser._actions:
        if action.dest in ("task", *REGISTRIES) and action.choices is not None:
            name = value(argv, action.option_strings)
            if name is not None and name not in action.choices:
                what = action.dest.replace("_", " ")
                close = difflib.get_close_matches(name, list(action.choices), n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(close)}?" if close else ""
                raise UserError(
                    f"There is no {what} named {name}: "
                    f"{hint or f'--fairseq-help lists the choices of {action.option_strings[0]}.'}"
                )


def inputs(command: str, args: argparse.Namespace) -> None:
    """Refuses what the command cannot start from; ``args`` is fairseq's namespace."""
    if command != "train" and getattr(args, "path", None) is None:
        raise UserError(
            "--path is missing: name the checkpoint, for example "
            "--path checkpoints/checkpoint_best.pt."
        )
    values(command, args)
    numbers(args)
    unknown_words(command, args)
    length_penalty(args)
    if command == "generate" and args.constraints and not args.sampling:  # flags.py: ours at all
        raise UserError(
            "--constraints stand in lines of text, and a binarised test set holds none: drop it, "
            "or translate with lightseq-interactive."
        )
    if command == "train":
        precision(args)
        pack_tokens(args)
        restore_file(args)
        best_metric(args)
    if _reads_sentence_pairs(args.task):
        data(command, args)


def _reads_sentence_pairs(task: str) -> bool:
    """Whether the task finds dictionaries and data as fairseq's translation does; subclasses may
    not."""
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.translation import TranslationTask

    def function(cls: type, name: str) -> object:
        method = getattr(cls, name, None)
        return getattr(method, "__func__", method)

    return all(
        function(TASK_REGISTRY[task], name) is function(TranslationTask, name)
        for name in ("setup_task", "load_dictionary", "load_dataset")
    )


# Settings whose text fairseq evaluates, with an example of each.
_PYTHON = {
    "adam_betas": "'(0.9, 0.98)'",
    "optimizer_overrides": "\"{'weight_decay': 0.1}\"",
    "model_overrides": "\"{'data': 'data-bin'}\"",
    "phase_ratio": "'(0.1, 0.4, 0.5)'",
    "epoch2lr": "\"{'1': 0.001}\"",
    "update2lr": "\"{'100': 0.001}\"",
}
_JSON = {"eval_bleu_args": "'{\"beam\": 4}'", "eval_bleu_detok_args": '\'{"lang": "de"}\''}


def values(command: str, args: argparse.Namespace) -> None:
    """Refuses text that fairseq could not evaluate, and a detokenizer that is not registered."""
    for examples, is_like in ((_PYTHON, _is_python_like), (_JSON, _is_json)):
        for name, example in examples.items():
            text = getattr(args, name, None)
            if isinstance(text, str) and not is_like(text, example):
                raise UserError(
                    f"--{name.replace('_', '-')} {text} cannot be read: write {example}."
                )
    from fairseq.data.data_utils import post_process
    from fairseq.data.encoders import TOKENIZER_REGISTRY

    flag, symbol = "--remove-bpe", None
    if command in ("generate", "interactive"):
        symbol = args.post_process
    elif command == "train" and getattr(args, "eval_bleu", False):
        flag, symbol = "--eval-bleu-remove-bpe", args.eval_bleu_remove_bpe
    try:
        post_process("", symbol)
    except NotImplementedError as error:
        raise UserError(
            f"{flag} {symbol} is not known: take @@, sentencepiece, wordpiece, letter, silence, "
            "_EOW or none."
        ) from error
    detokenizer = getattr(args, "eval_bleu", False) and args.eval_bleu_detok
    if detokenizer and detokenizer not in TOKENIZER_REGISTRY:
        known = ", ".join(sorted(TOKENIZER_REGISTRY))
        raise UserError(
            f"There is no tokenizer named {detokenizer} for --eval-bleu-detok: {known}."
        )


def unknown_words(command: str, args: argparse.Namespace) -> None:
    """Refuses --replace-unk where the source's subwords are joined before one is looked up."""
    if getattr(args, "replace_unk", None) is None:
        return
    joining = {
        "interactive": {"--remove-bpe": "post_process"},
        "generate": {"--bpe": "bpe", "--tokenizer": "tokenizer"},
    }
    for flag, name in joining.get(command, {}).items():
        if getattr(args, name, None):
            raise UserError(
                f"--replace-unk counts subwords, which {flag} would have joined in the source: "
                f"leave {flag} out, and apply it to the translations."
            )


def _is_python_like(text: str, example: str) -> bool:
    """Whether it is an expression of literals, and a dict or so many numbers as the example is."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    if any(isinstance(node, ast.Name) for node in ast.walk(tree)):
        return False
    wanted = ast.parse(example[1:-1], mode="eval").body
    if not isinstance(wanted, ast.Tuple):
        return not isinstance(tree.body, (ast.Constant, ast.Tuple, ast.List))
    if isinstance(tree.body, (ast.Tuple, ast.List)):
        return len(tree.body.elts) == len(wanted.elts)
    return not isinstance(tree.body, (ast.Constant, ast.Dict))


def _is_json(text: str, example: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


_FROM_NONE = ("num_workers", "seed")
_FROM_ONE = (
    *("beam", "nbest", "update_freq", "max_tokens", "batch_size", "distributed_world_size"),
    *("required_batch_size_multiple", "required_seq_len_multiple"),
    *("save_interval", "validate_interval", "log_interval"),
)


def numbers(args: argparse.Namespace) -> None:
    """Refuses counts that are too low, a rank that is none, rates that are no rates."""
    for least, counted in enumerate((_FROM_NONE, _FROM_ONE)):
        for name in counted:
            found = getattr(args, name, None)
            counts = found if isinstance(found, list) else [found]
            if any(count is not None and count < least for count in counts):
                raise UserError(f"--{name.replace('_', '-')} must be at least {least}.")
    rank, ranks = args.distributed_rank, args.distributed_world_size
    if rank is not None and not 0 <= rank < ranks:
        raise UserError(
            f"--distributed-rank is {rank} and --distributed-world-size {ranks}: ranks count from "
            f"0 to {ranks - 1}."
        )
    if not str(getattr(args, "arch", None)).startswith(PREFIX):  # else it is fairseq's business
        return
    for name in ("dropout", "attention_dropout", "activation_dropout", "relu_dropout",
                 "label_smoothing"):  # fmt: skip
        rate = getattr(args, name, None) or 0
        if not 0 <= rate < 1:
            raise UserError(f"--{name.replace('_', '-')} is {rate}: give a number from 0 below 1.")


def length_penalty(args: argparse.Namespace) -> None:
    """Refuses --lenpen where a translation's length to that power is no number any more."""
    penalty, flag = getattr(args, "lenpen", None), "--lenpen"
    if getattr(args, "eval_bleu", False):
        penalty = json.loads(args.eval_bleu_args).get("lenpen")
        flag = "lenpen in --eval-bleu-args"
    if penalty is not None and not abs(float(penalty)) <= 50:
        raise UserError(
            f"{flag} is {penalty}: give a number from -50 to 50. Scores are divided by the length "
            "to this power, usually 0 to 2."
        )


def precision(args: argparse.Namespace) -> None:
    """Refuses fairseq's flat fp16 optimizer without a GPU: it asks CUDA for its device."""
    import torch

    flat = args.fp16 and not (args.memory_efficient_fp16 or args.fp16_no_flatten_grads)
    if flat and (args.cpu or not torch.cuda.is_available()):
        raise UserError("--fp16 needs a GPU: leave it out, or use --bf16, which a CPU can do too.")


def restore_file(args: argparse.Namespace) -> None:
    """Refuses a checkpoint to begin with that does not exist: fairseq would train from scratch."""
    from fairseq.file_io import PathManager

    for name in ("restore_file", "continue_once"):
        path = getattr(args, name, None)
        # The default is looked for in --save-dir, where a new run has none; those with a suffix
        # are a part each of one checkpoint, and fairseq knows their names.
        is_default = name == "restore_file" and path == "checkpoint_last.pt"
        if not path or is_default or args.checkpoint_suffix or PathManager.exists(path):
            continue
        there = os.path.join(args.save_dir, path)
        hint = f"there is a {there}" if os.path.isfile(there) else "check the path, or leave it out"
        raise UserError(f"--{name.replace('_', '-')} {path} does not exist: {hint}.")


# Of fairseq's translation: what validation measures, and what it does with the flag alone.
_MEASURED = ("loss", "nll_loss", "ppl")
_MEASURED_WITH = {"bleu": "eval_bleu", "accuracy": "report_accuracy"}


def best_metric(args: argparse.Namespace) -> None:
    """Refuses a metric by which checkpoints shall be compared and that is never measured."""
    metric = args.best_checkpoint_metric
    flag = _MEASURED_WITH.get(metric)
    if args.disable_validation or metric in _MEASURED or flag is None:
        return
    if getattr(args, flag, None) is False:
        raise UserError(
            f"--best-checkpoint-metric {metric} is measured with --{flag.replace('_', '-')} alone: "
            f"add that, or name {', '.join(_MEASURED[:-1])} or {_MEASURED[-1]}."
        )


def pack_tokens(args: argparse.Namespace) -> None:
    """Refuses --pack-tokens for a model that computes pads, and where it contradicts batches."""
    if not hasattr(args, "pack_tokens"):
        return
    from fairseq.models import ARCH_MODEL_REGISTRY

    ours = os.path.basename(sys.argv[0]) == "lightseq-train"
    if not ours or not getattr(ARCH_MODEL_REGISTRY.get(args.arch), "packs_tokens", False):
        raise UserError(
            "--pack-tokens needs a model that computes no pads: take --arch ls_transformer or one "
            "of its kin, without --native, or drop it."
        )
    if args.max_tokens is None:
        raise UserError("--pack-tokens fills batches up to --max-tokens: give both, or drop it.")
    if getattr(args, "num_batch_buckets", 0):
        raise UserError(
            "--pack-tokens fills batches by their tokens and --num-batch-buckets by their "
            "sentences: drop one of the two."
        )


def data(command: str, args: argparse.Namespace) -> None:
    """Refuses a data directory without the dictionaries or the splits that the command reads."""
    from fairseq import utils
    from fairseq.data.data_utils import infer_language_pair

    folders = utils.split_paths(args.data)
    for folder in folders:
        if not os.path.isdir(folder):
            raise UserError(
                f"The data directory {folder} does not exist: give the --destdir that "
                f"lightseq-preprocess wrote."
            )
    source, target = args.source_lang, args.target_lang
    if source is None or target is None:
        source, target = infer_language_pair(folders[0])
        if source is None or target is None:
            raise UserError(
                f"{folders[0]} holds no binarised sentence pairs (no file such as "
                f"train.de-en.de.idx): give the --destdir that lightseq-preprocess wrote."
            )
    for language in (source, target):
        if not os.path.isfile(os.path.join(folders[0], f"dict.{language}.txt")):
            raise UserError(
                f"{folders[0]} holds no dict.{language}.txt: give the --destdir that "
                f"lightseq-preprocess wrote, and its languages with -s and -t."
            )
    for folder, split in _splits(command, args, folders):
        if not _has_split(folder, split, source, target):
            raise UserError(
                f"{folder} holds no {split} split for {source}-{target}: binarise one with "
                f"lightseq-preprocess ({_PREFIX_FLAGS.get(split, '--testpref')}), or name the one "
                f"it holds with {_SUBSET_FLAGS[command, split == args.train_subset]}."
            )
        reader = _reader_of_targets(command, args)
        if reader is not None and not _has_split(folder, split, target, source):
            raise UserError(
                f"{folder} holds the {split} split without its {target} side, which {reader} "
                "reads: binarise both sides with lightseq-preprocess."
            )


def _reader_of_targets(command: str, args: argparse.Namespace) -> str | None:
    """What reads target sides; translating as such does not."""
    if command != "generate":
        return f"lightseq-{command}"
    if args.score_reference:
        return "--score-reference"
    return "--prefix-size" if args.prefix_size > 0 else None


_PREFIX_FLAGS = {"train": "--trainpref", "valid": "--validpref", "test": "--testpref"}
_SUBSET_FLAGS = {
    ("train", True): "--train-subset",
    ("train", False): "--valid-subset",
    ("validate", True): "--valid-subset",
    ("validate", False): "--valid-subset",
    ("generate", True): "--gen-subset",
    ("generate", False): "--gen-subset",
}


def _splits(
    command: str, args: argparse.Namespace, folders: Sequence[str]
) -> Iterable[tuple[str, str]]:
    """The (directory, split) pairs that the command will certainly read."""
    if command == "train":
        yield from ((folder, args.train_subset) for folder in folders)
        if args.disable_validation:
            return
    if command in ("train", "validate"):
        yield from ((folders[0], split) for split in args.valid_subset.split(","))
    elif command == "generate":
        yield folders[0], args.gen_subset


def _has_split(folder: str, split: str, source: str, target: str) -> bool:
    """Whether the ``source`` side of ``split`` is there, binarised in either direction or raw."""
    stems = (f"{split}.{source}-{target}.{source}", f"{split}.{target}-{source}.{source}")
    return any(
        os.path.exists(os.path.join(folder, stem + ending))
        for stem in stems
        for ending in ("", ".idx", ".bin")
    )
