"""Checks of sentence pairs in the data folder: files that are missing, damaged or do not match."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from lightseq_fairseq.base import families, utf8
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request, search, values
from lightseq_fairseq.cli.checks.checkpoints import initial, saved
from lightseq_fairseq.cli.words.argv import is_native
from lightseq_fairseq.cli.words.registries import data_of


def folders_of(args: argparse.Namespace) -> list[str]:
    """The data folders of a run; fairseq reads one of them per epoch.

    Raises:
        UserError: one of them is not a folder.
    """
    from fairseq import utils

    folders: list[str] = utils.split_paths(args.data)
    for folder in folders:
        if not os.path.isdir(folder):
            wrong = "is not a folder" if os.path.exists(folder) else "does not exist"
            raise UserError(
                f"The data folder {folder} {wrong}: use the folder that lightseq-preprocess wrote "
                "(its --destdir)."
            )
    return folders


def _trained(args: argparse.Namespace, folder: str) -> tuple[str | None, str | None]:
    """The pair of the model of --path, if the folder has its dictionaries."""
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    path = getattr(args, "path", None)
    settings = settings_of(saved(path.partition(os.pathsep)[0] if path else None), "task")
    pair = settings.get("source_lang") or "source", settings.get("target_lang") or "target"
    files = [os.path.join(folder, f"dict.{language}.txt") for language in pair]
    is_there = all(map(os.path.isfile, files))
    return pair if is_there else (args.source_lang, args.target_lang)


def _same_direction(
    command: str, args: argparse.Namespace, folder: str, pair: tuple[str, str]
) -> None:
    """Raises UserError if a run resumes with other languages, or a model translates the other way
    than the data, whose languages the command does not name."""
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    if is_native():  # fairseq translates
        return
    if command == "train":
        flag, path = initial(args)
        if flag != "--save-dir":
            return
    else:
        path = args.path.partition(os.pathsep)[0] if args.path else None
    settings = settings_of(saved(path), "task")
    trained = settings.get("source_lang"), settings.get("target_lang")
    if None in trained or trained == pair:
        return
    names = [f"{a} to {b}" for a, b in (trained, pair)]
    if command == "train":
        raise UserError(
            f"{path} is of a run that translates {names[0]}, but {folder} has {names[1]}: use "
            "another --save-dir."
        )
    if trained == pair[::-1]:
        raise UserError(
            f"{path} translates {names[0]}, but {folder} has {names[1]}: use other data, or name "
            f"the languages by --source-lang {trained[0]} --target-lang {trained[1]}."
        )


def pairs(request: Request) -> None:
    """Raises UserError if the data folder lacks a dictionary or split that the command reads."""
    from fairseq.data.data_utils import infer_language_pair
    from fairseq.tasks.translation import TranslationTask

    command, args = request.command, request.args
    folders = folders_of(args)
    source, target = args.source_lang, args.target_lang
    if source is None or target is None:
        source, target = infer_language_pair(folders[0])
        if source is not None and target is not None:
            _same_direction(command, args, folders[0], (source, target))
        else:
            source, target = args.source_lang, args.target_lang = _trained(args, folders[0])
        if source is None or target is None:
            _no_running_text(args, folders[0])
            if os.path.isdir(os.path.join(folders[0], "input0")):
                raise UserError(
                    f"{folders[0]} contains sentences with labels, but --task {args.task} reads "
                    "sentence pairs: use other data, or the checkpoint of a classifier."
                )
            raise UserError(
                f"{folders[0]} contains no binarised sentence pairs (no file such as "
                f"train.de-en.de.idx): use the folder that lightseq-preprocess wrote (its "
                f"--destdir)."
            )
    for language in (source, target):
        if not os.path.isfile(os.path.join(folders[0], f"dict.{language}.txt")):
            _no_running_text(args, folders[0])
            raise UserError(
                f"{folders[0]} contains no dict.{language}.txt: use the folder that "
                "lightseq-preprocess wrote (its --destdir), and its languages with --source-lang "
                "and --target-lang."
            )
    _tokens_of_languages(args, source, target)
    for folder, split in splits(command, args, folders):
        has_split(request, folder, split, source, target)
    dictionary = os.path.join(folders[0], f"dict.{target}.txt")
    joiner(request, dictionary)
    search.sampling(command, args, len(TranslationTask.load_dictionary(dictionary)))
    sentences(request)


def _no_running_text(args: argparse.Namespace, folder: str) -> None:
    if os.path.isfile(os.path.join(folder, "dict.txt")):
        raise UserError(
            f"{folder} contains running text, but --task {args.task} reads sentence pairs: use "
            "--task language_modeling, or another folder."
        )


def has_split(request: Request, folder: str, split: str, source: str, target: str) -> None:
    """Raises UserError if a split of a language pair is missing, or a side that is read."""
    command, args = request.command, request.args
    if not _has_split(folder, split, source, target, _endings(command, args)):
        if _has_split(folder, split, source, target):
            raise other_form(folder, split, args)
        raise UserError(
            f"{folder} contains no split named {split} for {source}-{target}: binarise it with "
            f"lightseq-preprocess ({prefix_flag(request, split)}), or choose another split with "
            f"{subset_flag(request, split)}."
        )
    reader = _reader_of_targets(command, args)
    if reader is not None and not _has_split(folder, split, target, source):
        raise UserError(
            f"{folder} contains the split {split} without its {target} side, which {reader} "
            "reads: binarise both languages with lightseq-preprocess."
        )


def _tokens_of_languages(args: argparse.Namespace, *languages: str) -> None:
    """Raises UserError if --langs, which mBART's task needs, lacks a language of the command."""
    known = families.tasks().get(args.task)
    if known is None or not any("{langs}" in symbol for symbol in known.symbols):
        return
    listed = (args.langs or "").split(",")
    lacking = [language for language in languages if language not in listed]
    if lacking:
        raise UserError(
            f"--langs must list all languages of the pre-training, in its order: {lacking[0]} is "
            "not among them. Set it as for the checkpoint, or give the files the names of its "
            "languages, such as train.en_XX-ro_RO.ro_RO.idx."
        )


