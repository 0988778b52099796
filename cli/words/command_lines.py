"""The flags of each command, and one-sentence errors for command lines that are wrong.

Most of this code runs only if a command line is wrong, or to list the flags of a command.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.words import completions, registries, synonyms
from lightseq_fairseq.cli.words.argv import flag_of, value, with_options
from lightseq_fairseq.fairseq_compat import patching

# Command -> fairseq's function that makes its parser; None if fairseq has no such command.
_PARSERS = {
    "train": "get_training_parser",
    "hydra-train": None,
    "generate": "get_generation_parser",
    "interactive": "get_interactive_generation_parser",
    "validate": "get_validation_parser",
    "eval-lm": "get_eval_lm_parser",
    "preprocess": "get_preprocessing_parser",
    "average": None,
    "score": None,
    "export": None,
}
_DASHES = "-\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}"  # a word processor makes others of two
_DATA = ("data", "data-bin", "data-dir", "data-folder", "data-path")


@contextmanager
def refused_in_a_sentence(command: str) -> Iterator[None]:
    """Within the block parsers raise UserError; argparse would print all flags and exit."""

    def error(original: Any, parser: argparse.ArgumentParser, message: str) -> None:
        raise UserError(_sentence(command, parser, message))

    with patching.within("argparse:ArgumentParser.error", error):
        yield


def with_all_flags(
    command: str, parse: Callable[..., Any], parser: argparse.ArgumentParser, words: list[str]
) -> None:
    """Prints the help of all flags that the command takes, and exits.

    fairseq's own --help does not show the flags of the arch, the task, the optimizer, ... that the
    command names: it is printed before fairseq adds them.

    Args:
        parse: fairseq's ``parse_args_and_arch``.
        words: the command line without --help.
    """
    seen: list[argparse.ArgumentParser] = []

    def show(parser: argparse.ArgumentParser) -> None:
        seen.append(parser)  # fairseq calls this twice: before and after it adds these flags
        if len(seen) == 2:
            parser.usage = f"lightseq-{command} [flags]"
            parser.epilog = "docs/train.md (Flags that most runs set) explains the common flags."
            parser.print_help()
            parser.exit()

    parse(parser, words, modify_parser=show)


def _sentence(command: str, parser: argparse.ArgumentParser, message: str) -> str:
    """Our error sentence for argparse's ``message``."""
    found = re.match(r"unrecognized arguments: (\S+)", message)
    if found is not None:
        return _unknown(command, parser, found[1])
    found = re.fullmatch(r"the following arguments are required: (.*)", message)
    if found is not None:
        if found[1] == "data":
            return (
                f"The data folder is missing: add it (lightseq-{command} --help shows a complete "
                "command)."
            )
        return f"lightseq-{command} needs {found[1]}: add it (--fairseq-help explains it)."
    found = re.match(r"argument (\S+): (.*)", message, re.DOTALL)
    if found is None:
        return ended(message)
    flag, says = found[1].rpartition("/")[2], found[2]
    if typed := re.match(r"invalid (\w+) value: (.*)", says):
        wanted = {"int": "a whole number", "float": "a number"}.get(typed[1], f"of type {typed[1]}")
        return f"{flag} cannot be {typed[2].strip(chr(39))}: it must be {wanted}."
    if choice := re.match(r"invalid choice: (.*) \(choose from (.*)\)", says):
        name, known = choice[1].strip("'"), choice[2].replace("'", "")
        return f"{flag} cannot be {name}: choose one of {known}."
    if re.match(r"expected (one|at least one) argument", says):
        return f"{flag} has no value: write one after it."
    if re.match("ignored explicit argument", says):
        return f"{flag} takes no value: remove the = and what follows it."
    return ended(f"{flag}: {says}")


