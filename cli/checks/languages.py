"""Checks of sentence pairs of several languages, for --task translation_multi_simple_epoch.

fairseq reports most of these mistakes by an assertion or a KeyError; with languages in another
order it runs, with the embeddings of other languages.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request, pairs, search
from lightseq_fairseq.cli.checks.checkpoints import initial, saved
from lightseq_fairseq.cli.words import registries, synonyms
from lightseq_fairseq.cli.words.argv import flag_of, is_given, is_native
from lightseq_fairseq.plugins.conditions import pads_targets_left

# What a model was trained with, and a search needs.
_TRAINED = (
    "lang_pairs", "langs", "encoder_langtok", "decoder_langtok", "lang_tok_style",
    "lang_tok_replacing_bos_eos", "langtoks", "langtoks_specs", "fixed_dictionary", "extra_data",
)  # fmt: skip
_MOST_NAMED = 8  # languages in a message


def languages(request: Request) -> None:
    """Raises UserError if the languages, dictionaries or splits of the command do not fit.

    Sets --langs to the languages that the run uses, so that its checkpoint names them. A command
    that uses a model takes its settings of languages from the checkpoint.
    """
    from lightseq_fairseq.checkpoints.languages import languages_of, pairs_of

    command, args = request.command, request.args
    folders = pairs.folders_of(args)
    trained, path = _trained(request)
    if command != "train":
        _take(request, trained or _imported(args, folders[0]), path)
    if args.lang_dict and args.langs:
        raise UserError("--langs and --lang-dict cannot be used together: remove one.")
    found = pairs_of(vars(args))
    if not found:
        raise UserError(
            "--lang-pairs is missing: list the pairs to train, as in --lang-pairs en-de,de-en."
        )
    for pair in found:
        if len(pair.split("-")) != 2 or "" in pair.split("-"):
            raise UserError(
                f"--lang-pairs has {pair!r}, which is not a pair of languages: write pairs as "
                "en-de, with commas between them."
            )
    args.langs, args.lang_dict = languages_of(vars(args)), None
    _direction(command, args, found)
    asked = _asked(command, args, found)
    for pair in asked:
        for language in pair.split("-"):
            _known(language, args.langs)
    (_, dictionary), (file, words) = (_dictionary(args, folders[0], asked, n) for n in (0, 1))
    if command != "train" or not _follows(args):
        _order(args, trained, path, dictionary)
    _splits(request, folders, asked)
    pairs.joiner(request, file)
    search.sampling(command, args, len(words))
    _sampling(command, args, found)
    _repair(request)
    pairs.sentences(request)


def _trained(request: Request) -> tuple[dict[str, Any], str | None]:
    """The settings of the model that the command begins with, and its file; {} if it is not of this
    task."""
    from lightseq_fairseq.checkpoints.languages import TASK
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    args = request.args
    path = initial(args)[1] if request.command == "train" else args.path.partition(os.pathsep)[0]
    settings = settings_of(saved(path), "task")
    named = settings.get("_name") or settings.get("task")
    return (settings if named == TASK else {}), path


def _imported(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The settings of M2M-100, NLLB and mBART50, if lightseq-import has written the folder."""
    names = os.path.join(folder, "languages.txt")
    if not os.path.isfile(names):
        return {}
    pair = f"{args.source_lang}-{args.target_lang}"
    marks = {"encoder_langtok": "src", "decoder_langtok": True}
    with open(os.path.join(folder, "dict.txt"), encoding="utf-8") as file:
        is_mbart = any(line.startswith(f"[{args.target_lang}] ") for line in file)
    style = "mbart" if is_mbart else "multilingual"
    return {"lang_pairs": [pair], "lang_dict": names, "lang_tok_style": style, **marks}


