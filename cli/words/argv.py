"""Reads command lines, lists of words, before torch and fairseq are imported.

fairseq's parser accepts no abbreviations (``allow_abbrev=False``). So a flag is set if its name or
an alias is on the command line, with or without ``=value``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

from lightseq_fairseq.base.families import PREFIX

ARCH = ("--arch", "-a")
PARTS = (("--optimizer",), ("--criterion",))
REGISTERED = (ARCH, *PARTS)


def is_native() -> bool:
    """Whether the command runs fairseq's own parts alone: with --native, or without an ls_ part."""
    return not os.path.basename(sys.argv[0]).startswith("lightseq-")


def flag_of(setting: str) -> str:
    """The flag of a setting that has this name in fairseq's namespace."""
    return "--" + setting.replace("_", "-")


def values(argv: Sequence[str], flags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yields (word index, first character, text) of each value that ``argv`` gives to a flag.

    ``flags`` are the names of the flag. Without a value nothing is yielded. Words after ``--`` are
    operands.
    """
    for index, word in enumerate(argv):
        if word == "--":
            return
        for flag in flags:
            if word == flag:
                if index + 1 < len(argv):
                    yield index + 1, 0, argv[index + 1]
            elif word.startswith(flag + "="):
                yield index, len(flag) + 1, word[len(flag) + 1 :]
            elif len(flag) == 2 and word.startswith(flag):  # argparse takes -aARCH too
                yield index, 2, word[2:]


def value(argv: Sequence[str], flags: Sequence[str]) -> str | None:
    """The effective (last) value of a flag that has the names ``flags``, or None."""
    found = [text for _, _, text in values(argv, flags)]
    return found[-1] if found else None


def is_given(argv: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether one of the long ``flags`` is on the command line, with or without a value."""
    words = list(argv)
    if "--" in words:
        words = words[: words.index("--")]
    return any(word.partition("=")[0] in flags for word in words)


def with_options(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """``argv`` with further options, before a ``--`` if there is one."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *options, *words[end:]]


def without_prefixes(argv: Sequence[str]) -> list[str]:
    """``argv`` with the names of fairseq's arch, optimizer and criterion in place of ours."""
    words = list(argv)
    for flags in REGISTERED:
        for index, start, text in values(argv, flags):
            words[index] = words[index][:start] + text.removeprefix(PREFIX)
    return words


def one_process(argv: list[str]) -> list[str]:
    """``argv`` for one process; fairseq would start one per GPU, all reading the same input."""
    ranks = ("--distributed-world-size", "--distributed-port", "--distributed-init-method")
    if is_given(argv, ranks):
        return argv
    return with_options(argv, ("--distributed-world-size", "1"))
