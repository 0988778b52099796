"""Shell completion of fairseq's flags and names, from a list: importing fairseq takes seconds.

scripts/flags.py writes the list. It lacks what a --user-dir registers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightseq_fairseq.cli.words import defaults
from lightseq_fairseq.cli.words.argv import ARCH, value

LIST = Path(__file__).with_name("completions.json")


def _listed() -> Any:
    """The list. "flags": command -> its flags. "choices": flag -> its values. "components": a flag
    such as --arch -> names that add the same flags -> these flags."""
    return json.loads(LIST.read_text())


def flags(command: str, words: Sequence[str]) -> list[str]:
    """fairseq's flags of a command line, with those of the arch, the task, ... that it names or
    that lightseq-train adds."""
    listed = _listed()
    found = listed["flags"].get(command, "").split()
    if command == "train":
        words = defaults.complete(words, defaults.Machine())
    task = "language_modeling" if command == "eval-lm" else "translation"
    for flag, components in listed["components"].items() if found else ():
        named = value(words, ARCH if flag in ARCH else (flag,))
        named = task if named is None and flag == "--task" else named
        for names, theirs in components.items():
            if named in names.split():
                found += theirs.split()
    return sorted({*found})


def of_archs() -> set[str]:
    """fairseq's and our flags of all architectures."""
    return {
        flag for theirs in _listed()["components"]["--arch"].values() for flag in theirs.split()
    }


def values(words: Sequence[str]) -> list[str]:
    """The values that the flag before the next word may have; [] if the list has none."""
    flag = next((word for word in reversed(words) if word != "="), "")
    listed = _listed()
    names = " ".join(listed["components"].get("--arch" if flag in ARCH else flag, ()))
    return sorted((names or listed["choices"].get(flag, "")).split())