def _take(request: Request, trained: dict[str, Any], path: str | None) -> None:
    """Sets what the command does not set to the values in the checkpoint, and says so."""
    from lightseq_fairseq.checkpoints.languages import languages_of

    args, taken = request.args, []
    flags = {action.dest: action.option_strings for action in request.parser._actions}
    trained = {**trained, "langtoks": _langtoks(trained)}
    if trained.get("lang_pairs") and not (
        trained.get("lang_dict") and not os.path.isfile(trained["lang_dict"])
    ):
        trained = {**trained, "langs": languages_of(trained)}
    for name in _TRAINED:
        given = [*flags.get(name, ()), *(["--lang-dict"] if name == "langs" else [])]
        value = trained.get(name)
        if is_given(request.argv, given) or value in (None, False, getattr(args, name, None)):
            continue
        if name == "fixed_dictionary" and not os.path.isfile(value):
            continue
        setattr(args, name, value)
        if name not in ("langtoks_specs", "lang_pairs"):
            text = _listed(value) if name == "langs" else value
            taken.append(flag_of(name) if value is True else f"{flag_of(name)} {text}")
    if taken and request.command != "validate" and request.note is None:  # there it is a warning
        request.say(f"taken from {path}: {', '.join(taken)}")


def _langtoks(trained: dict[str, Any]) -> dict[str, Any] | None:
    """--langtoks of the training: fairseq adds "main" to it, which two other flags set."""
    found = dict(trained.get("langtoks") or {})
    main = (trained.get("encoder_langtok"), "tgt" if trained.get("decoder_langtok") else None)
    if tuple(found.get("main", ())) == main:
        del found["main"]
    return found or None


def _listed(names: list[str]) -> str:
    if len(names) <= _MOST_NAMED:
        return ",".join(names)
    return f"{','.join(names[:_MOST_NAMED])},... ({len(names)} languages)"


def _direction(command: str, args: argparse.Namespace, found: list[str]) -> None:
    """Raises UserError unless searches, and only they, name a source and a target language."""
    source, target = args.source_lang, args.target_lang
    if command in ("train", "validate") and (source or target):
        flag = "--source-lang" if source else "--target-lang"
        raise UserError(
            f"{flag} is for searches, but lightseq-{command} reads the pairs of --lang-pairs: "
            f"remove it, or set --lang-pairs {source or '...'}-{target or '...'}."
        )
    if command not in ("train", "validate") and not (source and target):
        flag = "--target-lang" if source else "--source-lang"
        raise UserError(
            f"{flag} is missing, and the model knows several languages: set it to one of "
            f"{_listed(args.langs)}."
        )


def _asked(command: str, args: argparse.Namespace, found: list[str]) -> list[str]:
    """The language pairs that the command reads."""
    if command not in ("train", "validate"):
        return [f"{args.source_lang}-{args.target_lang}"]
    return found


