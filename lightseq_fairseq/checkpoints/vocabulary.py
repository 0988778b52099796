"""The words of a tokenizer of Hugging Face, and the dictionary of fairseq with the same rows.

fairseq's first four rows are <s>, <pad>, </s> and <unk>. `transformers` may have them elsewhere, or
one word for several of them. All other words keep their order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.data import Dictionary

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.tokenizer import UNNAMED, is_unnamed
from lightseq_fairseq.checkpoints.correspondence import Counterpart

_OTHERS = (
    *(".safetensors", ".bin", ".index.json", ".msgpack", ".h5", ".pt", ".onnx", ".ot", ".gguf"),
    ".gitattributes",
)
_FIRST = ("<s>", "<pad>", "</s>", "<unk>")


class Vocabulary(NamedTuple):
    """The rows of a dictionary of fairseq.

    Attributes:
        words: of all rows, in fairseq's order.
        ids: in `transformers`, of each row; None: the row is only in fairseq.
        languages: the codes of the languages, in the order of their rows.
        spare: the id whose row is copied to rows that are only in fairseq.
    """

    words: list[str]
    ids: list[int | None]
    languages: list[str]
    spare: int

    def dictionary(self) -> Dictionary:
        """The dictionary of fairseq."""
        dictionary = Dictionary()
        for word in self.words[len(_FIRST) :]:
            dictionary.add_symbol(word)
        return dictionary


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(f"{path} cannot be read ({reason}): check the folder.") from error


def files_of(folder: Path) -> list[Path]:
    """The files of a folder of `transformers`, or of an import, that are no weights."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.endswith(_OTHERS)
        and not re.fullmatch(r"dict\..*txt|languages\.txt", path.name)
    ]


def of_folder(folder: Path, record: Counterpart, side: str, rows: int | None = None) -> Vocabulary:
    """The vocabulary of the tokenizer in a folder of `transformers`.

    Args:
        side: "source" or "target".
        rows: of the embedding, which may be more than the tokenizer has words; None: the number in
            config.json.

    Raises:
        UserError: the folder has no tokenizer that can be read, or it has more words than rows.
    """
    config = read_json(folder / "config.json")
    tokens, unknown = _tokens(folder, record.sides[side][1])
    rows = rows or config.get(record.sides[side][0]) or max(tokens) + 1
    # BART's models for summaries lack the row of <mask>.
    if any(number >= rows and word != "<mask>" for number, word in tokens.items()):
        raise UserError(
            f"The tokenizer in {folder} has {max(tokens) + 1} words, but the embedding has {rows} "
            "rows: use the tokenizer of this model."
        )
    first: list[int | None] = [None] * len(_FIRST)
    # <s> comes last: models without it lack its field.
    pad = None if record.spare else 1  # GPT-2 has none, and row 1 is a word
    found = {"</s>": config.get("eos_token_id", 2), "<pad>": config.get("pad_token_id", pad)}
    found |= {"<s>": config.get("bos_token_id", 0), "<unk>": unknown}
    for word, number in found.items():
        number = number[0] if isinstance(number, list) else number
        if isinstance(number, int) and number < rows and number not in first:
            first[_FIRST.index(word)] = number
    others = [number for number in range(rows) if number not in first]
    words, languages, seen = list(_FIRST), [], set(_FIRST)
    for number in others:
        word = tokens.get(number, "")
        if record.languages and (language := re.fullmatch(record.languages[0], word)):
            languages.append(language[language.lastindex or 1])
            word = record.languages[1].format(languages[-1])
        if not word or word in seen or re.search(r"\s", word):  # no line of dict.txt
            word = UNNAMED.format(number)
        seen.add(word)
        words.append(word)
    by_word = {word: number for number, word in tokens.items()}
    spare = by_word.get(record.spare, first[_FIRST.index("</s>")] or 0)
    return Vocabulary(words, [*first, *others], languages, spare)


def add(folder: Path, record: Counterpart, words: list[str]) -> None:
    """Adds the last words to the tokenizer.json in a folder, if its tokenizer has fewer.

    Args:
        words: of all rows, in the order of Hugging Face's; empty for a row without a word.
    """
    while words and (not words[-1] or is_unnamed(words[-1])):
        words = words[:-1]
    path = folder / "tokenizer.json"
    known = max(_tokens(folder, "")[0]) + 1 if path.exists() else len(words)
    if known >= len(words):
        return
    whole = read_json(path)
    code, named = record.languages or ("", "")
    for number, word in enumerate(words[known:], known):
        language = re.fullmatch(re.escape(named).replace(r"\{\}", "(.+)"), word)
        if language and re.fullmatch(code, language[1]):  # not M2M-100's, which keep their marks
            word = language[1]
        whole["added_tokens"].append(
            {"id": number, "content": word, "single_word": False, "lstrip": False}
            | {"rstrip": False, "normalized": False, "special": bool(language)}
        )
    path.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")


def _tokens(folder: Path, name: str) -> tuple[dict[int, str], int | None]:
    """id -> word of the tokenizer in a folder, and the id of the unknown word."""
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).exists():
            settings |= read_json(folder / file)
    tokens: dict[int, str] = {}
    if (folder / "tokenizer.json").exists():
        whole = read_json(folder / "tokenizer.json")
        words = (whole.get("model") or {}).get("vocab") or {}
        if isinstance(words, list):  # of words and their scores
            words = {word: number for number, (word, _) in enumerate(words)}
        tokens = {number: word for word, number in words.items()}
        tokens |= {each["id"]: each["content"] for each in whole.get("added_tokens", ())}
    elif (folder / name).exists():
        tokens = {number: word for word, number in read_json(folder / name).items()}
        if (folder / "added_tokens.json").exists():
            tokens |= {n: word for word, n in read_json(folder / "added_tokens.json").items()}
        added = settings.get("added_tokens_decoder") or {}
        tokens |= {int(number): _word(each) for number, each in added.items()}
        # M2M-100's tokenizer has the languages behind the words of the file, in this order.
        known = set(tokens.values())
        for key in ("additional_special_tokens", "extra_special_tokens"):
            for each in map(_word, settings.get(key) or ()):
                if each not in known:
                    tokens[max(tokens) + 1] = each
                    known.add(each)
    if not tokens:
        raise UserError(
            f"{folder} has neither tokenizer.json nor {name}, from which the dictionary is made: "
            "save the tokenizer there (AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER))."
        )
    unknown = _word(settings.get("unk_token") or "<unk>")
    return tokens, next((number for number, word in tokens.items() if word == unknown), None)


def _word(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
