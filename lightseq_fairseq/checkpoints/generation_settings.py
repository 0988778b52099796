"""How `generate` of `transformers` searches with a folder by default, in our words.

The options of an imported checkpoint have it as the attribute ``generation``:

* ``options``: of our commands.
* ``early_stopping``: see ``SearchOptions``.
* ``target_first``: the row of the token with which all translations begin; fairseq's data lack it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightseq_fairseq.checkpoints.correspondence import Counterpart
from lightseq_fairseq.checkpoints.languages import TASK
from lightseq_fairseq.checkpoints.vocabulary import Vocabulary, read_json


def of_folder(folder: Path, record: Counterpart, known: dict[str, Vocabulary]) -> dict[str, Any]:
    """The attribute ``generation`` for a folder.

    known: the vocabularies of "source" and, if it is another one, of "target".
    """
    path = folder / "generation_config.json"
    given = read_json(path if path.exists() else folder / "config.json")
    words, forced = known.get("target", known["source"]), given.get("forced_bos_token_id")
    row = None if forced is None or forced not in words.ids else words.ids.index(forced)
    options = _options(given)
    found = {"options": options, "early_stopping": _early_stopping(given)}
    if record.languages is None:
        return {**found, "target_first": row}
    # The task begins translations with --target-lang.
    codes = {record.languages[1].format(code): code for code in words.languages}
    options |= {"task": TASK, "target_lang": codes.get(words.words[row] if row else "")}
    return found


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a search for the fields of generation_config.json."""
    penalty = given.get("length_penalty")
    # max_length counts the first decoder input. Where </s> is forced, the last token is no word.
    shortest = given.get("min_new_tokens") or max((given.get("min_length") or 0) - 1, 0)
    longest = given.get("max_new_tokens") or (given.get("max_length") or 1) - 1
    found = {
        "beam": given.get("num_beams") or 1,
        "lenpen": 1.0 if penalty is None else penalty,
        "no_repeat_ngram_size": given.get("no_repeat_ngram_size") or 0,
        "min_len": shortest,
    }
    longest -= given.get("forced_eos_token_id") is not None
    return found | ({"max_len_a": 0, "max_len_b": longest} if longest > 0 else {})


def _early_stopping(given: dict[str, Any]) -> bool | str:
    found = given.get("early_stopping")
    return "never" if found == "never" else bool(found)
