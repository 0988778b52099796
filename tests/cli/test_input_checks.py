"""``cli.checks.CHECKS`` is the whole list of checks."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from argparse import Namespace
from collections.abc import Iterator

import pytest

from lightseq_fairseq.cli import checks
from lightseq_fairseq.cli.checks import CHECKS, FAIRSEQ, SETTINGS, WORDS, Check, Request, values
from lightseq_fairseq.cli.words.registries import data_of
from lightseq_fairseq.patches import PATCHES

from fairseq.tasks import TASK_REGISTRY  # isort: skip

COMMANDS = {"train", "generate", "interactive", "validate", "eval-lm"}


def of_requests() -> Iterator[str]:
    """The functions of the folder that take only a request."""
    for found in pkgutil.iter_modules(checks.__path__):
        module = importlib.import_module(f"{checks.__name__}.{found.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                parameters = inspect.signature(function).parameters.values()
                if [p.annotation for p in parameters] == ["Request"]:
                    yield f"{found.name}:{name}"


def test_every_check_is_listed_once() -> None:
    listed = [check.function for moment in (WORDS, SETTINGS) for check in CHECKS[moment]]
    assert sorted(listed) == sorted(of_requests())


def test_the_checks_inside_fairseq_are_those_that_patches_install() -> None:
    installed = {patch.by.removeprefix("cli.checks.") for patch in PATCHES}
    listed = [check.function for check in CHECKS[FAIRSEQ]]
    assert sorted(listed) == sorted(name for name in installed if name.startswith("inside_"))


def test_commands_and_kinds_of_data_exist() -> None:
    listed = [check for moment in CHECKS.values() for check in moment]
    assert {name for check in listed for name in check.commands.split()} <= COMMANDS
    kinds = {data_of(task) for task in TASK_REGISTRY}
    assert {check.data for check in listed} - {""} == kinds - {None}


@pytest.mark.parametrize(
    ("command", "task", "expected"),
    [("validate", "translation", ["a", "b", "d"]), ("eval-lm", "language_modeling", ["a", "c"])],
)
def test_the_checks_of_a_command_run_in_the_order_of_the_list(
    monkeypatch: pytest.MonkeyPatch, command: str, task: str, expected: list[str]
) -> None:
    ran: list[str] = []
    table = (
        Check("values:a"), Check("values:b", "train validate"),
        Check("values:c", data="running text"), Check("values:d", "validate", "sentence pairs"),
    )  # fmt: skip
    for name in "abcd":
        monkeypatch.setattr(values, name, lambda _, name=name: ran.append(name), raising=False)
    monkeypatch.setitem(CHECKS, SETTINGS, table)
    checks.run(SETTINGS, Request(command=command, args=Namespace(task=task)))
    assert ran == expected
