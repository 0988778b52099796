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

TABLE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "validate": options.get_validation_parser,
    "interactive": options.get_interactive_generation_parser,
    "eval-lm": options.get_eval_lm_parser,
}
COMMANDS = ("train", "generate", "validate", "interactive")  # the columns of translation
ROBERTA_NOTES = {
    "data": "in masked_lm `data:data2` for an epoch each",
    "--activation-fn": "relu, gelu, gelu_accurate; others are refused",
    "--bpe": "in validate, for `--mask-whole-words`",
    "--layernorm-embedding": "the arch has it, except `ls_roberta_prenorm`",
    "--mask-whole-words": "with `--bpe`; training refuses it without",
    "--max-positions": "in sentence_prediction also the longest sample",
    "--num-classes": "in validate another number than in training is a new head",
}
BART_NOTES = {
    "--add-prev-output-tokens": "needed: the decoder reads the source; the recipe sets it",
    "--bpe": "finds words for `--mask-length word` and `span-poisson`; `gpt2` also finds sentences",
    "--langs": "all languages of the pre-training, in its order; needed except in "
    "multilingual_denoising, which finds them in the data folder",
    "--mask-length": "with fairseq's default, `subword`, `--replace-length` must be 0 or 1",
    "--permute-sentences": "in denoising only `--bpe gpt2` finds sentences",
    "--rotate": "fairseq's default is 0.5; the recipe sets 0",
}
LANGUAGES_NOTES = {
    "--enable-lang-ids": "fairseq fails with it: no model of translation reads the ids",
    "--keep-inference-langtok": "in generate and interactive, the output has the language's token",
    "--langs": "the order of the rows; by default sorted names",
    "--lang-dict": "as `--langs`, a language on each line; the checkpoint has the list",
    "--sampling-method": "the recipe sets `temperature`; `RoundRobin` samples nothing",
    "--virtual-epoch-size": "also resumes within a pass, where fairseq reads other pairs",
}
TEXT_NOTES = {
    "data": "of `lightseq-preprocess --only-source`; `data:data2` for an epoch each",
    "--activation-fn": "relu, gelu, gelu_accurate; others are refused",
    "--adaptive-softmax-cutoff": "with `--criterion adaptive_loss`, and not without it",
    "--decoder-layers-to-keep": "the number of layers, as in fairseq",
    "--pad-to-fixed-length": "in validation and eval-lm; training packs blocks: there are no pads",
    "--post-process": "`'@@ '`, for scores of whole words; `--remove-bpe` alone has no effect, and "
    "a note says so; others are refused",
    "--tokens-per-sample": "more than the model's positions are refused",
}
# Registries for which the settings of all members are listed. Other optimizers and criteria are not
# listed: all their settings have the same answer, which the introduction gives.
CHOICES = ("lr_scheduler", "tokenizer", "bpe", "scoring")

