"""A dotted name in a docstring or a comment, such as `step.objectives`, names something there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("lightseq_fairseq", "cli", "scripts")
    for path in (ROOT / folder).rglob("*.py")
}


@functools.cache
def _names(module: str) -> set[str]:
    nodes = [*ast.walk(ast.parse(FILES[module].read_text()))]
    return {getattr(node, field, "") for node in nodes for field in ("id", "attr", "arg", "name")}


def _variables(path: Path) -> set[str]:
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    stored = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return stored | {x.arg for x in nodes if isinstance(x, ast.arg)}


def unresolved(path: Path) -> list[str]:
    """The dotted names in backquotes that begin with a module of ours, which lacks the rest."""
    wrong, variables = [], _variables(path)
    for name in re.findall(r"`((?:[a-z_]\w*\.)+\w+)(?:\(\))?`", path.read_text()):
        parts = name.removeprefix("lightseq_fairseq.").split(".")
        if parts[0] in variables or parts[-1] == "py":
            continue
        for end in range(len(parts), 0, -1):
            start = "." + ".".join(parts[:end])
            if places := [known for known in FILES if f".{known}".endswith(start)]:
                here = end == len(parts) or any(parts[end] in _names(place) for place in places)
                wrong += [] if here else [name]
                break
    return wrong


def test_names_in_texts_exist() -> None:
    wrong = {module: unresolved(path) for module, path in FILES.items()}
    assert not {module: names for module, names in wrong.items() if names}


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    text = '"""See `memory.packing`, `packing.Layout`, `step.Count`, ``cli.starts.launch``."""'
    (tmp_path / "new.py").write_text(text)
    assert unresolved(tmp_path / "new.py") == ["step.Count", "cli.starts.launch"]
