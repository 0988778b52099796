"""Checks of the options of the search: values that it cannot use with this model or data."""

from __future__ import annotations

import argparse
import json

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words.argv import flag_of, is_native

# Options of generation -> why a language model cannot use them.
_OF_TRANSLATION = {
    "constraints": "its search has no constraints",
    "print_alignment": "it has no source to align with",
    "replace_unk": "it has no source to copy words from",
}


def of_translation(request: Request) -> None:
    """Raises UserError for an option of translation where a language model generates text."""
    args = request.args
    if not families.has_prompts(args.task):
        return
    for name, reason in _OF_TRANSLATION.items():
        if getattr(args, name, None):
            raise UserError(
                f"{flag_of(name)} cannot be used with a language model, because "
                f"{reason}: remove it."
            )


def constraints(request: Request) -> None:
    """Raises UserError if a test set would be translated with constraints.

    With our model `flags.supported` has refused them.
    """
    if request.args.constraints:
        raise UserError(
            "--constraints reads constraints from lines of text, but a binarised test set contains "
            "none: remove it, or translate with lightseq-interactive."
        )


def unknown_words(request: Request) -> None:
    """Raises UserError if --replace-unk cannot work: the source's subwords are joined before the
    lookup, or its dictionary file is not readable."""
    from lightseq_fairseq.fairseq_compat.generation import NO_FILE

    args = request.args
    path = getattr(args, "replace_unk", None)
    if path is None:
        return
    joining = {"generate": {"--bpe": "bpe", "--tokenizer": "tokenizer"}}
    if is_native():
        joining["interactive"] = {"--remove-bpe": "post_process"}
    for flag, name in joining.get(request.command, {}).items():
        if getattr(args, name, None):
            raise UserError(
                f"--replace-unk cannot be used with {flag}, which joins the subwords of the source "
                f"before they are counted: remove {flag}, and apply it to the translations."
            )
    if path in ("", NO_FILE):
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if len(line.split()) < 2 or "\ufffd" in line:
                raise UserError(
                    f"Line {number} of {path} (the file of --replace-unk) is not a pair of words "
                    "in UTF-8: write a source word and its translation on each line."
                )


def sampling(command: str, args: argparse.Namespace, words: int) -> None:
    """Raises UserError if topk exceeds the dictionary's ``words`` symbols, or topp exceeds 1."""
    topk, topp = "--sampling-topk", "--sampling-topp"
    given = {topk: getattr(args, "sampling_topk", 0), topp: getattr(args, "sampling_topp", 0)}
    if command == "train":
        settings = json.loads(args.eval_bleu_args) if getattr(args, "eval_bleu", False) else {}
        topk, topp = "sampling_topk in --eval-bleu-args", "sampling_topp in --eval-bleu-args"
        given = {topk: settings.get("sampling_topk", 0), topp: settings.get("sampling_topp", 0)}
    if given[topk] > words:
        raise UserError(
            f"{topk} is {given[topk]}, but the target dictionary has {words} words: lower it."
        )
    if given[topp] > 1:
        raise UserError(f"{topp} is {given[topp]}, but it is a probability: use at most 1.")


def length_penalty(request: Request) -> None:
    """Raises UserError if --lenpen is so large that length ** lenpen overflows."""
    args = request.args
    penalty, flag = getattr(args, "lenpen", None), "--lenpen"
    if getattr(args, "eval_bleu", False):
        penalty = json.loads(args.eval_bleu_args).get("lenpen")
        flag = "lenpen in --eval-bleu-args"
    if penalty is not None and not abs(float(penalty)) <= 50:
        raise UserError(
            f"{flag} is {penalty}: use a number from -50 to 50. Scores are divided by the length "
            "to this power; usual values are 0 to 2."
        )
