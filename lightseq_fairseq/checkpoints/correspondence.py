"""What a record of `counterparts` says: which settings and parameters of fairseq belong to which of
Hugging Face `transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightseq_fairseq.base.families import Family
from lightseq_fairseq.layers import sinusoidal_positions

Names = tuple[tuple[str, str], ...]


def _same(value: Any) -> Any:
    return value


def _fairseqs_sinusoids(count: int, width: int) -> Tensor:
    return sinusoidal_positions(count, width, padding_idx=1)


class Field(NamedTuple):
    """A setting of fairseq and the field of config.json that decides it.

    Attributes:
        setting, name: of fairseq, and in config.json.
        default: the value in `transformers` if config.json lacks the field, or a function of it.
        read, write: from the field's value to the setting's, and back.
    """

    setting: str
    name: str
    default: Any
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same


class Fixed(NamedTuple):
    """A field of config.json that must have one value, because fairseq has no other.

    Attributes:
        default: the value in `transformers` if config.json lacks the field.
    """

    name: str
    value: Any
    default: Any


class Counterpart(NamedTuple):
    """A kind of models in both worlds.

    Attributes:
        types: model_type in config.json -> the first part of the names of its classes.
        classes: the last parts of those that can be read; the first one is written.
        classifier: that of a model with a classification head; empty if there is none.
        families: of fairseq's models that can be one of these.
        arch, task: of fairseq, in an imported checkpoint.
        fields: the settings that config.json decides.
        settings: those that all these models have in fairseq.
        fixed: the fields that all these models have in `transformers`.
        names: prefixes of the names of parameters, fairseq's and Hugging Face's. "*" is a number.
        base: what names in files of the class without a head lack.
        tied: fairseq's names of one table. A file may have any of them.
        tables: fairseq's names of parameters with a row for each word -> the side of the words.
        optional: prefix of fairseq's parameters that a file may lack; they are zero then.
        ignored: Hugging Face's parameters that the function does not read.
        fused: part of Hugging Face's names of q, k and v as one matrix; `names` has only the q.
        transposed: Hugging Face's matrices that are stored as [inputs, outputs].
        first_position: rows of fairseq's learned positions that Hugging Face's table lacks.
        types_table: Hugging Face's embedding of token types, whose row 0 is added to each token.
        sinusoids: Hugging Face's tables of sinusoidal positions, which fairseq does not save.
        table_of_positions: rows of these tables in front of position 0, and the function of the
            numbers of rows and columns that returns them.
        logits_bias: Hugging Face's bias of the logits, which is zero in fairseq.
        own_bias: fairseq's name of it, in models that have one. It keeps rows that Hugging Face
            lacks from taking a share of the probability.
        first_words: fields of config.json if there is no other config.json to begin with.
        languages: pattern of words that name a language, and how fairseq writes a language.
        flags: of lightseq-train for sentence pairs of its languages.
        spare: a word that no text has, for rows that fairseq has in addition.
        sides: side of the words -> config.json's field of their number, and the file with the words
            if the folder has no tokenizer.json.
    """

    types: dict[str, str]
    classes: tuple[str, ...]
    families: tuple[Family, ...]
    arch: str
    task: str
    fields: tuple[Field, ...]
    settings: dict[str, Any]
    fixed: tuple[Fixed, ...]
    names: Names
    base: str
    tied: tuple[str, ...]
    tables: dict[str, str]
    classifier: str = ""
    optional: str = ""
    ignored: str = ""
    fused: str = ""
    transposed: str = ""
    first_position: int = 0
    types_table: str = ""
    sinusoids: tuple[str, ...] = ()
    table_of_positions: tuple[int, Callable[[int, int], Tensor]] = (2, _fairseqs_sinusoids)
    logits_bias: str = ""
    own_bias: str = ""
    first_words: dict[str, Any] = {}
    languages: tuple[str, str] | None = None
    flags: str = ""
    spare: str = ""
    sides: dict[str, tuple[str, str]] = {"source": ("vocab_size", "vocab.json")}

    def theirs(self, name: str) -> str | None:
        """Hugging Face's name of fairseq's parameter."""
        return _renamed(name, self.names)

    def ours(self, name: str) -> str | None:
        """fairseq's name of Hugging Face's parameter; None: there is none."""
        if not any(re.match(_pattern(theirs), name) for _, theirs in self.names):
            name = self.base + name
        return _renamed(name, tuple((theirs, ours) for ours, theirs in self.names))


def _pattern(prefix: str) -> str:
    return re.escape(prefix).replace(r"\*", r"(\d+)")


def _renamed(name: str, names: Names) -> str | None:
    for before, after in names:
        if found := re.match(_pattern(before), name):
            for number in found.groups():
                after = after.replace("*", number, 1)
            return after + name[found.end() :]
    return None


_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_accurate"}
_SILU = {"silu": "silu", "swish": "silu"}  # only our models have it


def activation(name: str, default: str, silu: bool = False) -> Field:
    """The field that decides the activation; a value that the models lack becomes None.

    silu: whether models that are read may have it.
    """
    known = _ACTIVATIONS | (_SILU if silu else {})
    back = {ours: theirs for theirs, ours in (_ACTIVATIONS | _SILU).items()}
    return Field("activation_fn", name, default, known.get, back.get)
