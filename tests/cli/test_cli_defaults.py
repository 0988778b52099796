"""The words that lightseq-train adds to a command."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest
from helpers.golden import titled
from helpers.pages import text

from lightseq_fairseq.base.families import LANGUAGE_MODEL
from lightseq_fairseq.cli.words import defaults, registries
from lightseq_fairseq.cli.words.argv import value, without_prefixes
from lightseq_fairseq.cli.words.defaults import Epoch, Machine

CPU = Machine()
GPU = Machine(ranks=4, gpus=4, bf16=True)
OLD_GPU = Machine(ranks=1, gpus=1, bf16=False)
MACHINES = {"a CPU": CPU, "four GPUs": GPU, "a GPU without bf16": OLD_GPU}
ARCH = "data --arch ls_transformer_wmt_en_de_big_t2t"
TEXT = "data --task language_modeling --arch ls_transformer_lm"
ROBERTA = "data --arch ls_roberta_base --task"
CONSTANT = "--update-freq 1 --seed 1 --distributed-world-size 1"
WORDS = [
    (title, command, words)
    for title, cases in titled(Path(__file__).with_name("defaults.txt")).items()
    for command, words in cases
]


def added(command: str, machine: Machine = CPU, adaptive: bool = False) -> str:
    """The words that are added to the command."""
    recipe = LANGUAGE_MODEL.adaptive if adaptive else None
    return shlex.join(defaults.missing(shlex.split(command), machine, recipe=recipe))


@pytest.mark.parametrize(("title", "command", "words"), WORDS)
def test_the_words_of_the_file_are_added(title: str, command: str, words: str) -> None:
    """The recipe of the task to the arch alone, and less where the user sets a part of it."""
    machine, _, adaptive = title.partition(", ")
    command = string.Template(command).substitute(ARCH=ARCH, TEXT=TEXT, ROBERTA=ROBERTA)
    assert added(command, MACHINES[machine], adaptive=bool(adaptive)) == words


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    "command",
    [
        ARCH,
        "data --arch ls_multilingual_transformer --task multilingual_translation",
        TEXT,
        *(
            f"data --arch ls_roberta --task {task}"
            for task in ("masked_lm", "multilingual_masked_lm", "sentence_prediction",
                         "sentence_ranking")
        ),
    ],
)  # fmt: skip
def test_a_converted_command_gets_nothing_that_changes_it(command: str, adaptive: bool) -> None:
    for given in ("--optimizer adam --criterion x", "--optimizer=ls_adam --criterion=ls_x"):
        for size in ("--batch-size 8", "--max-tokens 9", "--max-sentences=3"):
            assert added(f"{command} {given} {size}", adaptive=adaptive) == CONSTANT
        assert "--bf16" not in added(f"{command} {given}", GPU, adaptive)


@pytest.mark.parametrize(
    "named",
    [
        "--optimizer ls_adam",
        "--criterion ls_label_smoothed_cross_entropy",
        "--optimizer=ls_adam --criterion=ls_label_smoothed_cross_entropy",
    ],
)
def test_the_recipes_own_parts_may_be_named(named: str) -> None:
    """They do not drop the recipe, unless the command also sets the learning rate."""
    recipe = defaults.missing(ARCH.split(), GPU)
    completed = " ".join(defaults.complete(f"{ARCH} {named}".split(), GPU)).replace("=", " ")
    assert sorted(completed.split()) == sorted(" ".join([ARCH, *recipe]).split())
    assert "--lr-scheduler" not in added(f"{ARCH} {named} --lr 1e-3", GPU)
    assert "--lr " not in added(f"{ARCH} {named} --lr-scheduler fixed", GPU)


EPOCH = Epoch(sentences=1000, tokens=40_960)
COUNTED = EPOCH._replace(batches=13)


@pytest.mark.parametrize(
    ("command", "epoch", "schedule"),
    [
        # --max-update, also if the data are not known
        (f"{ARCH} --max-update 100", None, "10"),
        (f"{ARCH} --max-update 5", None, "1"),
        (f"{ARCH} --max-update 40000", None, "4000"),
        (f"{ARCH} --max-update 100 --warmup-updates 50", None, None),
        # --max-epoch: 10 batches of 4096 tokens an epoch
        (f"{ARCH} --max-epoch 20", EPOCH, "20"),
        (f"{ARCH} --max-epoch 20 --max-update 50", EPOCH, "5"),
        (f"{ARCH} --max-epoch 20 --max-tokens 1024", EPOCH, "80"),
        (f"{ARCH} --max-epoch 20 --max-tokens 1024 --update-freq 2", EPOCH, "40"),
        (f"{ARCH} --max-epoch 20 --batch-size 5", EPOCH, "400"),
        (f"{ARCH} --max-epoch 20 --distributed-world-size 2", EPOCH, "10"),
        (f"{ARCH} --max-epoch 20", None, "4000"),
        # batches that have been counted
        (f"{ARCH} --max-epoch 20", COUNTED, "26"),
        (f"{ARCH} --max-epoch 20 --update-freq 2", COUNTED, "14"),
        (f"{ARCH} --max-epoch 20 --update-freq 1,3,2 --distributed-world-size 2", COUNTED, "8"),
        (f"{ARCH} --max-epoch 20 --update-freq 5 --skip-remainder-batch", COUNTED, "4"),
        # a rate that falls ends with the run
        (f"{ROBERTA} sentence_prediction --max-update 100", None, "10 100"),
        (f"{ROBERTA} sentence_prediction --max-epoch 4", EPOCH, "25 252"),
        (f"{ROBERTA} masked_lm --max-update 1000 --warmup-updates 7", None, "1000"),
    ],
)
def test_the_schedule_follows_the_length_of_the_run(
    command: str, epoch: Epoch | None, schedule: str | None
) -> None:
    found = defaults.missing(shlex.split(command), CPU, epoch=epoch)
    flags = ("--warmup-updates", "--total-num-update")
    fitted = [value(found, (flag,)) for flag in flags]
    assert " ".join(text for text in fitted if text) == (schedule or "")


@pytest.mark.parametrize(
    ("command", "note"),
    [
        (
            ARCH,
            "An epoch of these data has about 10 updates, so the recipe's 300,000 are 30,000",
        ),
        (f"{ARCH} --max-epoch 60", None),
        (f"{ARCH} --max-update 300000", None),
        (f"{ROBERTA} sentence_prediction", None),
    ],
)
def test_the_recipe_is_far_too_long_for_small_data(command: str, note: str | None) -> None:
    words = shlex.split(command)
    added = defaults.missing(words, CPU, epoch=EPOCH)
    found = defaults.note_on_length([*words, *added], added, EPOCH)
    assert (found or "").startswith(note or "") and bool(found) == bool(note)


@pytest.mark.parametrize("given", ["", "--no-epoch-checkpoints", "--keep-last-epochs=5"])
def test_many_epochs_are_many_files(given: str) -> None:
    words = f"{ARCH} {given}".split()
    added = defaults.missing(words, CPU, epoch=EPOCH)
    note = defaults.note_on_length([*words, *added], added, EPOCH)
    assert note is not None and ("writes a checkpoint; with --no-epoch" in note) == (not given)


def test_a_period_of_the_rate_ends_with_the_run() -> None:
    found = added(f"{TEXT} --max-update 500", adaptive=True)
    assert "--lr-period-updates 450 " in found and "--warmup-updates 50 " in found


@pytest.mark.parametrize(
    "command",
    [
        "data",
        "data --arch transformer_wmt_en_de",
        "data --arch transformer --optimizer ls_adam",
        "data --arch=transformer --criterion=ls_label_smoothed_cross_entropy",
        "data --arch ls_transformer --arch transformer",  # the last one counts, as in argparse
        "data --save-dir ls_transformer",
    ],
)
def test_other_archs_get_nothing(command: str) -> None:
    assert defaults.complete(shlex.split(command), GPU) == shlex.split(command)


@pytest.mark.parametrize(
    "spelling", ["--arch {}", "--arch={}", "-a {}", "-a{}", "--arch transformer --arch {}"]
)
def test_every_spelling_of_an_ls_arch_is_seen(spelling: str) -> None:
    command = "data " + spelling.format("ls_transformer")
    assert added(command) == added(ARCH)
    assert registries.uses_lightseq(shlex.split(command))


@pytest.mark.parametrize(
    ("command", "ours"),
    [
        ("d --arch transformer --optimizer ls_adam", True),
        ("d --arch transformer --criterion=ls_label_smoothed_cross_entropy", True),
        ("d --arch transformer --optimizer adam", False),
        ("d --save-dir ls_adam --optimizer", False),
        ("d -- --arch ls_transformer", False),
    ],
)
def test_a_command_is_ours_if_a_part_of_ours_is_named(command: str, ours: bool) -> None:
    assert registries.uses_lightseq(shlex.split(command)) is ours


def test_operands_stay_operands() -> None:
    completed = defaults.complete(shlex.split("--arch ls_transformer -- data"), CPU)
    assert completed[-2:] == ["--", "data"]
    assert completed[2:4] == ["--optimizer", "ls_adam"]


@pytest.mark.parametrize(
    ("command", "native"),
    [
        (
            "d --arch ls_transformer --optimizer=ls_adam --criterion ls_cross_entropy",
            "d --arch transformer --optimizer=adam --criterion cross_entropy",
        ),
        ("-als_transformer_tiny d", "-atransformer_tiny d"),
        (
            "-a ls_transformer ls_data --save-dir ls_adam",
            "-a transformer ls_data --save-dir ls_adam",
        ),
        ("d --arch transformer", "d --arch transformer"),
    ],
)
def test_only_prefixes_are_removed(command: str, native: str) -> None:
    assert without_prefixes(shlex.split(command)) == shlex.split(native)


@pytest.mark.parametrize("machine", [CPU, GPU, OLD_GPU])
@pytest.mark.parametrize("given", ["", "--save-dir 'a b' --lr 1e-3", "--optimizer adam", "-- x"])
def test_the_printed_line_is_the_run(given: str, machine: Machine) -> None:
    completed = defaults.complete(shlex.split(f"--arch ls_transformer {given}"), machine)
    program, *words = shlex.split(defaults.command_line(completed))
    assert program == "lightseq-train"
    assert words == completed
    assert defaults.complete(words, Machine(ranks=8, gpus=8, bf16=True)) == words


def test_the_page_shows_the_whole_command_for_fairseq() -> None:
    """fairseq-train has no recipe: with less, it would train with other settings."""
    (shown,) = re.findall(r"^fairseq-train .* --seed (?:.*\n)*?(?=```)",
                          text("docs/from-fairseq.md").replace("\\\n", ""), re.M)  # fmt: skip
    (short,) = re.findall(r"`lightseq-train (data-bin .*)` on a CPU", text("docs/from-fairseq.md"))
    completed = defaults.complete(shlex.split(short), CPU)
    assert shlex.split(shown)[1:] == without_prefixes(completed)


def test_a_forgotten_learning_rate_is_mentioned() -> None:
    assert "--lr" in (defaults.note(["--optimizer", "ls_adam"]) or "")
    assert defaults.note(["--optimizer", "ls_adam", "--lr=1"]) is None
