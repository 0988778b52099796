"""The rows of docs/flags.md, what proves one, and runs of the commands with settings given.

A module tests/flags/test_flags_*.py says in ``PROVEN`` which rows its tests run: (command, answer)
-> names. tests/flags/test_flags_proofs.py adds them up.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import helpers.cli_runs as cli_runs
from click.testing import Result
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts import flags as table

ROOT = Path(__file__).resolve().parents[2]

Proofs = dict[tuple[str, str], set[str]]


def _spare_time() -> None:
    """For hundreds of short runs, most of whose time is hydra's: a text is parsed once, and its
    register of all configurations, of which there is one, is not copied; nor is what has been
    imported looked through for garbage."""
    parse = OverridesParser.parse_rule
    once = functools.cache(lambda text, rule: parse(OverridesParser.create(), text, rule))
    OverridesParser.parse_rule = lambda parser, text, rule: once(text, rule)
    ConfigStore.__deepcopy__ = lambda store, memo: store
    gc.freeze()


_spare_time()


SETTINGS = table.settings()


def rows(command: str, kind: str) -> set[str]:
    """Settings of a command with that answer."""
    return {
        name
        for name, row in SETTINGS.items()
        if command in row.commands and table.answer(command, name, row.choices)[0] == kind
    }


def names(*lines: str) -> set[str]:
    """Settings that command lines give, under the names of their rows."""
    words = {word.partition("=")[0] for line in lines for word in line.split()}
    return {name for name, row in SETTINGS.items() if words & {name, *row.aliases}}


# ---- proofs ----

Shown = TypeVar("Shown")


def prove(
    line: str, run: Callable[[str, bool], Shown], agree: Callable[[Shown, Shown], bool]
) -> tuple[Shown, Shown]:
    """Ours does what fairseq does with the settings of ``line``, and each of them does something.

    So ours would be found out if it did not read one of them.

    Args:
        line: the settings, a folder of data first or none. Those in front of a bar are there for
            the sake of the others, which are what this proves.
        run: what a command shows with such settings; fairseq's own, if the second is true.
        agree: whether two runs have shown the same.

    Returns:
        What ours and fairseq's have shown.
    """
    given, claimed = pieces(line.replace("|", "")), pieces(line.rpartition("|")[2])
    ours, theirs = (run(" ".join(given), native) for native in (False, True))
    assert agree(ours, theirs), f"ours: {ours}\nfairseq's: {theirs}"
    idle = [x for x in claimed if agree(run(" ".join(_without(given, x)), True), theirs)]
    assert not idle, f"{idle} can be left out of {line}"
    return ours, theirs


def proven(*lines: str) -> set[str]:
    """The settings that `prove` proves with these lines."""
    claimed = [piece for line in lines for piece in pieces(line.rpartition("|")[2])]
    return names(*(piece if piece.startswith("-") else "data" for piece in claimed))


def pieces(line: str) -> list[str]:
    """Settings of a line with their values."""
    found: list[str] = []
    for word in line.split():
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def _without(given: list[str], piece: str) -> list[str]:
    """All settings but one, and but those that the parser has on its account."""
    flag = piece.split()[0]
    gone = {
        name for name, row in SETTINGS.items() if any(x.split()[0] == flag for x in row.choices)
    }
    return [x for x in given if x != piece and not names(x) & gone]


# ---- short runs of the launchers ----


def launch(command: str, data: Path, place: Path, line: str, ok: bool = False) -> Result:
    """``lightseq-<command>``; ``place`` is the folder for checkpoints, or the one to load."""
    own = {
        "train": ["--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir", place],
        "generate": ["--path", place, "--cpu", "--beam", 2, "--max-len-b", 9,
                     "--num-workers", 0],
        "validate": ["--path", place, "--cpu", "--max-tokens", 200, "--num-workers", 0],
        "interactive": ["--path", place, "--cpu", "--input", data.parent / "text" / "test.de",
                        "--beam", 2, "--max-len-b", 9],
    }[command]  # fmt: skip
    result = cli_runs.run(command, data, *map(str, own), *line.split())
    assert not ok or result.exit_code == 0, (result.output, result.exception)
    return result
