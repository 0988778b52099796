"""The units of csrc, which are its .cu files: their headers, and several units as one source."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path

# The borders of a unit's unnamed namespace.
UNNAMED = re.compile(r"^namespace \{$|^\}  // namespace$", re.M)
FUNCTION = re.compile(r"^(\w[^{}]*\{)$", re.M)  # up to the brace before its body


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


def included(unit: Path, *folders: Path) -> tuple[list[Path], set[str]]:
    """The headers in the folders that a file includes, also those that these include, and the names
    of the other headers."""
    found: set[Path] = set()
    others: set[str] = set()
    pending = [unit]
    while pending:
        path = pending.pop()
        for name in re.findall(r'(?m)^\s*#\s*include\s+["<](.+)[">]', text_of(path)):
            places = (folder / name for folder in (path.parent, *folders))
            header = next(filter(Path.is_file, places), None)
            if header is None:
                others.add(name)
            elif header not in found:
                found.add(header)
                pending.append(header)
    return sorted(found), others


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """The identifiers of a file that are not in comments or strings."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", re.sub(r'//.*|"[^"\n]*"', "", text_of(path))))


def groups_of(
    units: list[Path], folders: list[Path], kind: Callable[[Path], object]
) -> list[list[Path]]:
    """Units that a quick build compiles as one; all of a group are of one ``kind``.

    A unit that lacks an include does not compile in a real build. So it must not compile here only
    because units before it have that include: none of its names is only in headers of others.
    """
    headers = {unit: included(unit, *folders) for unit in units}
    groups: list[list[Path]] = []

    def fits(unit: Path, group: list[Path]) -> bool:
        own, others = headers[unit]
        known = frozenset[str]().union(*map(names_in, own))
        foreign = {header for before in group for header in headers[before][0]}.difference(own)
        return (
            all(len(UNNAMED.findall(text_of(each))) == 2 for each in (unit, *group))
            and all(kind(before) == kind(unit) for before in group)
            and all(headers[before][1] <= others for before in group)
            and not any(names_in(header) - known & names_in(unit) for header in foreign)
        )

    for unit in sorted(units, key=lambda unit: (len(headers[unit][0]), unit)):
        group = next((group for group in groups if fits(unit, group)), None)
        if group is None:
            groups.append([unit])
        else:
            group.append(unit)
    return groups


def joined(units: list[Path]) -> str:
    """One source of several units, each with its unnamed namespace in a namespace ``unit_<stem>``.

    So units may define the same names. The functions after an unnamed namespace use names in it.
    """
    parts = []
    for unit in units:
        begin, inside, end = UNNAMED.split(text_of(unit))
        inside = f"namespace unit_{unit.stem} {{ namespace {{{inside}}} }}"
        end = FUNCTION.sub(rf"\1 using namespace unit_{unit.stem};", end)
        parts.append(f'#line 1 "{unit.name}"\n{begin}{inside}{end}')
    return "".join(parts)