def sentences(request: Request) -> None:
    """Raises UserError if a split's files are truncated, or do not match each other or a
    dictionary.

    A task may add symbols to its dictionaries when it is set up. So only fairseq's translation task
    is checked against the dictionaries here, with a sample of each file. `inside_fairseq` checks
    all tokens when fairseq reads a file, and fairseq reads each further folder in a later epoch.
    """
    from fairseq import utils
    from fairseq.tasks import TASK_REGISTRY
    from fairseq.tasks.translation import TranslationTask

    from lightseq_fairseq.cli.checks import binarised  # imports numpy, which --help does not need

    command, args = request.command, request.args
    folders = utils.split_paths(getattr(args, "data", None) or "")
    found = list(splits(command, args, folders))
    languages = _pairs(args, folders[0]) if found else []
    words = {}
    if TASK_REGISTRY[args.task] is TranslationTask:
        for language in itertools.chain(*languages):
            path = os.path.join(folders[0], f"dict.{language}.txt")
            words[language] = len(TranslationTask.load_dictionary(path))
    for (folder, split), pair in itertools.product(found, languages):
        for stem in _parts(command, args, os.path.join(folder, split), *pair):
            counts = {}
            for language in pair:
                path, side = stem + language, None
                if args.dataset_impl in (None, "raw") and os.path.isfile(path):
                    counts[path] = _lines(path)
                elif (side := binarised.find(path, args.dataset_impl)) is not None:
                    counts[path] = len(side.lengths)
                if side is not None and language in words:
                    binarised.check_words(side, words[language], everywhere=False)
            if len(set(counts.values())) > 1:
                (one, its), (other, others) = counts.items()
                raise UserError(
                    f"{one} has {its} sentences, but {other} has {others}: binarise both again "
                    "with lightseq-preprocess, from text files with equal numbers of lines. "
                    "(For fairseq-preprocess a carriage return within a line ends it, too; for "
                    "lightseq-preprocess it is a space.)"
                )