def ended(text: str) -> str:
    """``text`` on one line, with a full stop if it has no end."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else text + "."


def _unknown(command: str, parser: argparse.ArgumentParser, word: str) -> str:
    """The sentence for a word that the command does not accept."""
    flag, program = word.partition("=")[0], f"lightseq-{command}"
    if not flag.startswith("-"):
        return (
            f"{program} does not expect the argument {word}: remove it, or check how many values "
            "the flag before it takes."
        )
    known = set(parser._option_string_actions) | own_flags(command)
    has_name = _having(program, flag) or synonyms.synonym(flag, known)
    component = None if has_name else _component_with(flag, known)
    if component is not None:
        return (
            f"{flag} is a flag of {component}, which this command does not use: use {component}, "
            f"or remove {flag}."
        )
    return unknown_flag(program, flag, known, "--fairseq-help lists all flags.")


def wrong_flag(command: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> str | None:
    """The sentence for the first flag of ``words``, which name no arch, that no arch has; None if
    there is none, or a --user-dir may have it."""
    if value(words, ("--user-dir",)) is not None:
        return None
    complete = with_options(words, ["--arch", "ls_transformer"])
    known = {*completions.flags(command, complete), *completions.of_archs(), *own_flags(command)}
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known:
            return _unknown(command, parser, flag)
    return None


def mistyped(
    program: str, words: Sequence[str], known: Callable[[], Collection[str]]
) -> str | None:
    """The sentence for the first flag of ``words`` that begins with other dashes than two, such as
    -arch, or that names the data folder, which has no flag; None if there is none.

    argparse reads -arch as -a with the value rch.

    Args:
        known: returns the flags of ``program``.
    """
    for word in words[: words.index("--")] if "--" in words else words:
        flag = word.partition("=")[0]
        name = flag.lstrip(_DASHES)
        two = f"--{name}"
        if len(name) > 1 and flag not in (name, two) and two in known():
            return f"{program} has no flag {flag}: did you mean {two}?"
        if two == flag and name in _DATA and _takes_data(program) and flag not in known():
            return (
                f"{program} has no flag {flag}: write the data folder without a flag, as in "
                f"{program} data-bin."
            )
    return None


def _takes_data(program: str) -> bool:
    """Whether the command takes the data folder as a word without a flag."""
    command = program.rpartition(" ")[2].removeprefix("lightseq-")
    return command != "preprocess" and _PARSERS.get(command) is not None


def unknown_flag(program: str, flag: str, known: set[str], otherwise: str) -> str:
    """The sentence for a flag that ``program`` does not have.

    It ends with the commands that have the flag, or with a similar flag of this program, or with
    ``otherwise``.

    Args:
        known: the flags of ``program``.
    """
    having = _having(program, flag)
    close = synonyms.nearest(flag, known)
    if having:
        otherwise = f"it is a flag of {_listed(having)}."
    elif close:
        otherwise = f"did you mean {close[0]}?"
    return f"{program} has no flag {flag}: {otherwise}"


def _having(program: str, flag: str) -> list[str]:
    """Other commands that have the flag."""
    return [name for name in _PARSERS if f"lightseq-{name}" != program and flag in _flags(name)]


def _listed(commands: list[str]) -> str:
    names = [f"lightseq-{name}" for name in commands]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _flags(command: str) -> set[str]:
    """Flags of a command for any task, model, ...; only our own if fairseq is missing."""
    name, found = _PARSERS[command], own_flags(command)
    with contextlib.suppress(UserError):
        if name is not None:
            fairseq_compat.prepare()
            from fairseq import options

            found |= set(getattr(options, name)()._option_string_actions)
    return found


def own_flags(command: str) -> set[str]:
    """The command's own click options."""
    main = importlib.import_module(f"lightseq_fairseq.cli.{command.replace('-', '_')}").main
    return {flag for parameter in main.params for flag in parameter.opts if flag.startswith("-")}


def _component_with(flag: str, known: set[str]) -> str | None:
    """An arch, a task, an optimizer, ... that has the flag, such as ``--optimizer adagrad``."""
    for kind, registry in registries.components().items():
        if (whose := flag_of(kind)) in known:
            for name, component in registry.items():
                with contextlib.suppress(Exception):  # some need packages that may be missing
                    if any(flag in action.option_strings for action in actions_of(component)):
                        return f"{whose} {name}"
    return None


def actions_of(component: Any) -> list[argparse.Action]:
    """The flags that a registered class adds, found as in fairseq's ``parse_args_and_arch``."""
    from fairseq.dataclass.utils import gen_parser_from_dataclass

    parser = argparse.ArgumentParser(add_help=False)
    settings = vars(component).get("__dataclass")
    if hasattr(component, "add_args"):
        component.add_args(parser)
    elif settings is not None:
        gen_parser_from_dataclass(parser, settings())
    return parser._actions
