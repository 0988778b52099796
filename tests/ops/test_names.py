"""Where the parts of an op are: its module, its tests, and its kernels in csrc.

docs/adding-a-kernel.md states the same rules in words.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SOURCES = {
    path.relative_to(CSRC): path.read_text()
    for path in sorted(CSRC.rglob("*"))
    if path.suffix in {".cu", ".cuh", ".h"}
}
FAMILIES = {path.parts[0] for path in SOURCES} - {"common"}
MODULES = {
    path.stem: re.findall(r'define\(\s*"(\w+)"', path.read_text())
    for path in (ROOT / "lightseq_fairseq" / "ops").glob("*.py")
}
REGISTERED = {
    path: re.findall(r'm\.impl\("(\w+)"', source)
    for path, source in SOURCES.items()
    if "m.impl(" in source
}


@pytest.mark.parametrize("module", [stem for stem, names in MODULES.items() if names])
def test_a_module_of_ops_has_tests_of_its_name(module):
    tests = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert tests & {f"test_{module}", f"test_{module}_cuda"}


def test_every_op_is_registered_in_one_file():
    defined = [name for names in MODULES.values() for name in names]
    assert sorted(name for names in REGISTERED.values() for name in names) == sorted(defined)


@pytest.mark.parametrize("path", REGISTERED, ids=str)
def test_a_file_with_ops_is_named_after_one(path):
    assert any(path.stem in name for name in REGISTERED[path])


def test_files_of_kernels_are_in_families_and_have_different_names():
    stems = [path.stem for path in SOURCES if path.suffix == ".cu"]
    assert len(stems) == len(set(stems))
    assert {path.parent.as_posix() for path in SOURCES if path.suffix == ".cu"} == FAMILIES


def included(path: Path) -> list[Path]:
    return [Path(name) for name in re.findall(r'^#include "(.+)"', SOURCES[path], re.M)]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_includes_its_own_family_and_common(path):
    assert {name.parts[0] for name in included(path)} <= {path.parts[0], "common"}
    assert set(included(path)) <= set(SOURCES)


def test_common_has_what_two_families_use():
    users: dict[Path, set[str]] = {}
    for family in FAMILIES:
        reached = [path for path in SOURCES if path.parts[0] == family]
        for path in reached:
            reached += [name for name in included(path) if name not in reached]
        for path in reached:
            users.setdefault(path, set()).add(family)
    common = [path for path in SOURCES if path.parts[0] == "common"]
    unused = [path for path in common if len(users.get(path, ())) < 2]
    # Torch's headers include it in a quick build.
    assert list(map(str, unused)) == ["common/quick/thrust/complex.h"]