# --remove-bpe -> pattern of the marked words in a dictionary made for that kind of subwords
_JOINERS = {
    "@@": r".+@@", "sentencepiece": "\u2581.*", "wordpiece": "_.+", "_EOW": ".+_EOW",
    "letter": r"\|",  # marks the end of a word; all other symbols are letters
}  # fmt: skip
_SHARE_JOINED = 0.01  # share of the words; fewer matches may occur in any text


def joiner(request: Request, path: str) -> None:
    """Checks the way in which the command joins subwords.

    path: the target dictionary. A note says that BLEU counts subwords.

    Raises:
        UserError: it does not match the dictionary.
    """
    command, args = request.command, request.args
    flag, asked = values.joiner(command, args)
    asked = {"@@ ": "@@", "subword_nmt": "@@"}.get(asked or "", asked)
    scores = command == "generate" or (command == "train" and getattr(args, "eval_bleu", False))
    if asked not in _JOINERS and (asked or not scores or getattr(args, "bpe", None)):
        return
    with open(path, encoding="utf-8") as file:
        words = [line.partition(" ")[0] for line in file]
    counts = {
        kind: sum(re.fullmatch(form, word) is not None for word in words)
        for kind, form in _JOINERS.items()
    }
    shown = max(counts, key=lambda kind: counts[kind])
    instead = f"{flag} without a value" if shown == "@@" else f"{flag} {shown}"
    if asked is None:
        if counts[shown] > _SHARE_JOINED * len(words) and shown in ("@@", "sentencepiece"):
            request.say(
                f"BLEU counts subwords, not words, because {counts[shown]} of the {len(words)} "
                f"words in {path} are subwords (as with {shown}): for BLEU of words, use {instead}."
            )
        return
    if asked == "letter" and counts[asked] == 0:
        raise UserError(
            f"{flag} letter would join all words of a sentence, because {path} has no | to mark "
            f"the end of a word: set {flag} to the subwords of that dictionary, or remove it."
        )
    if counts[asked] == 0 and counts[shown] > _SHARE_JOINED * len(words):
        raise UserError(
            f"{flag} is {asked}, but no word in {path} is marked in that way, while "
            f"{counts[shown]} of its {len(words)} words are marked as with {shown}: use {instead}."
        )


def _pairs(args: argparse.Namespace, folder: str) -> list[tuple[str, str]]:
    """The language pairs that the command reads."""
    from fairseq.data.data_utils import infer_language_pair

    source, target = getattr(args, "source_lang", None), getattr(args, "target_lang", None)
    if source is not None and target is not None:
        return [(source, target)]
    if hasattr(args, "lang_pairs"):
        named = args.lang_pairs or []
        several = named.split(",") if isinstance(named, str) else named
        divided = [pair.split("-") for pair in several]
        return [(pair[0], pair[1]) for pair in divided if len(pair) == 2]
    if hasattr(args, "source_lang") and os.path.isdir(folder):
        source, target = infer_language_pair(folder)
    return [] if source is None or target is None else [(source, target)]


def name_languages(args: argparse.Namespace) -> None:
    """Sets the languages of a run that reads one pair, so that its checkpoints name them."""
    if data_of(args.task) == "sentence pairs" and hasattr(args, "source_lang"):
        found = _pairs(args, folders_of(args)[0])
        if len(found) == 1:
            args.source_lang, args.target_lang = found[0]


def target_language(args: argparse.Namespace) -> str | None:
    """The target language of the command; None if there is none, or several."""
    from fairseq import utils

    folders = utils.split_paths(getattr(args, "data", None) or "")
    targets = {target for _, target in _pairs(args, folders[0])} if folders else set()
    return targets.pop() if len(targets) == 1 else None