# Settings that define the ranks; other settings for several ranks are in ``settings.WITHOUT``.
RANKS = """
--distributed-world-size --distributed-rank --distributed-backend --distributed-init-method
--distributed-port --device-id --distributed-no-spawn --grouped-shuffling
"""
# A refused choice of a setting that is otherwise not refused; settings that use fairseq's layers.
NOT_WITH_OURS = ("--ddp-backend fully_sharded",)
OTHER_LAYERS = ("--retain-dropout",)
_BEGINS = (
    "the model has the sizes of the file; a file that does not exist is refused, where fairseq "
    "trains from scratch"
)
NOTES = {
    **dict.fromkeys(("--restore-file", "--continue-once", "--finetune-from-model"), _BEGINS),
    "--sampling": "on a GPU it draws from fairseq's distributions, with other random numbers",
    "--arch": "one of the `ls_` archs; with another one: fallback",
    "--optimizer": "`ls_adam` and `adafactor`; with another one: fallback; `composite` is refused",
    "--criterion": "`ls_label_smoothed_cross_entropy`, `ls_cross_entropy`; with another one: "
    "fallback; those of other tasks are refused",
    "--activation-fn": "relu, gelu, gelu_accurate, silu; others are refused",
    "--ddp-backend": "fallback with `slowmo`; `fully_sharded` is refused: parameters live in one "
    "flat buffer; the others make no difference to the captured step",
    "--zero-sharding": "`os` with `--optimizer ls_adam` in the captured step; refused with "
    "`ls_adam` in fairseq's own step",
    "--fp32-reduce-scatter": "16-bit gradients are sent and summed as float32, in fairseq only "
    "with `--ddp-backend fully_sharded`; no effect in fairseq's own step",
    "--distributed-backend": "without GPUs it is gloo, and nccl is refused",
    "--sacrebleu": "with `--bpe` it avoids a warning",
    "--fp16": "refused on a CPU, except with `--fp16-no-flatten-grads`",
    "--fp16-no-flatten-grads": "sets the format of the optimizer state in checkpoints",
    "--profile": "refused without a GPU",
    "--write-checkpoints-asynchronously": "refused if the package iopath is missing",
    "--retain-dropout": "fairseq's own layers",
    "--fix-batches-to-gpus": "for `--dataset-impl cached`, which loads sentences in advance",
    "--all-gather-list-size": "for logs that cannot be summed",
    **dict.fromkeys(
        (
            "--bucket-cap-mb",
            "--broadcast-buffers",
            "--find-unused-parameters",
            "--gradient-as-bucket-view",
        ),
        "for the wrapper around the model, which the captured step does without",
    ),
    "--aim-repo": "refused if the package aim is missing",
    "--azureml-logging": "refused if the package azureml-core is missing",
    "--tensorboard-logdir": "refused if the package tensorboard is missing",
    "--wandb-project": "refused if the package wandb is missing",
    "--required-seq-len-multiple": "in validation; training packs sentences: nothing to round up",
    "--left-pad-source": "in validation; training packs sentences, without pads",
    "--left-pad-target": "in validation; training packs sentences, without pads; refused with "
    "`--num-batch-buckets` or `--score-reference`",
    "--ignore-prefix-size": "with `--left-pad-target` it counts the pads of short sentences, as in "
    "fairseq, and training uses fairseq's own step",
    "--max-tokens": "at least 1; in fairseq a smaller value means no limit",
    "--batch-size": "at least 1; in fairseq a smaller value means no limit",
    "--replace-unk": "in generate only with `--dataset-impl raw`, because binarised data do not "
    "contain unknown words, and refused with `--bpe` or `--tokenizer`; in interactive fairseq "
    "copies `<unk>` itself",
    **dict.fromkeys(
        ("--sacrebleu-tokenizer", "--sacrebleu-lowercase", "--sacrebleu-char-level"),
        "in generate also for the last line",
    ),
    "--eval-bleu": "sacrebleu's tokenizer is that of the target language; in fairseq it is 13a",
    "--export": "no change in our layers; fairseq's own layers are built for TorchScript",
    "--tokenizer": "kept in the checkpoint for `torch.hub`",
    "--bpe": "kept in the checkpoint for `torch.hub`",
    "--scoring": "kept in the checkpoint; in generate, sacrebleu, chrf and wer count an unknown "
    "word as one word, which is never right",
    "--num-shards": "`--distributed-world-size` shards, with `--distributed-rank`",
    "--shard-id": "`--distributed-world-size` shards, with `--distributed-rank`",
    "--help": "shows the launcher's help; `--fairseq-help` shows fairseq's",
}
INTRODUCTION = """\
# Flags

<!-- Made by scripts/flags.py; do not edit. -->

Search this page for a flag. [Train](train.md#flags-that-most-runs-set) says what the common flags
mean, and `lightseq-train --fairseq-help` lists all. The tables say what `lightseq-train`,
`-generate`, `-validate` and `-interactive` do with each flag of fairseq 0.12.2, for
`--task translation`. A dash means that fairseq's command has no such flag.

* **works**: the flag has the same effect as in fairseq. Training uses the *captured step*: on a
  GPU, CUDA graphs, which are the reason of the speed
  ([Train](train.md#the-captured-step-and-fairseqs-step)).
* **fallback**: the flag has the same effect as in fairseq. Training uses fairseq's own step with
  the same layers. One line before the first update says "step: fairseq's own" and the reason.
* **refused**: the command ends with a message: the flag, the reason, and what to do.
* **no effect**: fairseq's command accepts the flag but does not use it. A note at start-up says
  so.

Rules for flags that are not in the table, and for special cases:

* Runs with another optimizer or criterion are fallbacks. The table does not list their flags.
* A run of another task is a fallback if its data or its training step are different. It is refused
  if its data do not fit the arch.
* A flag that is "part of" another flag has the same answer as the other one. Without the
  other one it has no effect, and a note says so. In a run with one rank, this is also true for
  flags of several ranks. Without `--sampling`, `--sampling-topk` and `--sampling-topp` are refused.
* A command without any `ls_` part, or with `--native`, runs fairseq's own code. It refuses no
  flag of the tables for that reason, but it also refuses [wrong input](#wrong-input).
* With `--task language_modeling`, the flags of the search in generate and interactive have the
  same answers (`tests/flags/test_flags_prompts.py`). Three need a source and are refused:
  `--constraints`, `--print-alignment`, `--replace-unk`.

A test runs the command of each row. If the answer is *works* or *fallback*, the test compares the
result with fairseq's own command, and checks that the flag changes the result there.
`tests/flags/test_flags_proofs.py` fails if a row has no such test.
"""
TEXT_INTRODUCTION = """\
## Language models

This table has the flags of `--task language_modeling` and of the archs of `ls_transformer_lm` in
training, and the flags of `lightseq-eval-lm` for data and output. All other flags are in the
table above, and have the same answers in training. For precision, logs, ranks and plugins,
`lightseq-eval-lm` has the answers of `lightseq-generate`. Settings of training have no effect in
`lightseq-eval-lm`.

A test runs each row, as above (`tests/flags/test_flags_language_models.py`).
"""
ROBERTA_INTRODUCTION = """\
## RoBERTa

This table has the flags of the archs of `ls_roberta`, of `--task masked_lm`, and of `--task
sentence_prediction` with its criterion, in `lightseq-train` and `lightseq-validate`. All other
flags are in the first table, and have the same answers. `lightseq-validate --task
sentence_prediction` adds `--criterion sentence_prediction`: fairseq takes flags from it.

A test runs each row, as above (`tests/flags/test_flags_of_roberta.py`).
"""
BART_INTRODUCTION = """\
## BART and mBART

This table has the flags of `lightseq-train` that only BART or its tasks have, and those that have
another answer here. The other flags are in the first table and, for `--task sentence_prediction`,
in that of RoBERTa, with the same answers.

A test runs each row, as above (`tests/flags/test_flags_of_bart.py`).
"""
LANGUAGES_INTRODUCTION = """\
## Several languages

This table has the flags of `--task translation_multi_simple_epoch` in `lightseq-train`. The other
flags are in the first table, with the same answers, except `--source-lang` and `--target-lang`,
which are for searches and refused in training, and `--dataset-impl raw`, which the task cannot
read. Searches take the languages and their tokens from the checkpoint.

A test runs each row, as above (`tests/flags/test_flags_of_languages.py`).
"""
OWN_INTRODUCTION = """\
## Flags that fairseq does not have

`lightseq-train` has these flags besides those of all commands ([Commands](commands.md)). With
`--fp8`, every flag is refused that is a fallback in the tables above: only the captured step
computes in fp8.
"""
WRONG_INPUT = """\
## Wrong input

Every command checks its input before it begins, also with `--native` and without any `ls_` part. It
refuses input that fairseq reports late or misleadingly, and input with which fairseq runs, but not
as the command says:

* **Checkpoints:** a `--restore-file`, `--continue-once` or `--finetune-from-model` that does not
  exist (fairseq trains from scratch), `--restore-file` together with `--finetune-from-model`, a
  classification head with another number of classes (fairseq takes a new head), and a model that is
  no translation model for `--task translation`.
* **Data:** folders, dictionaries, splits or labels that are missing, damaged or of another task,
  labels in another order than in training, sides of different lengths, tokens that are not in the
  dictionary, and a split of which no sentence is left.
* **Lengths:** a sentence that exceeds `--max-tokens` or `--max-tokens-valid`, and blocks of text
  that are longer than the language model (`fairseq-eval-lm` leaves them out).
* **Values:** unknown names of a task, arch, optimizer and so on, text that fairseq cannot evaluate,
  NaN, counts below 0 or 1, probabilities above 1, a `--lenpen` beyond 50, more `--sampling-topk`
  than words, settings of masks or of adaptive softmax that contradict each other, and a
  `--best-checkpoint-metric` that validation does not measure.
* **Text:** a `--remove-bpe` that is unknown or does not fit the dictionary, `--replace-unk` with
  joined subwords, `--constraints` in `lightseq-generate`, and options of translation for a language
  model.
* **Machine:** `--fp16` or the backend nccl without a GPU, a rank outside the number of ranks, and a
  `--save-dir` that another run uses.
* **Our own flags:** `--pack-tokens` and `--fp8`, which need our layers; a name in `--freeze` that
  no parameter has, or in `--lora-on` that no linear layer has; a rank below 1.

`tests/cli/test_native_refusals.py` runs examples of each kind with `--native`.
"""


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
        return REFUSED if whole in NOT_WITH_OURS else of_whole, f"part of `{whole}`"
    fallbacks = {flag: fallback.reason for flag, fallback in settings.rows(command, FALLBACK)}
    if command == "train" and (whole == SEVERAL_RANKS or name in RANKS.split()):
        return FALLBACK if name in fallbacks else WORKS, "with several ranks"
    if name in fallbacks:
        return FALLBACK, fallbacks[name]
    return (FALLBACK if name in OTHER_LAYERS else WORKS), ""


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
