"""The list of names that are replaced in fairseq is complete, and each is replaced once and only
there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import lightseq_fairseq
from lightseq_fairseq import fairseq_compat, startup
from lightseq_fairseq.cli import doctor
from lightseq_fairseq.fairseq_compat import patching

ROOT = Path(lightseq_fairseq.__file__).parent
REGISTER = ROOT / "fairseq_compat" / "patching.py"

# Every attribute of fairseq's modules and classes, in a separate process.
SNAPSHOT = """
import sys, types
from lightseq_fairseq import fairseq_compat

def snapshot():
    found = {}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] in ROOTS]:
        owners = [(module.__name__ + ":", module)]
        for name, value in owners[0][1].__dict__.items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                owners.append((f"{module.__name__}:{name}.", value))
        for prefix, owner in owners:
            for name, value in vars(owner).items():
                if not isinstance(value, types.ModuleType) or hasattr(value, "_module"):
                    found[prefix + name] = value
                elif name in ("np", "os", "pkgutil", "torch"):
                    found[prefix + name] = value
    return found

def changes(before):
    after, gone = snapshot(), object()
    changed = {name for name in before if after.get(name, gone) is not before[name]}
    known = {name.partition(":")[0] for name in before}
    return sorted(changed | {n for n in after if n not in before and n.partition(":")[0] in known})

ROOTS = ("fairseq", "fairseq_cli", "hydra", "logging")
fairseq_compat.import_only()
import fairseq_cli.train, fairseq_cli.interactive, fairseq.sequence_scorer, hydra.core.plugins
from fairseq.models import ARCH_MODEL_REGISTRY
"""


Python = Callable[[str], list[str]]
# Runs each program that it reads in a process forked from one with an unrepaired fairseq.
FORK = """
import json, os, traceback
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            exec(json.loads(line), globals())
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    print("END", flush=True)
"""


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    """The output of code in a new Python with an unrepaired fairseq."""
    with subprocess.Popen(
        [sys.executable, "-c", SNAPSHOT + FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, startup.SWITCH: "0"}, cwd=tempfile.gettempdir(),
    ) as process:  # fmt: skip
        reader, writer = process.stdout, process.stdin
        assert reader is not None and writer is not None

        def run(code: str) -> list[str]:
            writer.write(json.dumps(code) + "\n")
            writer.flush()
            lines: list[str] = []
            while (line := reader.readline()) != "END\n":
                assert line, f"the process ended after {lines}"
                lines.append(line.rstrip("\n"))
            return lines

        yield run
        writer.close()
    assert process.returncode == 0


def test_plugins_change_nothing_in_fairseq_but_its_registries(python: Python) -> None:
    printed = python(
        "before = snapshot()\n"
        "import lightseq_fairseq.plugins\n"
        "print(len(before) > 10000, 'ls_transformer' in ARCH_MODEL_REGISTRY)\n"
        "print(changes(before), fairseq_compat._prepared)\n"
    )
    assert printed == ["True True", "[] False"]


@pytest.mark.parametrize(
    "asks",
    [
        "from fairseq import utils; utils.import_user_module(Namespace(user_dir=FOLDER))",
        "from lightseq_fairseq.base.families import TRANSLATION\n"
        "from lightseq_fairseq.plugins.flat_model import FlatModel\n"
        "class Native:\n"
        "    build_model = classmethod(lambda cls, args, task: Namespace())\n"
        "model = type('Model', (FlatModel, Native), {'family': TRANSLATION})\n"
        "model.build_model(Namespace(), None)",
    ],
    ids=["--user-dir", "a model is built"],
)
def test_hooks_come_with_who_asks_for_our_parts(python: Python, asks: str) -> None:
    printed = python(
        f"from argparse import Namespace; FOLDER = {str(ROOT / 'plugins')!r}\n{asks}\n"
        "from lightseq_fairseq.fairseq_compat import patching\n"
        "print('ls_transformer' in ARCH_MODEL_REGISTRY)\n"
        "print(*{patching.state(p) for p in patching.listed() if p.phase == 'model'})\n"
        "print(*sorted({patching.state(p) for p in patching.listed() if p.phase == 'repair'}))\n"
    )
    assert printed == ["True", "applied", "applied not needed"]


def test_what_changes_is_what_the_list_says_and_once(python: Python) -> None:
    """All phases, as in a process that trains and translates."""
    printed = python(
        "from lightseq_fairseq.fairseq_compat import patching\n"
        "before = snapshot()\n"
        "fairseq_compat.prepare()\n"
        "for phase in patching.PHASES:\n"
        "    if phase not in ('import', 'scoped'): patching.apply(phase)\n"
        "first = snapshot()\n"
        "print(*changes(before), sep='\\n')\n"
        "print('applied:')\n"
        "for p in patching.listed():\n"
        "    state = patching.state(p)\n"
        "    if state == 'applied': print(p.target, p.everywhere)\n"
        "    elif p.phase not in ('import', 'scoped', \"fairseq's trainer\", 'our trainer'):\n"
        "        assert state == 'not needed', p\n"
        "import importlib\n"
        "importlib.reload(patching)\n"
        "for phase in patching.PHASES:\n"
        "    if phase not in ('import', 'scoped') and 'trainer' not in phase:\n"
        "        patching.apply(phase)\n"
        "assert not changes(first), changes(first)\n"
    )
    end = printed.index("applied:")
    changed, listed = printed[:end], dict(line.split() for line in printed[end + 1 :])
    names = {target.rpartition(":")[2] for target in listed}
    for name in changed:  # in the defining module, or in one that has imported the name
        assert name in listed or name.rpartition(":")[2] in names or _is_heir(name, listed), name
    for target in listed:
        assert any(name.endswith(target.rpartition(":")[2]) for name in changed), target


def _is_heir(name: str, listed: dict[str, str]) -> bool:
    """Whether a subclass has a method that the list replaces in all subclasses."""
    method = name.rpartition(".")[2]
    return any(t.endswith("." + method) and where == "True" for t, where in listed.items())


def test_every_entry_refers_to_what_is_there() -> None:
    fairseq_compat.prepare()
    for patch in patching.listed():
        assert patch.phase in patching.PHASES and patch.why
        for name in filter(None, (patch.by, patch.when)):
            assert callable(patching._ours(name)) or patch.instead, patch
    assert len(set(patching.listed())) == len(patching.listed())
    assert {patch.phase for patch in patching.listed()} == set(patching.PHASES)


# Packages whose names we may not assign to; such replacements belong in the list.
THEIRS = ("fairseq", "fairseq_cli", "hydra", "omegaconf", "argparse", "dataclasses", "warnings")
SETTINGS = ("torch._dynamo.config", "torch._functorch.config", "torch.backends")


def _assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, target) of each assignment to an attribute of an object from another package."""
    theirs: set[str] = set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in (*THEIRS, "torch"):
                    theirs.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
            *THEIRS,
            "torch",
        ):
            theirs |= {alias.asname or alias.name for alias in node.names}
    for node in nodes:  # variables that refer to such an object
        if isinstance(node, ast.Assign) and _root(node.value) in theirs:
            theirs |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in nodes:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "of_any_name", lineno=node.lineno)]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and _root(each) in theirs:
                    yield each.lineno, ast.unparse(each)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_nobody_else_replaces_names_of_fairseq() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in (*ROOT.rglob("*.py"), *(ROOT / "cli").rglob("*.py"))
        if path != REGISTER
        for line, target in _assigned(ast.parse(path.read_text(encoding="utf-8")))
        if not target.startswith(SETTINGS)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "utils.move = f", "utils.x.move, other = f, g", "setattr(utils, name, f)", "del utils.move",
        "alias = utils.Klass\nalias.method = f",
    ],
)  # fmt: skip
def test_a_replacement_by_hand_is_seen(line: str) -> None:
    assert list(_assigned(ast.parse(f"from fairseq import utils\n{line}")))


