"""Write docs/flags.md: what each setting of fairseq's commands does in this package.

    python -m scripts.flags [--check]

The settings come from fairseq's own parsers: all settings of translation, and those that language
models, RoBERTa and BART add. The answers come from ``plugins.settings``.
It also writes cli/words/completions.json, the flags and names that shells complete.
``--check`` writes nothing and fails if a file is out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from lightseq_fairseq import plugins  # noqa: F401  (prepares fairseq)

# isort: split
from fairseq import options, registry
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.dataclass.configs import CommonEvalConfig, DatasetConfig, EvalLMConfig
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.optim.bmuf import FairseqBMUF

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import (
    BART,
    LANGUAGE_MODEL,
    ROBERTA,
    TRANSLATION,
    Family,
    Task,
    named,
)
from lightseq_fairseq.cli import generate, train
from lightseq_fairseq.cli.checks import flags
from lightseq_fairseq.cli.words import command_lines, registries
from lightseq_fairseq.cli.words.argv import flag_of
from lightseq_fairseq.cli.words.command_lines import actions_of
from lightseq_fairseq.cli.words.completions import LIST
from lightseq_fairseq.plugins import settings
from lightseq_fairseq.plugins.settings import FALLBACK, REFUSED, SEVERAL_RANKS, UNREAD, WORKS
from scripts.flag_texts import (
    BART_INTRODUCTION,
    BART_NOTES,
    INTRODUCTION,
    LANGUAGES_INTRODUCTION,
    LANGUAGES_NOTES,
    NOTES,
    OWN_INTRODUCTION,
    ROBERTA_INTRODUCTION,
    ROBERTA_NOTES,
    TEXT_INTRODUCTION,
    TEXT_NOTES,
    WRONG_INPUT,
)

TABLE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "validate": options.get_validation_parser,
    "interactive": options.get_interactive_generation_parser,
    "eval-lm": options.get_eval_lm_parser,
}
COMMANDS = ("train", "generate", "validate", "interactive")  # the columns of translation
# Registries for which the settings of all members are listed. Other optimizers and criteria are not
# listed: all their settings have the same answer, which the introduction gives.
CHOICES = ("lr_scheduler", "tokenizer", "bpe", "scoring")

# Settings that define the ranks; other settings for several ranks are in ``settings.WITHOUT``.
RANKS = """
--distributed-world-size --distributed-rank --distributed-backend --distributed-init-method
--distributed-port --device-id --distributed-no-spawn --grouped-shuffling
"""
# Settings that use fairseq's layers.
OTHER_LAYERS = ("--retain-dropout",)


class Row(NamedTuple):
    """One row: a setting.

    Attributes:
        aliases: all names of the setting.
        commands: the commands that have it; of another family than translation, its columns.
        choices: the choices that add this setting, for example "--lr-scheduler cosine"; empty if a
            command has the setting without them.
    """

    aliases: list[str]
    commands: list[str]
    choices: list[str]


ALONE = Row([], [], [])


class Section(NamedTuple):
    """The section of a family other than translation: the settings of its tasks and its models.

    Attributes:
        columns: a command, perhaps with a task (otherwise the family's first), and what else is
            listed for it: classes of settings, and settings of the first table that have another
            answer here. Not listed: settings that a class copies from another one (fairseq's
            ``II``).
        above: whether settings of the tables above are left out, except those named in ``columns``.
    """

    family: Family
    columns: dict[str, tuple[Any, ...]]
    introduction: str
    notes: dict[str, str]
    above: bool = False


_HEADS = ("--pooler-activation-fn", "--pooler-dropout", "--spectral-norm-classification-head")
OF_TEXT = Section(
    LANGUAGE_MODEL,
    {"train": (), "eval-lm": (EvalLMConfig, CommonEvalConfig, DatasetConfig)},
    TEXT_INTRODUCTION,
    TEXT_NOTES,
)
OF_ROBERTA = Section(
    ROBERTA,
    {
        "train masked_lm": ("--dataset-impl",),
        "train sentence_prediction": ("--dataset-impl",),
        "validate masked_lm": ("--dataset-impl", "--bpe"),
        "validate sentence_prediction": ("--dataset-impl",),
    },
    ROBERTA_INTRODUCTION,
    ROBERTA_NOTES,
)
_UNREAD_WITH_LANGUAGES = ("--truncate-source", "--num-batch-buckets", "--required-seq-len-multiple")
OF_BART = Section(
    BART,
    {
        "train translation": (),
        "train translation_from_pretrained_bart": _UNREAD_WITH_LANGUAGES,
        "train sentence_prediction": ("--add-prev-output-tokens", *_HEADS),
        "train denoising": ("--bpe",),
        "train multilingual_denoising": ("--bpe", "--shorten-method", "--shorten-data-split-list"),
    },
    BART_INTRODUCTION,
    BART_NOTES,
    above=True,
)
OF_LANGUAGES = Section(
    TRANSLATION,
    {"train translation_multi_simple_epoch": ()},
    LANGUAGES_INTRODUCTION,
    LANGUAGES_NOTES,
    above=True,
)
# After the table of translation
SECTIONS = OF_TEXT, OF_ROBERTA, OF_BART, OF_LANGUAGES


def translation_settings() -> dict[str, Row]:
    """Return the rows by the setting's name."""
    found: dict[str, Row] = {}
    plain: set[str] = set()
    for command in COMMANDS:
        parser = parser_of(command, TRANSLATION)
        plain |= {flags.name(action) for action in parser._actions}
        for action, choice in [*((a, "") for a in parser._actions), *of_choices(command)]:
            name = flags.name(action)
            row = found.setdefault(name, Row(list(action.option_strings), [], []))
            if command not in row.commands:
                row.commands.append(command)
            if name not in plain and choice not in row.choices:
                row.choices.append(choice)
        for name in plain:
            found[name].choices.clear()
    return found


def of_choices(command: str) -> Iterator[tuple[argparse.Action, str]]:
    """Yield (setting, choice) for the settings that only a choice, or --use-bmuf, adds."""
    for kind in CHOICES:
        for chosen, cls in registry.REGISTRIES[kind]["registry"].items():
            for action in actions_of(cls):
                yield action, f"--{kind.replace('_', '-')} {chosen}"
    if command == "train":
        for action in actions_of(FairseqBMUF):
            yield action, "--use-bmuf"


def task_of(column: str, family: Family) -> Task:
    """The task of a column of a family."""
    name = column.partition(" ")[2]
    return families.tasks()[name] if name else family.tasks[0]


def parser_of(column: str, family: Family, *words: str) -> argparse.ArgumentParser:
    """Return a command's parser with the settings of a task and of the family's models.

    words: a part of a command line, which may add further settings.
    """
    command, task = column.partition(" ")[0], task_of(column, family)
    parser, recipe, line = PARSERS[command](), task.recipe, "data"
    if command in ("train", "validate"):
        line += f" --task {task.name}"
    if command == "train":
        arch = next(name for name, cls in ARCH_MODEL_REGISTRY.items() if cls is named(family.ours))
        line += f" --arch {arch} {recipe.optimizer} {recipe.criterion} {recipe.schedule}"
    elif "--criterion" in task.read:
        line += f" {recipe.criterion}"
    options.parse_args_and_arch(parser, [*shlex.split(line), *words])
    return parser


def family_settings(section: Section) -> dict[str, Row]:
    """Return the rows of a section by the setting's name."""
    found: dict[str, Row] = {}
    for column, others in section.columns.items():
        task = task_of(column, section.family)
        sources = [named(task.place), *others]
        if column.startswith("train"):
            sources.append(named(section.family.native))
        if "--criterion" in task.read:
            sources.append(CRITERION_REGISTRY[task.criteria[0]])
        listed = {name for source in sources for name in _names_of(source)}
        if section.above:
            above = {*translation_settings(), *family_settings(OF_ROBERTA)} - {*_HEADS}
            listed = listed - above | {*others}
        for action in parser_of(column, section.family)._actions:
            if flags.name(action) in listed:
                row = found.setdefault(flags.name(action), Row(list(action.option_strings), [], []))
                row.commands.append(column)
    return found


def _names_of(source: Any) -> set[str]:
    """The settings of a class of settings, of another class, or this setting."""
    if isinstance(source, str):
        return {source}
    if not dataclasses.is_dataclass(source):
        return {flags.name(action) for action in actions_of(source)}
    parser = argparse.ArgumentParser(add_help=False)
    gen_parser_from_dataclass(parser, source())
    return {flags.name(action) for action in parser._actions}


def answer(column: str, name: str, row: Row, family: Family = TRANSLATION) -> tuple[str, str]:
    """Return how a command treats a setting: one of the four words, and the reason or "".

    column: of ``COMMANDS`` or of the family's section.
    """
    command, _, task = column.partition(" ")
    if name in settings.unread(command, task, family):
        return UNREAD, ""
    refused = settings.refused(command)
    if name in refused and name not in family.supports:
        return REFUSED, refused[name]
    if row.choices:
        return answer(column, row.choices[0].split()[0], ALONE, family)
    whole = settings.WITHOUT.get(name, "")
    if whole not in ("", SEVERAL_RANKS):
        of_whole = answer(column, whole.split()[0], ALONE, family)[0]
        return REFUSED if is_refused_choice(whole) else of_whole, f"part of `{whole}`"
    fallbacks = {flag: fallback.reason for flag, fallback in settings.rows(command, FALLBACK)}
    if command == "train" and (whole == SEVERAL_RANKS or name in RANKS.split()):
        return FALLBACK if name in fallbacks else WORKS, "with several ranks"
    if name in fallbacks:
        return FALLBACK, fallbacks[name]
    return (FALLBACK if name in OTHER_LAYERS else WORKS), ""


def is_refused_choice(words: str) -> bool:
    """Whether our models refuse a value, such as "--ddp-backend slowmo", of a setting that they do
    not refuse with every value."""
    flag, _, value = words.partition(" ")
    args = argparse.Namespace(**{flag.removeprefix("--").replace("-", "_"): value})
    rows = settings.rows(settings.MODEL, REFUSED)
    return any(flag == name and settings.is_used(name, row, args) for name, row in rows)


def own_flags() -> dict[str, str]:
    """Return the help of each flag that only lightseq-train has."""
    shared = {option.name for option in generate.main.params}
    options = [option for option in train.main.params if isinstance(option, click.Option)]
    return {
        option.opts[0]: option.help or ""
        for option in options
        if option.name not in shared or option.name == "native"
    }


def text() -> str:
    """Return the text of docs/flags.md."""
    translation = table(translation_settings(), list(COMMANDS), answer, NOTES)
    pages = [INTRODUCTION, *translation, ""]
    for section in SECTIONS:
        answers = functools.partial(answer, family=section.family)
        rows = table(family_settings(section), list(section.columns), answers, section.notes)
        pages += [section.introduction, *rows, ""]
    pages += [OWN_INTRODUCTION, "| flag | |", "|---|---|"]
    pages += [f"| `{name}` | {words} |" for name, words in own_flags().items()]
    pages += ["", WRONG_INPUT]
    return "\n".join(pages)


def table(
    rows: dict[str, Row], commands: list[str],
    answer: Callable[[str, str, Row], tuple[str, str]], notes: dict[str, str],
) -> Iterator[str]:  # fmt: skip
    """Yield the lines of a table: settings with the answer of each command."""
    yield f"| flag | {' | '.join(commands)} | |"
    yield "|---|" + "---|" * (len(commands) + 1)
    for name, row in sorted(rows.items(), key=lambda item: item[0].lstrip("-")):
        answers = {command: answer(command, name, row) for command in row.commands}
        words = [answers[command][0] if command in answers else "-" for command in commands]
        aliases = [f"`{alias}`" for alias in [name, *row.aliases]]
        remarks = [reason for _, reason in answers.values()] + [with_choices(row.choices)]
        remarks.append(notes.get(name, ""))
        cells = [", ".join(dict.fromkeys(aliases)), *words]
        yield f"| {' | '.join(cells)} | {'; '.join(filter(None, dict.fromkeys(remarks)))} |"


def with_choices(choices: list[str]) -> str:
    return "with " + ", ".join(f"`{choice}`" for choice in choices) if choices else ""


def completions() -> str:
    """Return the text of the list from which shells complete, see ``cli.words.completions``."""
    choices: dict[str, str] = {}

    def listed(actions: Sequence[argparse.Action], but: Sequence[str] = ()) -> str:
        found = {f: a for a in actions for f in a.option_strings if f.startswith("--")}
        choices.update({f: " ".join(map(str, a.choices)) for f, a in found.items() if a.choices})
        return " ".join(sorted(found.keys() - {*but}))

    of_commands = {
        command: listed(make()._actions, command_lines.own_flags(command))
        for command, make in {**PARSERS, "preprocess": options.get_preprocessing_parser}.items()
    }
    components: dict[str, dict[str, str]] = {}
    for kind, registered in registries.components().items():
        names: dict[str, list[str]] = {}
        for name, component in sorted(registered.items()):
            theirs = ""
            with contextlib.suppress(Exception):  # some need packages that may be missing
                theirs = listed(actions_of(component))
            names.setdefault(theirs, []).append(name)
        components[flag_of(kind)] = {" ".join(same): theirs for theirs, same in names.items()}
        choices.pop(flag_of(kind), None)
    found = {"flags": of_commands, "choices": choices, "components": components}
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is out of date"
    )
    check = parser.parse_args().check
    files = {TABLE: text(), LIST: completions()}
    late = {p: t for p, t in files.items() if not p.is_file() or p.read_text() != t}
    for path, expected in late.items():
        if check:
            print(f"{path.name} is out of date: run python -m scripts.flags", file=sys.stderr)
        else:
            path.write_text(expected)
    return int(check and bool(late))


if __name__ == "__main__":
    sys.exit(main())
