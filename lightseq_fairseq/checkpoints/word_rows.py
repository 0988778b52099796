"""A run that begins with a checkpoint may have other words, or the same in another order: each word
gets the checkpoint's row of the same word.

A checkpoint has no dictionary, only the settings of its task and, if this package wrote it, a
digest of its words. So its words are guessed from those of the run: tasks add languages and <mask>
to the words of a file, each in its own way. The digest says whether a guess is right. Without a
digest, the number of rows does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import Dictionary
from torch import Tensor

from lightseq_fairseq.base import dictionaries, families
from lightseq_fairseq.checkpoints import languages
from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

logger = logging.getLogger(__name__)

_TABLE = r"(embed_tokens\.weight|output_projection\.weight|lm_head\.(weight|bias)|logits_bias)$"
# Their tables are cut by the frequency of words, so words do not move from one to the other.
_ADAPTIVE = r"\.(adaptive_softmax|embed_tokens\.embeddings)\."
_MASK = "<mask>"


def follow(state: dict[str, Any], task: Any) -> bool:
    """Moves the rows of a checkpoint's tables of words to those of the task's words, in place.

    New words get rows as fairseq initialises them, a bias of zero. If the words of the checkpoint
    are not known, or inputs or outputs are adaptive, nothing changes; if sizes differ, loading the
    model then reports it.

    Returns: whether all words are now those of the task.
    """
    if any(re.search(_ADAPTIVE, name) for name in state["model"]):
        return False
    digests = (state.get("extra_state") or {}).get("dictionaries") or {}
    old, new = settings_of(state, "task"), _settings(task)
    moved: dict[tuple[int, str], Tensor] = {}  # tied tables stay tied
    done = True
    for name, table in list(state["model"].items()):
        if not re.search(_TABLE, name):
            continue
        side = "source" if name.startswith("encoder.") or not _has_target(task) else "target"
        words = getattr(task, f"{side}_dictionary").symbols
        key = table.data_ptr(), side
        if key not in moved:
            before = _words_before(words, old, new, digests.get(side), len(table))
            moved[key] = table
            if before is None:
                done = False
            elif before != words:
                moved[key] = _moved(table, before, words)
                _log(side, before, words)
        state["model"][name] = moved[key]
    return done


def _has_target(task: Any) -> bool:
    return getattr(task, "target_dictionary", None) is not None


def _settings(task: Any) -> dict[str, Any]:
    """The settings of a task of fairseq."""
    found: Any = getattr(task, "cfg", None) or getattr(task, "args", None) or {}
    return dict(found) if isinstance(found, Mapping) else dict(vars(found))


def _words_before(
    words: list[str], old: dict[str, Any], new: dict[str, Any], digest: str | None, rows: int
) -> list[str] | None:
    """The words of a checkpoint's table; None if they are not known."""
    for guess in _guesses(words, old, new, digest is not None):
        if len(guess) == rows and digest in (None, dictionaries.digest(guess)):
            return guess
    return None


def _guesses(
    words: list[str], old: dict[str, Any], new: dict[str, Any], is_checked: bool
) -> Iterator[list[str]]:
    """The words of a run without those that its task adds, with those that the other task adds.

    is_checked: a digest decides, so that less likely guesses do no harm.
    """
    if is_checked:
        yield words
    added = set(_added(new))
    for removed in (added, added - {_MASK}, {_MASK}) if is_checked else (added,):
        kept = [word for word in words if word not in removed]
        for more in (_added(old), [], [_MASK]) if is_checked else (_added(old),):
            yield [*kept, *(word for word in more if word not in kept)]
    yield words


def _added(settings: dict[str, Any]) -> list[str]:
    """The words that a task with these settings adds to those of a file, in order."""
    name = settings.get("_name") or settings.get("task") or ""
    if name == languages.TASK:
        dictionary = Dictionary()
        languages.add_tokens(dictionary, settings, languages.languages_of(settings))
        return list(dictionary.symbols[dictionary.nspecial :])
    task = families.tasks().get(name)
    found: list[str] = []
    for symbol in task.symbols if task else ():
        has_languages = "{langs}" in symbol
        found += (
            [symbol.format(langs=code) for code in _codes(settings)] if has_languages else [symbol]
        )
    return found


def _codes(settings: dict[str, Any]) -> list[str]:
    """The languages of a task that reads a folder for each, or has --langs."""
    if not settings.get("add_lang_token", True):
        return []
    if langs := settings.get("langs"):
        return langs.split(",") if isinstance(langs, str) else list(langs)
    data = settings.get("data")
    if not data or not isinstance(data, str):
        return []
    folder = Path(utils.split_paths(data)[0])
    return (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    )


def _moved(table: Tensor, before: Sequence[str], words: Sequence[str]) -> Tensor:
    row_of = {word: row for row, word in enumerate(before)}
    rows = torch.tensor([row_of.get(word, 0) for word in words])
    found = table[rows]
    is_new = torch.tensor([word not in row_of for word in words])
    if is_new.any():
        drawn = torch.zeros_like(found[is_new])
        if drawn.dim() > 1:  # the same on all ranks, and no other draw changes
            drawn.normal_(0, drawn.shape[1] ** -0.5, generator=torch.Generator().manual_seed(1))
        found[is_new] = drawn
    return found


def _log(side: str, before: Sequence[str], words: Sequence[str]) -> None:
    gone, new = (
        [word for word in first if word not in {*second}]
        for first, second in ((before, words), (words, before))
    )
    parts = [
        f"{len(each)} {what} ({', '.join(each[:5])}{', ...' * (len(each) > 5)})"
        for each, what in ((new, "are new"), (gone, "of the checkpoint are dropped"))
        if each
    ]
    logger.info(
        "%s words: rows follow the words of the checkpoint; %s",
        side,
        "; ".join(parts) or "all moved",
    )
