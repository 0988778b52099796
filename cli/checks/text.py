"""Checks of running text, of its blocks and of its masks."""

from __future__ import annotations

import argparse
import glob
import itertools
import os
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request, binarised
from lightseq_fairseq.cli.checks.checkpoints import saved
from lightseq_fairseq.cli.checks.pairs import (
    folders_of,
    other_form,
    prefix_flag,
    splits,
    subset_flag,
)
from lightseq_fairseq.cli.words.argv import flag_of, is_given
from lightseq_fairseq.fairseq_compat.checkpoints import settings_of


def text(request: Request) -> None:
    """Raises UserError if the data are no running text, or its blocks do not fit the model.

    A split is checked with a sample of each file; `inside_fairseq` checks all tokens.
    """
    command, args = request.command, request.args
    words = dictionary(request.args)
    lengths = files(request, words)
    if command == "eval-lm" and not is_given(request.argv, ("--tokens-per-sample",)):
        _take_trained_block(args)
    _blocks(command, args, lengths)
    if command == "train":
        _adaptive(args, len(words))


def masked_text(request: Request) -> None:
    """Raises UserError if the data are no running text, or tokens cannot be masked as asked."""
    args = request.args
    words = dictionary(request.args)
    words.add_symbol("<mask>")
    files(request, words, only_binarised=True)
    _masks(args, words)
    if request.command == "train" and args.mask_whole_words:  # else --bpe may be the checkpoint's
        _whole_words(args)


def dictionary(args: argparse.Namespace) -> Any:
    """The dictionary of running text.

    Raises:
        UserError: the data folder has none.
    """
    from fairseq.data import Dictionary

    folder = folders_of(args)[0]
    path = os.path.join(folder, "dict.txt")
    if os.path.isfile(path):
        return Dictionary.load(path)
    pairs = sorted(os.path.basename(x) for x in glob.glob(f"{glob.escape(folder)}/dict.*"))
    what = f"sentence pairs ({', '.join(pairs)})" if pairs else "no dict.txt"
    if os.path.isfile(os.path.join(folder, "input0", "dict.txt")):
        what = "sentences with labels (input0)"
    reader, otherwise = f"--task {args.task}", ""
    if getattr(args, "path", None):
        model = args.path.partition(os.pathsep)[0]
        trained = settings_of(saved(model), "task")
        if args.task in (trained.get("_name"), trained.get("task")):
            reader = f"{model} is a model of {reader}, which"
            otherwise = "choose another checkpoint, or "
    raise UserError(
        f"{folder} contains {what}, but {reader} reads running text: {otherwise}binarise a text "
        "with lightseq-preprocess --only-source."
    )


def files(
    request: Request, words: Any, languages: Sequence[str] = ("",), only_binarised: bool = False
) -> list[np.ndarray]:
    """Checks the splits that the command reads.

    Args:
        words: the dictionary, with the words that the task adds.
        languages: the folders of the splits in the data folder.
        only_binarised: whether the task ignores --dataset-impl, and reads no text files.

    Returns:
        The lengths of the sentences of each binarised split.
    """
    args, lengths = request.args, []
    implementation = None if only_binarised else args.dataset_impl
    for (data, split), language in itertools.product(
        splits(request.command, args, folders_of(args)), languages
    ):
        folder = os.path.join(data, language) if language else data
        stem = os.path.join(folder, split)
        is_text = not only_binarised and os.path.isfile(stem)
        is_binarised = any(os.path.isfile(stem + ending) for ending in (".idx", ".bin"))
        if not is_text and not is_binarised:
            if os.path.isfile(f"{stem}.None-None") and not only_binarised:  # of --only-source
                raise UserError(
                    f"{stem}.None-None is the {split} split as lightseq-preprocess --dataset-impl "
                    f"raw names it, but --task {args.task} reads {split}: rename the file."
                )
            raise UserError(
                f"{folder} contains no {split} split: binarise one with lightseq-preprocess "
                f"--only-source ({prefix_flag(request, split)}), or choose another split with "
                f"{subset_flag(request, split)}."
            )
        is_there = is_text if implementation == "raw" else is_binarised
        if implementation is not None and not is_there:
            raise other_form(folder, split, args)
        if not is_text or implementation not in (None, "raw"):
            sentences = binarised.find(stem, implementation)
            if sentences is not None:
                binarised.check_words(sentences, len(words), everywhere=False)
                lengths.append(sentences.lengths)
    return lengths


def _masks(args: argparse.Namespace, words: Any) -> None:
    """Raises UserError if tokens cannot be masked as asked."""
    if args.tokens_per_sample < 2:
        raise UserError("--tokens-per-sample must be at least 2: a block begins with <s>.")
    if not 0 < args.mask_prob < 1:
        raise UserError(f"--mask-prob is {args.mask_prob}: it must be above 0 and below 1.")
    shares = args.random_token_prob, args.leave_unmasked_prob
    if min(shares) < 0 or sum(shares) > 1:
        raise UserError(
            f"--random-token-prob is {shares[0]} and --leave-unmasked-prob is {shares[1]}, but "
            "both are shares of the masked tokens: they must be at least 0, and at most 1 together."
        )
    if args.mask_multiple_length < 1 or args.mask_stdev < 0:
        raise UserError("--mask-multiple-length must be at least 1, --mask-stdev at least 0.")
    counts = [n for word, n in zip(words.symbols, words.count, strict=True) if word != "<mask>"]
    if args.freq_weighted_replacement and shares[0] > 0 and not any(counts[words.nspecial :]):
        raise UserError(
            "--freq-weighted-replacement needs the frequencies of words, but all are 0 in "
            "dict.txt: remove the flag, or use the dict.txt that lightseq-preprocess wrote."
        )


