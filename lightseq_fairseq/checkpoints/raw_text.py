"""Data folders of raw text: lightseq-preprocess with a tokenizer."""

from __future__ import annotations

import functools
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from lightseq_fairseq.base import files, tokenizer
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.tokenizer import Tokenizer
from lightseq_fairseq.checkpoints import matching, vocabulary
from lightseq_fairseq.checkpoints.correspondence import Counterpart


@contextmanager
def data_folder(given: list[Path], args: Namespace) -> Iterator[Callable[..., Any]]:
    """Yields a wrapper of fairseq's _make_binary_dataset that splits text by the tokenizer.

    Sets the dictionaries in ``args``. At the end, --destdir gets the files of the tokenizer.

    Args:
        given: a folder, a file, or the files of source and target.
        args: of fairseq-preprocess.

    Raises:
        UserError: the tokenizer cannot be read, does not know a language, or differs from that of
            --destdir; or a flag does not fit raw text.
    """
    copies = _copies(given)
    kept = Path(args.destdir) / tokenizer.FOLDER
    if kept.is_dir() and {p.name: p.read_bytes() for p in kept.iterdir()} != {
        name: path.read_bytes() for name, path in copies.items()
    }:
        raise UserError(
            f"{args.destdir} has data of another tokenizer ({kept}): use that one, or another "
            "--destdir."
        )
    for flag, value in (("--alignfile", args.alignfile), ("--align-suffix", args.align_suffix)):
        if value:
            raise UserError(
                f"{flag} counts the words of files that are split already: remove it, or split the "
                "files first and remove the tokenizer."
            )
    if args.dataset_impl == "raw":
        raise UserError(
            "--dataset-impl raw copies text without splitting it: remove it, or the tokenizer."
        )
    sides = ("source",) if args.only_source else tuple(tokenizer.SIDES)
    known = {side: _of(given, side) for side in sides}
    with tempfile.TemporaryDirectory() as place:
        _set_dictionaries(given, known, args, Path(place))
        yield functools.partial(_binarise, known)
    if not kept.is_dir() and Path(args.destdir).is_dir():
        with files.placed(kept) as new:
            new.mkdir()
            for name, path in copies.items():
                shutil.copyfile(path, new / name)


def _copies(given: list[Path]) -> dict[str, Path]:
    """The files that a data folder keeps, by their names there."""
    for path in given:
        if not path.exists():
            raise UserError(f"The tokenizer {path} does not exist: check its path.")
    if given[0].is_dir():
        return {path.name: path for path in vocabulary.files_of(given[0])}
    if len(given) > 1:
        return dict(zip(tokenizer.SIDES.values(), given))
    return {("tokenizer.json" if given[0].suffix == ".json" else tokenizer.SINGLE): given[0]}


def _of(given: list[Path], side: str) -> Tokenizer:
    if given[0].is_dir():
        return tokenizer.of_folder(given[0], side)
    return Tokenizer(given[-1 if side == "target" else 0])


def _set_dictionaries(
    given: list[Path], known: dict[str, Tokenizer], args: Namespace, place: Path
) -> None:
    """Sets --srcdict and --tgtdict to files in ``place``, unless the user has set them."""
    for side, flag in zip(known, ("srcdict", "tgtdict")):
        if args.joined_dictionary and (args.srcdict or args.tgtdict):
            break
        if getattr(args, flag) is None:
            language = None if args.only_source else getattr(args, f"{side}_lang")
            dictionary = _dictionary(given[0], side, language, known[side])
            dictionary.save(str(place / f"dict.{side}.txt"))
            setattr(args, flag, str(place / f"dict.{side}.txt"))


def _dictionary(path: Path, side: str, language: str | None, known: Tokenizer) -> Dictionary:
    """The dictionary of a side: of an import, of a folder of a model, or of the tokenizer alone."""
    made = (path / f"dict.{language}.txt", path / "dict.txt")
    languages: list[str] = []
    if found := next((file for file in made if file.is_file()), None):
        dictionary = Dictionary.load(str(found))
        if (path / "languages.txt").is_file():
            languages = (path / "languages.txt").read_text(encoding="utf-8").split()
    elif (record := _record(path)) is not None:
        whole = vocabulary.of_folder(path, record, side if side in record.sides else "source")
        dictionary, languages = whole.dictionary(), whole.languages
    else:
        dictionary = Dictionary()
        for word in known.words():
            if word not in dictionary:
                dictionary.add_symbol(word)
    if language is not None and languages and language not in languages:
        raise UserError(
            f"{path} does not know the language {language}: name the files after one of its "
            f"languages, such as {languages[0]}, or add the language with lightseq-import "
            f"--add-languages {language}={languages[0]}."
        )
    return dictionary


def _record(path: Path) -> Counterpart | None:
    """The record of the model in a folder; None if there is none, only a tokenizer."""
    if not (path / "config.json").is_file():
        return None
    config = vocabulary.read_json(path / "config.json")
    with suppress(UserError):
        return matching.of_config(config)
    return None


class _RawText(Dictionary):
    """A dictionary that splits lines by a tokenizer before it looks words up."""

    def __init__(self, words: Dictionary, split: Callable[[str], str]) -> None:
        self.__dict__.update(words.__dict__)
        self._split = split

    def encode_line(self, line: str, *args: Any, **more: Any) -> Any:
        """The rows of a line of raw text, as a tensor of int32."""
        return super().encode_line(self._split(line), *args, **more)


def _binarise(
    known: dict[str, Tokenizer], original: Callable[..., Any], vocab: Dictionary, input_prefix: str,
    output_prefix: str, lang: str | None, num_workers: int, args: Namespace,
) -> None:  # fmt: skip
    side = "source" if args.only_source or lang == args.source_lang else "target"
    # Tasks of text without targets add the first token themselves.
    is_source = side == "source" and not args.only_source
    words = _RawText(vocab, known[side].source if is_source else known[side].encode)
    original(words, input_prefix, output_prefix, lang, num_workers, args)