def _known(language: str, known: list[str]) -> None:
    if language in known:
        return
    close = synonyms.nearest(language, known, most=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "check its code."
    raise UserError(
        f"There is no language {language} among those of the model ({_listed(known)}): {hint}"
    )


def _dictionary(
    args: argparse.Namespace, folder: str, asked: list[str], side: int
) -> tuple[str, Any]:
    """The dictionary of the source (0) or target (1) languages, without their tokens, and its file.

    Raises:
        UserError: a file is missing, or languages of the side have different dictionaries.
    """
    from fairseq.data import Dictionary

    name, single = ("source", "target")[side], os.path.join(folder, "dict.txt")
    given = args.fixed_dictionary or getattr(args, f"{name}_dict")
    languages = dict.fromkeys(pair.split("-")[side] for pair in asked)
    files = [given] if given else [os.path.join(folder, f"dict.{x}.txt") for x in languages]
    if not given and not os.path.isfile(files[0]) and os.path.isfile(single):
        # Written by lightseq-import, which has one dictionary for all languages.
        args.fixed_dictionary, files = single, [single]
    loaded = []
    for file in files:
        if not os.path.isfile(file):
            raise UserError(
                f"The dictionary {file} does not exist: binarise the pairs of all languages into "
                "this folder, with one dictionary (lightseq-preprocess --srcdict FILE --tgtdict "
                "FILE)."
            )
        loaded.append(Dictionary.load(file))
        if loaded[-1].symbols != loaded[0].symbols:
            raise UserError(
                f"{files[0]} and {file} differ, but all {name} languages share a dictionary: "
                "binarise the pairs again with one (lightseq-preprocess --srcdict FILE --tgtdict "
                "FILE)."
            )
    return files[0], loaded[0]


def _follows(args: argparse.Namespace) -> bool:
    """Whether training moves the rows of the checkpoint to its own words (``word_rows``)."""
    is_new = args.reset_optimizer or initial(args)[0] == "--finetune-from-model"
    return is_new and not is_native() and registries.is_fused(args.arch)


def _order(
    args: argparse.Namespace, trained: dict[str, Any], path: str | None, dictionary: Any
) -> None:
    """Raises UserError if a language has another row than in the checkpoint."""
    from lightseq_fairseq.checkpoints.languages import languages_of, rows

    if not trained or (trained.get("lang_dict") and not os.path.isfile(trained["lang_dict"])):
        return
    then, now = (
        rows(dictionary, settings, languages_of(settings)) for settings in (trained, vars(args))
    )
    for language in now:
        if language in then and now[language] != then[language]:
            order = _listed(languages_of(trained))
            raise UserError(
                f"The language {language} has another row than in {path}, whose languages are "
                f"{order}: set --langs to these, in this order; new languages come last."
            )


def _splits(request: Request, folders: list[str], asked: list[str]) -> None:
    """Raises UserError if a split lacks a pair. Other folders may lack pairs of the first."""
    command, args = request.command, request.args
    if args.dataset_impl == "raw":
        raise UserError(
            f"--task {args.task} reads binarised data alone: remove --dataset-impl raw, and "
            "binarise the text with lightseq-preprocess."
        )
    for folder, split in pairs.splits(command, args, folders[:1]):
        for pair in asked:
            pairs.has_split(request, folder, split, *pair.split("-"))


def _sampling(command: str, args: argparse.Namespace, found: list[str]) -> None:
    """Raises UserError if settings of the sampling cannot be used."""
    if command != "train":
        return
    for name in ("virtual_epoch_size", "virtual_data_size"):
        if (size := getattr(args, name)) is not None and size < 1:
            raise UserError(f"{flag_of(name)} is {size}: set a number of pairs, at least 1.")
    if args.sampling_method == "temperature" and not args.sampling_temperature > 0:
        raise UserError(
            f"--sampling-temperature is {args.sampling_temperature}: set a number above 0; 1 "
            "samples by size, and a larger one favours small pairs."
        )
    if args.sampling_method == "RoundRobin" and args.virtual_epoch_size is not None:
        raise UserError(
            "--sampling-method RoundRobin keeps the batches of the first epoch, which do not fit "
            "the later ones of --virtual-epoch-size: remove one."
        )
    flag, weights = "--sampling-weights", args.sampling_weights
    if args.sampling_weights_from_file:
        flag = f"--sampling-weights-from-file {args.sampling_weights_from_file}"
        try:
            with open(args.sampling_weights_from_file, encoding="utf-8") as file:
                weights = json.load(file)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not JSON"
            raise UserError(f"{flag} cannot be read ({reason}): check the file.") from error
    extra = {kind: each.split(",") for kind, each in (args.extra_lang_pairs or {}).items()}
    for kind, names in {"main": found, **extra}.items():
        for name in names:
            if weights and f"{kind}:{name}" not in weights:
                raise UserError(
                    f"{flag} has no weight of {kind}:{name}: give each pair a weight, as in "
                    f"'{{\"{kind}:{name}\": 0.5}}'."
                )


def _repair(request: Request) -> None:
    """Refuses or removes settings with which fairseq fails."""
    args = request.args
    if args.lang_tok_replacing_bos_eos and pads_targets_left(args):
        raise UserError(
            "--left-pad-target cannot be used with --lang-tok-replacing-bos-eos: remove one."
        )
    if args.enable_lang_ids and not args.user_dir:
        # fairseq would pass the ids to the model, none of which has such an argument.
        args.enable_lang_ids = False
        if request.command in ("train", "validate"):
            return  # which have said so
        request.say("--enable-lang-ids has no effect: models of translation read no language ids.")
