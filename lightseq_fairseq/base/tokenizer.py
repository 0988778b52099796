"""Tokenizers of raw text, from the files of Hugging Face `transformers` or of sentencepiece.

A data folder has them in its folder `FOLDER`, so that a run and its checkpoint know the tokenizer.
Words are those of fairseq's dictionary: a piece that no line of dict.txt can contain is named after
its id, as `checkpoints.vocabulary` does. No word is special: tasks add </s> and languages. Only the
<s> with which BART's tokenizer begins a text is added to sources of pairs, see `Tokenizer.source`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lightseq_fairseq.base.errors import UserError

FOLDER = "tokenizer"
SINGLE = "sentencepiece.model"  # the names that lightseq-preprocess gives to single files
SIDES = {"source": "source.spm", "target": "target.spm"}  # Marian's names, too
JSON = "tokenizer.json"
UNNAMED = "madeupword{:04d}"
BOS = "<s>"
# Languages as fairseq writes them, and special words; a model may put them into a translation.
_NO_TEXT = r"__[a-z]{2,3}(_[A-Z][a-z]{3})?__|\[[a-z]{2}_[A-Z]{2}\]|<s>|</s>|<pad>|<mask>"


class Tokenizer(NamedTuple):
    """The tokenizer in a file; a process reads the file when it first needs it."""

    path: Path

    def encode(self, text: str) -> str:
        """The words of a text, joined by spaces."""
        pieces = _opened(self.path).encode(text.strip())
        return " ".join(name(piece, number) for piece, number in pieces)

    def source(self, text: str) -> str:
        """`encode`, with the <s> with which some tokenizers begin a text."""
        first = [BOS] * (_opened(self.path).first() == BOS)
        return " ".join([*first, *self.encode(text).split()])

    def decode(self, words: str) -> str:
        """The text of words, which are joined by spaces; without languages and special words."""
        opened, pieces = _opened(self.path), []
        for word in words.split():
            number = re.fullmatch(r"madeupword(\d{4,})", word)
            piece = opened.piece(int(number[1])) if number else word
            if piece and not re.fullmatch(_NO_TEXT, piece):
                pieces.append(piece)
        return opened.decode(pieces)

    def used(self, texts: Iterable[list[str]]) -> set[int]:
        """The ids of a tokenizer.json in texts, which come in batches."""
        opened = _opened(self.path)
        assert isinstance(opened, _HuggingFace)
        return {number for batch in texts for each in opened.ids(batch) for number in each}

    def words(self) -> list[str]:
        """All words, in the order of their ids."""
        return [name(*each) for each in _opened(self.path).all()]


def name(piece: str, number: int) -> str:
    """fairseq's word for a piece of a tokenizer and its id."""
    return piece if piece.split() == [piece] else UNNAMED.format(number)


def is_unnamed(word: str) -> bool:
    """Whether a word of a dictionary is a row of no piece, or of one without a name."""
    return re.fullmatch(r"madeupword\d{4,}", word) is not None


def of_folder(folder: Path, side: str) -> Tokenizer:
    """The tokenizer of a side, "source" or "target", in a folder.

    Raises:
        UserError: there is none.
    """
    for file in (JSON, SIDES[side]):
        if (folder / file).is_file():
            return Tokenizer(folder / file)
    models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        raise UserError(
            f"{folder} has no tokenizer that can be read ({JSON}, {' and '.join(SIDES.values())}, "
            "or one sentencepiece file *.model): save it there "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)), or choose its file."
        )
    return Tokenizer(models[0])


def kept(data: Path) -> Path | None:
    """The folder in which lightseq-preprocess has put the tokenizer of a data folder, or None.

    The sentences of classes are in input0.
    """
    places = (data / FOLDER, data / "input0" / FOLDER)
    return next((place for place in places if place.is_dir()), None)


def in_data(data: Path) -> Path | None:
    """The folder with the tokenizer of a data folder or of the folder of an import, or None."""
    names = [JSON, *SIDES.values()]
    if (data / "config.json").is_file():  # of an import
        names += [path.name for path in data.glob("*.model")]
    return data if any((data / name).is_file() for name in names) else kept(data)


class _HuggingFace:
    """A tokenizer.json."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise _missing(path, "tokenizers") from error
        self._backend: Any = Backend.from_file(str(path))
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "</s>" in a text is text

    def encode(self, text: str) -> list[tuple[str, int]]:
        found = self._backend.encode(text, add_special_tokens=False)
        return list(zip(found.tokens, found.ids))

    def first(self) -> str | None:
        """The word that it adds before a text."""
        added = self._backend.encode("").tokens
        return added[0] if added else None

    def ids(self, texts: list[str]) -> Iterator[list[int]]:
        return (each.ids for each in self._backend.encode_batch(texts, add_special_tokens=False))

    def decode(self, pieces: list[str]) -> str:
        decoder = self._backend.decoder
        return str(" ".join(pieces) if decoder is None else decoder.decode(pieces)).strip()

    def piece(self, number: int) -> str | None:
        return self._backend.id_to_token(number)

    def all(self) -> list[tuple[str, int]]:
        return sorted(self._backend.get_vocab().items(), key=lambda each: each[1])


class _SentencePiece:
    """A model of sentencepiece."""

    def __init__(self, path: Path) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise _missing(path, "sentencepiece") from error
        self._backend: Any = SentencePieceProcessor(model_file=str(path))

    def encode(self, text: str) -> list[tuple[str, int]]:
        pieces = self._backend.encode(text, out_type=str)
        return list(zip(pieces, self._backend.piece_to_id(pieces)))

    def first(self) -> str | None:
        return None

    def decode(self, pieces: list[str]) -> str:
        return str(self._backend.decode(pieces)).strip()

    def piece(self, number: int) -> str | None:
        known = number < self._backend.get_piece_size()
        return self._backend.id_to_piece(number) if known else None

    def all(self) -> list[tuple[str, int]]:
        return [(self._backend.id_to_piece(n), n) for n in range(self._backend.get_piece_size())]


def _missing(path: Path, package: str) -> UserError:
    return UserError(f"{path} needs a package that is not installed: run pip install {package}.")


@functools.lru_cache(maxsize=4)
def _opened(path: Path) -> _HuggingFace | _SentencePiece:
    kind = _HuggingFace if path.suffix == ".json" else _SentencePiece
    try:
        return kind(path)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of any type, from both libraries
        raise UserError(
            f"{path} is no tokenizer that can be read: copy the file again, or choose another."
        ) from error