@pytest.fixture(name="place")
def listed_place(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for a module of fairseq, with its own list of replacements."""

    class Parent:
        def name(self) -> str:
            return "parent"

    class Child(Parent):
        def name(self) -> str:
            return "child of " + super().name()

    module = SimpleNamespace(Parent=Parent, Child=Child, value=1)
    entries = (
        patching.Patch("repair", "place:Parent.name", "place:shout", "", everywhere=True),
        patching.Patch("launcher", "place:value", "place:two", "", instead=True, when="place:no"),
        patching.Patch("model", "place:gone", "place:two", "", instead=True),
        patching.Patch("scoped", "place:Child.name", "place:shout", ""),
    )
    ours = {"shout": lambda original, self: original(self) + "!", "two": 2, "no": lambda: False}
    monkeypatch.setitem(sys.modules, "place", module)  # type: ignore[arg-type]
    monkeypatch.setattr(patching, "listed", lambda: entries)
    monkeypatch.setattr(patching, "_ours", lambda name: ours[name.partition(":")[2]])
    return module


def test_a_name_is_replaced_once_and_in_subclasses(place: Any) -> None:
    for _ in range(2):
        patching.apply("repair")
    assert (place.Parent().name(), place.Child().name()) == ("parent!", "child of parent!!")
    assert place.Parent.name.__name__ == "name"
    assert patching.state(patching.listed()[0]) == "applied"


def test_what_is_not_needed_or_not_there_is_left_alone(place: Any) -> None:
    patching.apply("launcher")
    assert place.value == 1 and patching.state(patching.listed()[1]) == "not needed"
    with pytest.raises(AttributeError, match="gone"):
        patching.apply("model")
    assert patching.state(patching.listed()[2]) == "not applied here"


def test_a_block_puts_back_what_was_there(place: Any) -> None:
    before = vars(place.Child)["name"]
    with pytest.raises(ValueError), patching.within("place:Child.name", lambda original, self: "x"):
        assert place.Child().name() == "x" and patching.state(patching.listed()[3]) == "applied"
        raise ValueError
    assert vars(place.Child)["name"] is before
    assert patching.state(patching.listed()[3]) == "undone"
    with pytest.raises(ValueError, match="unpack"), patching.within("place:value", 3):
        pass


def test_the_doctor_prints_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"lightseq_fairseq": {"version": "", "path": ""}, "python": {"version": "", "path": ""}}
    nothing = {**dict.fromkeys(doctor.SECTIONS), **facts}
    monkeypatch.setattr(doctor, "diagnose", lambda: (nothing, []))
    short, long = (CliRunner().invoke(doctor.main, words) for words in ([], ["--verbose"]))
    assert short.exit_code == long.exit_code == 0 and "fairseq.utils" not in short.output
    for patch in patching.listed():
        place = long.output.index(f"  {patch.target} (")
        assert place < long.output.index(f"{patch.why} [{patch.by}]", place)
    for phase, when in patching.PHASES.items():
        assert f"\n{phase}: {when}\n" in long.output