def sentences_of(args: argparse.Namespace) -> int | None:
    """The number of sentences of --gen-subset; None if it is no binarised file of pairs."""
    from fairseq import utils

    from lightseq_fairseq.cli.checks import binarised

    if data_of(args.task) != "sentence pairs":
        return None
    path = os.path.join(utils.split_paths(args.data)[0], args.gen_subset)
    for source, target in _pairs(args, os.path.dirname(path)):
        for stem in _parts("generate", args, path, source, target):
            found = binarised.find(stem + source, args.dataset_impl)
            return None if found is None else len(found.lengths)
    return None


def _parts(
    command: str, args: argparse.Namespace, path: str, source: str, target: str
) -> Iterator[str]:
    """Paths of a split's files without the language; fairseq reads train, train1, ... as one."""
    training = command == "train" and os.path.basename(path) == args.train_subset
    endings = _endings(command, args)
    for number in itertools.count():
        name = f"{path}{number or ''}"
        for stem in (f"{name}.{source}-{target}.", f"{name}.{target}-{source}."):
            if any(os.path.isfile(stem + source + ending) for ending in endings):
                yield stem
                break
        else:
            return
        if not training and not getattr(args, "combine_valid_subsets", False):
            return


_TEXT, _BINARISED = ("",), (".idx", ".bin")


def _endings(command: str, args: argparse.Namespace) -> tuple[str, ...]:
    """Endings of the source files that fairseq's translation looks for."""
    if command == "validate" and args.dataset_impl is None:  # the checkpoint may set it
        return _TEXT + _BINARISED
    return _TEXT if args.dataset_impl == "raw" else _BINARISED


def other_form(folder: str, split: str, args: argparse.Namespace) -> UserError:
    """The error for a split in one form, text or binarised, if the command reads the other form."""
    if args.dataset_impl == "raw":
        return UserError(
            f"{folder} contains the split {split} in binarised form, but --dataset-impl raw reads "
            "plain text: remove that flag."
        )
    return UserError(
        f"{folder} contains the split {split} as plain text, which only --dataset-impl raw reads: "
        "set that flag, or binarise the text with lightseq-preprocess."
    )


def _lines(path: str) -> int:
    with open(path, "rb") as file:
        count = sum(1 for _ in utf8.lines(file, path))
    if count == 0:
        raise UserError(
            f"{path} is empty: write the sentences of the split to it, or choose another split."
        )
    return count


def _reader_of_targets(command: str, args: argparse.Namespace) -> str | None:
    """The command or flag that reads the target side, or None if only sources are translated."""
    if command != "generate":
        return f"lightseq-{command}"
    if args.score_reference:
        return "--score-reference"
    return "--prefix-size" if args.prefix_size > 0 else None


def prefix_flag(request: Request, split: str) -> str:
    """lightseq-preprocess's flag for the text of a split."""
    other = "valid" if request.command in ("train", "validate") else "test"
    if request.command == "train" and split == request.args.train_subset:
        other = "train"
    kind = next((kind for kind in ("train", "valid") if split.startswith(kind)), other)
    return f"--{kind}pref"


def subset_flag(request: Request, split: str) -> str:
    """The flag that names a split."""
    if request.command in ("generate", "eval-lm"):
        return "--gen-subset"
    is_trained = request.command == "train" and split == request.args.train_subset
    return "--train-subset" if is_trained else "--valid-subset"


def splits(
    command: str, args: argparse.Namespace, folders: Sequence[str]
) -> Iterable[tuple[str, str]]:
    """The (folder, split) pairs that the command always reads."""
    if command == "train":
        yield from ((folder, args.train_subset) for folder in folders)
        if args.disable_validation:
            return
    if command in ("train", "validate"):
        yield from ((folders[0], split) for split in args.valid_subset.split(","))
    elif command in ("generate", "eval-lm"):
        yield folders[0], args.gen_subset


def _has_split(
    folder: str, split: str, source: str, target: str,
    endings: tuple[str, ...] = _TEXT + _BINARISED,
) -> bool:  # fmt: skip
    """Whether the ``source`` side of ``split`` exists, in either direction."""
    stems = (f"{split}.{source}-{target}.{source}", f"{split}.{target}-{source}.{source}")
    return any(
        os.path.exists(os.path.join(folder, stem + ending)) for stem in stems for ending in endings
    )
