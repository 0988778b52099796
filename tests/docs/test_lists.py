"""The lists in the documentation agree with the code: commands, variables, messages, names, the
version."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.pages import ROOT, text

import lightseq_fairseq
from lightseq_fairseq import layers, ops

FOLDERS = "lightseq_fairseq", "cli", "csrc", "scripts", "examples"
# Shell variables that bash defines itself.
OF_BASH = {"BASH_REMATCH", "BASH_SOURCE", "PWD", "SECONDS"}
# Variables that only our own code sets.
OF_OTHERS = {"HYDRA_FULL_ERROR"}


def files(*suffixes: str) -> list[Path]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    return [ROOT / "setup.py", *(path for path in found if path.suffix in suffixes)]


def listed(page: str, head: str) -> list[str]:
    """The code in the first column of those tables of the page whose first head cell is
    ``head``."""
    tables = re.findall(rf"^\| {head} \|.*\n((?:\|.*\n)+)", text(page), re.M)
    return re.findall(r"^\| `(.+?)` \|", "".join(tables), re.M)


def test_commands() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["options.entry_points"]["console_scripts"].strip().splitlines()
    commands = {line.partition("=")[0].strip() for line in lines}
    assert sorted(listed("docs/commands.md", "command")) == sorted(commands)


# --- Environment variables --------------------------------------------------------------------


# How Python code reads environment variables, by a name or a constant; and how it copies all of
# them, or removes one that it has set.
READ = (
    r"\benviron(?:ment)?(?:\.get|\.setdefault|\.pop)?[\[(][\"'](?P<name>\w+)[\"']",
    r"\benviron(?:\.get|\.setdefault)?[\[(]\{?(?:\w+\.)*(?P<constant>[A-Z_]+)\b",
    r"\"(?P<name>\w+)\" in os\.environ\b",
    r"\b(?P<constant>[A-Z_]+) in os\.environ\b",
    r"\{(?P<names>[^}]*)\} <= os\.environ\b",
    r"\benvvar=\"(?P<name>\w+)\"",
)
COPIED = r"\*\*os\.environ\b|, os\.environ\)|(?:del )?os\.environ\[name\]"


def python_sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in files(".py", ".sh")]


def read_by_python() -> Iterator[str]:
    sources = python_sources()
    constants = dict(re.findall(r'^([A-Z_]+) = "([A-Z_]+)"', "\n".join(sources), re.M))
    for found in (f for source in sources for read in READ for f in re.finditer(read, source)):
        for kind, word in found.groupdict().items():
            yield from re.findall(r"\w+", constants[word] if kind == "constant" else word)


def test_variables_are_read_in_no_other_way() -> None:
    for rest in python_sources():
        for known in (*READ, COPIED):
            rest = re.sub(known, "", rest)
        assert not re.findall(r"^.*\b(?:os\.environ|getenv)\b.*$", rest, re.M)


def read_by_kernels() -> Iterator[str]:
    for path in files(".cu", ".cuh", ".h"):
        yield from re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8"))


def read_by_shell() -> Iterator[str]:
    for path in files(".sh", ".sbatch"):
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", source):
            if not re.search(rf"^\s*(?:local |for )?{name}(?:=| in )", source, re.M):
                yield name
        yield from re.findall(r"^\s*export .*?([A-Z_]+)=\S*\$\{\1", source, re.M)


def test_environment_variables() -> None:
    named = [name.partition("=")[0] for name in listed("docs/environment.md", "variable")]
    found = {*read_by_python(), *read_by_kernels(), *read_by_shell()} - OF_BASH - OF_OTHERS
    assert sorted(named) == sorted(found)


def test_variables_of_every_language_are_found() -> None:
    assert {"LIGHTSEQ_CAPTURE", "LIGHTSEQ_FAIRSEQ_HOOK", "COMMIT", "RANK"} <= set(read_by_python())
    assert {"LIGHTSEQ_LINEAR_SEARCH", "HOME"} <= set(read_by_kernels())
    assert {"LIGHTSEQ_BUILD", "MERGES", "SLURM_NTASKS"} <= set(read_by_shell())


# --- Messages ---------------------------------------------------------------------------------


def strings() -> Iterator[str]:
    """Every string in the Python code, with * for each formatted value."""
    for path in files(".py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(part, "value", "") for part in node.values)
                yield "".join(part if isinstance(part, str) else "*" for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[sd]|%\.\df", "*", node.value)


def test_messages() -> None:
    """In a message of the page, `...` stands for any text."""
    known = "\n".join(" ".join(string.split()) for string in strings())

    def is_known(message: str) -> bool:
        parts = [re.escape(part.strip()) for part in message.split("...")]
        return re.search(".*".join(parts), known) is not None

    messages = listed("docs/troubleshooting.md", "message")
    assert len(messages) > 40
    assert [message for message in messages if not is_known(message)] == []


# --- Names ------------------------------------------------------------------------------------


def test_api_lists_all_layers_and_ops() -> None:
    shown = set(re.findall(r"^::: lightseq_fairseq\.(\S+)", text("docs/api.md"), re.M))
    defined = {module.stem for module in Path(ops.__file__).parent.glob("*.py")
               if " = define(" in module.read_text()}  # fmt: skip
    assert {f"layers.{name}" for name in layers.__all__} == {x for x in shown if "layers" in x}
    assert {f"ops.{stem}" for stem in defined} <= shown


@pytest.mark.parametrize("drawing", ["docs/data-flow.svg", "docs/step-timeline.svg"])
def test_files_in_a_drawing_exist(drawing: str) -> None:
    assert drawing in text("ARCHITECTURE.md")
    names = re.findall(r"[\w/]+\.py\b", text(drawing))
    assert names
    for name in names:
        assert (ROOT / "lightseq_fairseq" / name).is_file(), name


def test_the_notebook_is_short_pages_that_its_index_lists() -> None:
    pages = sorted(path.name for path in (ROOT / "docs/notebook").glob("*.md"))
    listed_pages = re.findall(r"^\| \[.*?\]\((.*?)\) \|", text("docs/notebook/README.md"), re.M)
    assert sorted([*listed_pages, "README.md"]) == pages
    for page in pages:
        assert len(text(f"docs/notebook/{page}").splitlines()) < 300, page


def test_one_version() -> None:
    version = lightseq_fairseq.__version__
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", text("CITATION.cff"), re.M))
    assert cited["version"] == version
    assert f"\n## {version} ({cited['date-released']})\n" in text("CHANGELOG.md")
