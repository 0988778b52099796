"""Other rows for an import: new languages, and only the words that a text uses.

Both change the files of the tokenizer, so that the folder of the import is a tokenizer's folder of
`transformers` again, and say which old row each new row begins with.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightseq_fairseq.base import utf8
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.tokenizer import Tokenizer
from lightseq_fairseq.checkpoints.correspondence import Counterpart
from lightseq_fairseq.checkpoints.vocabulary import read_json

_MULTIPLE = 8  # of the number of rows
# Files with the words again, which transformers would read in place of tokenizer.json.
_REPEATED = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "*.model", "*.spm")


def change(
    place: Path,
    record: Counterpart,
    size: int,
    languages: dict[str, str],
    texts: Sequence[Path],
) -> list[int]:
    """Changes the tokenizer and config.json in a folder.

    Args:
        place: a folder with the files of a model of `transformers`, without its weights.
        size: rows of the old table.
        languages: code of a new language -> code of the language whose row it begins with.
        texts: files; if there are any, only their words are kept, with all single characters and
            special words.

    Returns:
        For each row of the new table, the row of the old one that it begins with.

    Raises:
        UserError: the tokenizer cannot be changed, or a language is unknown.
    """
    path = place / "tokenizer.json"
    if not path.is_file() or len(record.sides) > 1:
        raise UserError(
            "--add-languages and --only-words-of need one tokenizer.json, which this folder lacks: "
            "save the tokenizer of AutoTokenizer.from_pretrained there, if it has this file."
        )
    config, whole = read_json(place / "config.json"), read_json(path)
    ids = {**_words(whole["model"]), **_added(whole)}
    rows = list(range(max(size, max(ids.values()) + 1)))
    spare = _unknown(whole, ids)
    if texts:
        used = Tokenizer(path).used(_lines(texts))
        rows = sorted(used | _always(whole, ids, used) | _named(place, config) & {*ids.values()})
        new_of = {old: new for new, old in enumerate(rows)}
        ids = {word: new_of[old] for word, old in ids.items() if old in new_of}
        _keep(whole, new_of)
        _renumber(place, config, new_of)
    first = max(ids.values()) + 1  # no word has the rows behind it
    tokens, begins = [], []
    for code, like in languages.items():
        tokens.append(_token(code, like, ids, record))
        begins.append(rows[ids[tokens[-1].replace(code, like)]])
    rows = rows[:first] + begins + rows[first + len(begins) :]
    rows += [spare] * (-len(rows) % _MULTIPLE)
    rows = [row if row < size else spare for row in rows]  # BART's for summaries lack <mask>
    for number, token in enumerate(tokens, first):
        whole.setdefault("added_tokens", []).append(
            {"id": number, "content": token, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False, "special": True}
        )
    config["vocab_size"] = len(rows)
    _write(place / "config.json", config)
    _write(path, whole)
    _list(place, tokens)
    return rows


def _words(model: dict[str, Any]) -> dict[str, int]:
    words = model.get("vocab") or {}
    if isinstance(words, list):  # of words and their scores
        return {word: number for number, (word, _) in enumerate(words)}
    return dict(words)


def _added(whole: dict[str, Any]) -> dict[str, int]:
    return {each["content"]: each["id"] for each in whole.get("added_tokens") or ()}


def _unknown(whole: dict[str, Any], ids: dict[str, int]) -> int:
    model = whole["model"]
    number = model.get("unk_id")
    return ids.get(model.get("unk_token") or "<unk>", 0) if number is None else number


def _lines(texts: Sequence[Path]) -> Iterator[list[str]]:
    """The lines of files, a few thousand at a time."""
    for text in texts:
        try:
            with open(text, "rb") as file:
                found = utf8.lines(file, str(text))
                while lines := [line.strip() for line in itertools.islice(found, 4096)]:
                    yield lines
        except OSError as error:
            raise UserError(
                f"{text} cannot be read ({error.strerror}): check --only-words-of."
            ) from error


def _always(whole: dict[str, Any], ids: dict[str, int], used: set[int]) -> set[int]:
    """The ids to keep besides those in use: special words, characters, and parts of merges.

    A tokenizer of merges makes the words in use from their parts, so texts are split as before.
    """
    kept = {*_added(whole).values(), _unknown(whole, ids)}
    kept |= {number for word, number in ids.items() if len(word.removeprefix("##")) == 1}
    kept |= {number for word, number in ids.items() if re.fullmatch("<0x..>", word)}  # bytes
    parts: dict[str, set[str]] = {}
    for first, second in map(_pair, whole["model"].get("merges") or ()):
        parts.setdefault(first + second, set()).update((first, second))
    waiting = [word for word, number in ids.items() if number in used and word in parts]
    while waiting:
        for part in parts.pop(waiting.pop(), ()):
            kept.add(ids[part])
            if part in parts:
                waiting.append(part)
    return kept


def _named(place: Path, config: dict[str, Any]) -> set[int]:
    """The ids that config.json and generation_config.json name, such as that of the first word or
    those that generation must not choose."""
    path = place / "generation_config.json"
    fields = [config, read_json(path) if path.is_file() else {}]
    return {n for each in fields for name, x in each.items() if _is_id(name) for n in _numbers(x)}


def _numbers(value: Any) -> Iterator[int]:
    """The numbers in lists of lists."""
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int):
        yield value


def _pair(merge: str | list[str]) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _is_id(name: str) -> bool:
    return re.search(r"(token_id|token_ids|bad_words_ids|suppress_tokens)$", name) is not None


def _keep(whole: dict[str, Any], new_of: dict[int, int]) -> None:
    """Removes the words of a tokenizer.json that have no new id, and numbers the others anew."""
    model = whole["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [each for old, each in enumerate(model["vocab"]) if old in new_of]
        model["unk_id"] = new_of.get(model.get("unk_id"))
    else:
        kept = {word: new_of[old] for word, old in model["vocab"].items() if old in new_of}
        model["vocab"] = kept
    if model.get("merges"):
        words = _words(model)
        model["merges"] = [
            merge
            for merge in model["merges"]
            if all(word in words for word in (*_pair(merge), "".join(_pair(merge))))
        ]
    for each in whole.get("added_tokens") or ():
        each["id"] = new_of[each["id"]]
    _renumber_processor(whole.get("post_processor"), new_of)


def _renumber_processor(part: Any, new_of: dict[int, int]) -> None:
    """Numbers the special words anew that a tokenizer adds to a text, in place."""
    if isinstance(part, list):
        for each in part:
            _renumber_processor(each, new_of)
    elif isinstance(part, dict):
        for name, value in part.items():
            if name == "special_tokens":  # of a template
                for each in value.values():
                    each["ids"] = [new_of[old] for old in each["ids"]]
            elif name in ("sep", "cls") and isinstance(value, list):
                value[1] = new_of[value[1]]
            else:
                _renumber_processor(value, new_of)


def _renumber(place: Path, config: dict[str, Any], new_of: dict[int, int]) -> None:
    """Numbers the words anew in config.json, in place, and in the files beside it."""
    for pattern in _REPEATED:
        for path in place.glob(pattern):
            path.unlink()
    for name in ("generation_config.json", "tokenizer_config.json"):
        if (path := place / name).is_file():
            fields = read_json(path)
            _renumber_fields(fields, new_of)
            known = fields.get("added_tokens_decoder") or {}
            if known:
                moved = {
                    str(new_of[int(old)]): each for old, each in known.items() if int(old) in new_of
                }
                fields["added_tokens_decoder"] = moved
            _write(path, fields)
    _renumber_fields(config, new_of)


def _renumber_fields(fields: dict[str, Any], new_of: dict[int, int]) -> None:
    for name, value in fields.items():
        if _is_id(name):
            fields[name] = _moved(value, new_of)


def _moved(value: Any, new_of: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_moved(each, new_of) for each in value]
    return new_of.get(value) if isinstance(value, int) else value


def _token(code: str, like: str, ids: dict[str, int], record: Counterpart) -> str:
    """The word of a new language, in the form of the other language's."""
    pattern = record.languages[0] if record.languages else "(?!)"
    forms = [form for form in ("{}", "__{}__") if form.format(like) in ids]
    forms = [form for form in forms if re.fullmatch(pattern, form.format(like))]
    if not forms:
        found = next((word for word in ids if re.fullmatch(pattern, word)), None)
        such = f"use one of its languages, such as {found.strip('_')}" if found else "it has none"
        raise UserError(f"--add-languages {code}={like}: this model has no {like}: {such}.")
    token = forms[0].format(code)
    if not re.fullmatch(pattern, token):
        raise UserError(
            f"--add-languages {code}={like}: {code} is no code like those of this model: use one "
            f"of the form of {like}."
        )
    if token in ids:
        raise UserError(f"--add-languages {code}={like}: this model has {code} already: remove it.")
    return token


def _list(place: Path, tokens: list[str]) -> None:
    """Adds words to the lists of special words in tokenizer_config.json, if it has one."""
    path = place / "tokenizer_config.json"
    if tokens and path.is_file():
        fields = read_json(path)
        for name in ("additional_special_tokens", "extra_special_tokens"):
            if isinstance(fields.get(name), list):
                fields[name] += tokens
        _write(path, fields)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
