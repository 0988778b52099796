"""The rows of docs/flags.md, proofs of their answers, and runs of the commands with given settings.

Each module tests/flags/test_flags_*.py lists in ``PROVEN`` the rows that its tests run:
(command, answer) -> names. tests/flags/test_flags_proofs.py combines these lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import helpers.cli_runs as cli_runs
from click.testing import Result
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from scripts import flags as table

ROOT = Path(__file__).resolve().parents[2]

WORKS = ROOT / "tests" / "flags" / "works.txt"

Proofs = dict[tuple[str, str], set[str]]


def _spare_time() -> None:
    """Makes hundreds of short runs faster, in which hydra takes most of the time: parse each text
    only once, and do not copy hydra's single store of configurations."""
    parse = OverridesParser.parse_rule
    once = functools.cache(lambda text, rule: parse(OverridesParser.create(), text, rule))
    OverridesParser.parse_rule = lambda parser, text, rule: once(text, rule)
    ConfigStore.__deepcopy__ = lambda store, memo: store


_spare_time()


SETTINGS = table.translation_settings()


def lines(subject: str) -> list[str]:
    """The lines of works.txt whose title begins with the subject, or names it as a command."""
    found = []
    for part in WORKS.read_text().split("\n# ")[1:]:
        title, *rest = part.splitlines()
        commands = title.partition(":")[0].split(", ")
        if title.startswith(subject) or subject in commands:
            found += [line for line in rest if line and not line.startswith("#:")]
    return found


def rows(command: str, kind: str) -> set[str]:
    """The settings of a command that have this answer."""
    return {
        name
        for name, row in SETTINGS.items()
        if command in row.commands and table.answer(command, name, row)[0] == kind
    }


def names(*lines: str) -> set[str]:
    """The settings on these command lines, by the names of their rows."""
    words = {word.partition("=")[0] for line in lines for word in line.split()}
    return {name for name, row in SETTINGS.items() if words & {name, *row.aliases}}


# ---- proofs ----

Shown = TypeVar("Shown")


def prove(
    line: str, run: Callable[[str, bool], Shown], agree: Callable[[Shown, Shown], bool]
) -> tuple[Shown, Shown]:
    """Check that ours does what fairseq does with the settings of ``line``, and that each has an
    effect.

    If ours ignored one of the settings, the check would fail.

    Args:
        line: the settings, after a data folder or none. Settings before a bar are only needed by
            the
            others; those after it are proven.
        run: runs the command with these settings, with fairseq's own parts if the second argument
            is
            true; returns what it shows.
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
    """The settings of a line, each with its values."""
    found: list[str] = []
    for word in line.split():
        if word.startswith("--") or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found


def _without(given: list[str], piece: str) -> list[str]:
    """All settings except ``piece`` and those that the parser only has because of it."""
    flag = piece.split()[0]
    gone = {
        name for name, row in SETTINGS.items() if any(x.split()[0] == flag for x in row.choices)
    }
    return [x for x in given if x != piece and not names(x) & gone]


# ---- short runs of the launchers ----


def launch(command: str, data: Path, place: Path, line: str, ok: bool = False) -> Result:
    """Runs ``lightseq-<command>``; ``place`` is the checkpoint folder of training, or the
    checkpoint to load."""
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
