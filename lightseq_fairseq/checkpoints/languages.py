"""The languages of a model of --task translation_multi_simple_epoch, and their rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.data.multilingual.multilingual_utils import augment_dictionary, get_lang_tok

from lightseq_fairseq.base.errors import UserError

TASK = "translation_multi_simple_epoch"


def pairs_of(settings: Mapping[str, Any]) -> list[str]:
    """The language pairs, such as "en-de", of a run's settings."""
    found = settings.get("lang_pairs") or []
    return found.split(",") if isinstance(found, str) else list(found)


def languages_of(settings: Mapping[str, Any]) -> list[str]:
    """The languages of a run's settings, in the order of their rows, as fairseq finds them.

    Raises:
        UserError: the file of --lang-dict cannot be read.
    """
    listed, file = settings.get("langs"), settings.get("lang_dict")
    if listed:
        return listed.split(",") if isinstance(listed, str) else list(listed)
    if not file:
        return sorted({language for pair in pairs_of(settings) for language in pair.split("-")})
    try:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(
            f"--lang-dict {file} cannot be read ({reason}): name a file with a language on each "
            "line, or list the languages with --langs."
        ) from error
    return [line.strip() for line in lines if line.strip()]


def add_tokens(dictionary: Dictionary, settings: Mapping[str, Any], languages: list[str]) -> None:
    """Adds the languages' tokens to a dictionary, as the task does with these settings."""
    augment_dictionary(
        dictionary, languages, settings["lang_tok_style"], settings["langtoks_specs"],
        settings.get("extra_data"),
    )  # fmt: skip


def rows(
    dictionary: Dictionary, settings: Mapping[str, Any], languages: list[str]
) -> dict[str, int]:
    """The row of the token of each language, after `add_tokens` to a copy of a dictionary."""
    names = {x: get_lang_tok(x, settings["lang_tok_style"]) for x in languages}
    new = [name for name in dict.fromkeys(names.values()) if name not in dictionary.indices]
    added = {name: len(dictionary) + number for number, name in enumerate(new)}
    return {x: dictionary.indices.get(name, added.get(name, 0)) for x, name in names.items()}