def _whole_words(args: argparse.Namespace) -> None:
    """Raises UserError if it is unknown where words begin."""
    from fairseq.data.encoders import BPE_REGISTRY

    if args.bpe is None:
        raise UserError(
            "--mask-whole-words needs --bpe, by which the text was cut into subwords: add it, or "
            "remove --mask-whole-words."
        )
    known = [name for name in BPE_REGISTRY if hasattr(BPE_REGISTRY[name], "is_beginning_of_word")]
    if args.bpe not in known:
        raise UserError(
            f"--mask-whole-words cannot find the beginnings of words of --bpe {args.bpe}: use "
            f"subwords of {', '.join(sorted(known))}, or remove --mask-whole-words."
        )


def _take_trained_block(args: argparse.Namespace) -> None:
    """Sets the tokens of a block as in training, if the model has too few positions for fairseq's
    default. fairseq would leave all whole blocks out."""
    checkpoint = saved(args.path.split(os.pathsep)[0])
    trained = settings_of(checkpoint, "task").get("tokens_per_sample")
    positions = settings_of(checkpoint, "model").get("max_target_positions") or trained
    if trained and args.tokens_per_sample > positions and args.sample_break_mode != "eos":
        args.tokens_per_sample = min(trained, positions)
        click.echo(
            f"lightseq-eval-lm: note: --tokens-per-sample {args.tokens_per_sample}, as in training",
            err=True,
        )


def _blocks(command: str, args: argparse.Namespace, lengths: list[Any]) -> None:
    """Raises UserError if blocks have more tokens than the model has positions.

    lengths: tokens of each sentence, one array per split.
    """
    block = args.tokens_per_sample
    if block < 1:
        raise UserError("--tokens-per-sample must be at least 1.")
    if command == "eval-lm":  # the model is not known yet, see inside_fairseq.eval_lm_dataloader
        if not 0 <= args.context_window < block:
            raise UserError(
                f"--context-window is {args.context_window}, but with --tokens-per-sample {block} "
                f"it must be from 0 to {block - 1}, because at least one token of a block is "
                "scored: change one of the two."
            )
        return
    if command != "train":  # the model's positions are in the checkpoint
        return
    positions = getattr(args, "max_target_positions", None) or block  # some archs lack it
    is_sentence = args.sample_break_mode == "eos"
    if block > positions and not is_sentence:
        raise UserError(
            f"--tokens-per-sample is {block}, but --max-target-positions is {positions}, and a "
            "block needs a position for each token: lower the first, or raise the second."
        )
    if not (args.add_bos_token and getattr(args, "decoder_learned_pos", False)):
        return
    is_full = any((of_split == positions).any() for of_split in lengths)
    if is_full if is_sentence else block == positions:
        raise UserError(
            f"--add-bos-token adds a token to a block of {positions} tokens, but the model has "
            f"only {positions} learned positions: set --max-target-positions {positions + 1}."
        )


def _adaptive(args: argparse.Namespace, words: int) -> None:
    """Raises UserError if settings of adaptive inputs and softmax contradict each other."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.transformer_lm import (
        TransformerLanguageModel,
        TransformerLanguageModelConfig,
    )

    if not issubclass(ARCH_MODEL_REGISTRY[args.arch], TransformerLanguageModel):
        return  # an arch without them, or with other rules
    # If an arch's configuration is a dataclass, its defaults are set only after these checks.
    given = TransformerLanguageModelConfig(), args
    chosen = {name: value for each in given for name, value in vars(each).items()}
    if chosen["adaptive_input"] and not chosen["adaptive_input_cutoff"]:
        raise UserError(
            "--adaptive-input needs --adaptive-input-cutoff: set it to the ends of the bands of "
            "words, as in 20000,60000."
        )
    for name in ("adaptive_input_cutoff", "adaptive_softmax_cutoff"):
        flag, text = flag_of(name), chosen[name]
        is_read = chosen["adaptive_input"] or name == "adaptive_softmax_cutoff"
        if not text or not is_read:
            continue
        try:
            ends = [int(end) for end in str(text).split(",")]
        except ValueError as error:
            raise UserError(
                f"{flag} {text} is not a list of whole numbers: set it to the ends of the bands "
                "of words, as in 20000,60000."
            ) from error
        if ends[0] < 1 or any(a >= b for a, b in itertools.pairwise(ends)):
            raise UserError(
                f"{flag} is {text}, but each number must be larger than the one before, and the "
                "first at least 1: set it to the ends of the bands of words, as in 20000,60000."
            )
        if ends[-1] > words:
            raise UserError(
                f"{flag} ends at {ends[-1]}, but the dictionary has only {words} words: lower it."
            )
    if not chosen["tie_adaptive_weights"]:
        return
    if not chosen["adaptive_input"]:
        raise UserError(
            "--tie-adaptive-weights ties adaptive softmax to adaptive inputs, but the model has "
            "none: add --adaptive-input, or remove it."
        )
    for one, other in (
        ("adaptive_input_factor", "adaptive_softmax_factor"),
        ("adaptive_input_cutoff", "adaptive_softmax_cutoff"),
        ("decoder_input_dim", "decoder_output_dim"),
    ):
        values = [chosen[name] for name in (one, other)]
        if values[0] != values[1]:
            flags = [flag_of(name) for name in (one, other)]
            raise UserError(
                f"--tie-adaptive-weights needs equal sizes, but {flags[0]} is {values[0]} and "
                f"{flags[1]} is {values[1]}: set both to the same value."
            )
