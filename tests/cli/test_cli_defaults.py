"""The words that lightseq-train adds to a command."""

from __future__ import annotations

import shlex

import pytest

from lightseq_fairseq.cli.words import defaults
from lightseq_fairseq.cli.words.defaults import Epoch, Machine

CPU = Machine()
GPU = Machine(ranks=4, gpus=4, bf16=True)
OLD_GPU = Machine(ranks=1, gpus=1, bf16=False)
ARCH = "data --arch ls_transformer_wmt_en_de_big_t2t"
TEXT = "data --task language_modeling --arch ls_transformer_lm"
ROBERTA = "data --arch ls_roberta_base --task"
ADAM = "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0"


def added(command: str, machine: Machine = CPU, adaptive: bool = False) -> dict[str, str | None]:
    """Flag -> value for the words that are added to the command."""
    return flags_of(defaults.missing(shlex.split(command), machine, adaptive=adaptive))


def flags_of(words: list[str]) -> dict[str, str | None]:
    """Flag -> value, None without one."""
    flags: dict[str, str | None] = {}
    for word in words:
        if word.startswith("--"):
            flags[word] = None
        else:
            flags[list(flags)[-1]] = word
    return flags


SCHEDULE = {"--lr", "--lr-scheduler", "--warmup-updates"}
OPTIMIZER = {"--optimizer", "--adam-betas", "--clip-norm", "--weight-decay"}
CRITERION = {"--criterion", "--label-smoothing"}
ALWAYS = {"--update-freq", "--seed", "--distributed-world-size"}
SIZE = {"--max-tokens", "--max-update"}
ALL = SCHEDULE | OPTIMIZER | CRITERION | ALWAYS | SIZE


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        (
            ARCH,
            f"{ADAM} --weight-decay 1e-4 --criterion ls_label_smoothed_cross_entropy "
            "--label-smoothing 0.1 --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 "
            "--max-tokens 4096 --update-freq 1 --max-update 300000",
        ),
        (
            TEXT,
            f"{ADAM} --weight-decay 0.01 --criterion ls_cross_entropy --lr 5e-4 --lr-scheduler "
            "inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7 --max-tokens 2048 "
            "--update-freq 16 --max-update 50000",
        ),
        (
            f"{ROBERTA} masked_lm",
            f"{ADAM} --adam-eps 1e-6 --weight-decay 0.01 --criterion ls_masked_lm --lr 5e-4 "
            "--lr-scheduler polynomial_decay --warmup-updates 10000 --total-num-update 125000 "
            "--sample-break-mode complete --tokens-per-sample 512 --max-tokens 8192 "
            "--update-freq 16 --max-update 125000",
        ),
        (
            f"{ROBERTA} sentence_prediction --num-classes 2",
            f"{ADAM} --adam-eps 1e-6 --weight-decay 0.1 --criterion ls_sentence_prediction "
            "--lr 2e-5 --lr-scheduler polynomial_decay --warmup-updates 122 --total-num-update "
            "2036 --init-token 0 --separator-token 2 --batch-size 16 --max-tokens 4400 "
            "--update-freq 1 --max-update 2036",
        ),
    ],
)
def test_the_arch_alone_gets_the_recipe_of_its_task(command: str, recipe: str) -> None:
    constant = {"--seed": "1", "--distributed-world-size": "1"}
    assert added(command) == {**flags_of(shlex.split(recipe)), **constant}


def test_adaptive_softmax_has_its_own_recipe() -> None:
    recipe = (
        "--optimizer nag --clip-norm 0.1 --criterion adaptive_loss --ddp-backend legacy_ddp "
        "--lr 1.0 --lr-scheduler cosine --min-lr 1e-4 --stop-min-lr 1e-9 --t-mult 2 "
        "--lr-period-updates 270000 --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-7 "
        "--max-tokens 3072 --update-freq 3 --max-update 286000 --seed 1 --distributed-world-size 4 "
        "--bf16"
    )
    assert added(TEXT, GPU, adaptive=True) == flags_of(shlex.split(recipe))


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ("--lr-scheduler fixed", SCHEDULE),
        ("--lr 1e-3", {"--lr"}),
        ("--lr=1e-3", {"--lr"}),
        ("--warmup-updates 10", {"--warmup-updates"}),
        ("--adam-betas '(0.9, 0.999)'", {"--adam-betas"}),
        ("--label-smoothing 0", {"--label-smoothing"}),
        ("--weight-decay=0", {"--weight-decay"}),
        ("--batch-size 8", {"--max-tokens"}),
        ("--max-sentences 8", {"--max-tokens"}),
        ("--max-tokens 8192", {"--max-tokens"}),
        ("--batch-size 4 --max-tokens 8192", {"--max-tokens"}),
        ("--max-update 10", {"--max-update"}),
        ("--max-epoch 3", {"--max-update"}),
        ("--stop-time-hours 2", {"--max-update"}),
        ("--seed 7 --update-freq 2", {"--seed", "--update-freq"}),
        ("--distributed-world-size 2", {"--distributed-world-size"}),
        ("--dropout 0.3 --user-dir mine", set()),
    ],
)
def test_what_the_user_sets_is_left_alone(given: str, left_out: set[str]) -> None:
    assert added(f"{ARCH} {given}").keys() == ALL - left_out
    assert added(f"{given} {ARCH}").keys() == ALL - left_out


CONSTANT = {"--update-freq": "1", "--seed": "1", "--distributed-world-size": "1"}
FAIRSEQS_CRITERION = {"--criterion": "ls_cross_entropy"}


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
    whole = defaults.complete(shlex.split(f"{ARCH} {named}"), GPU)
    assert (
        flags_of(defaults.missing(whole[:3], GPU)).items()
        <= flags_of([part for word in whole[1:] for part in word.split("=")]).items()
    )
    assert "--lr-scheduler" not in added(f"{ARCH} {named} --lr 1e-3", GPU)
    assert "--lr" not in added(f"{ARCH} {named} --lr-scheduler fixed", GPU)


EPOCH = Epoch(sentences=1000, tokens=40_960)


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
        # a rate that falls ends with the run
        (f"{ROBERTA} sentence_prediction --max-update 100", None, "10 100"),
        (f"{ROBERTA} sentence_prediction --max-epoch 4", EPOCH, "25 252"),
        (f"{ROBERTA} masked_lm --max-update 1000 --warmup-updates 7", None, "1000"),
    ],
)
def test_the_schedule_follows_the_length_of_the_run(
    command: str, epoch: Epoch | None, schedule: str | None
) -> None:
    found = flags_of(defaults.missing(shlex.split(command), CPU, epoch=epoch))
    fitted = [found.get("--warmup-updates"), found.get("--total-num-update")]
    assert " ".join(text for text in fitted if text) == (schedule or "")


def test_a_period_of_the_rate_ends_with_the_run() -> None:
    found = added(f"{TEXT} --max-update 500", adaptive=True)
    assert (found["--warmup-updates"], found["--lr-period-updates"]) == ("50", "450")


def test_a_converted_command_gets_what_fairseq_requires() -> None:
    assert added(f"{ARCH} --optimizer adam --max-tokens 9") == {**CONSTANT, **FAIRSEQS_CRITERION}
    size = {"--max-tokens": "4096"}
    assert added(f"{ARCH} --optimizer adam") == {**CONSTANT, **FAIRSEQS_CRITERION, **size}
    assert added(f"{ARCH} --criterion x").keys() == {*CONSTANT, *OPTIMIZER, *size}
    assert added(f"{ROBERTA} sentence_prediction --optimizer adam --criterion x") == {
        **CONSTANT, "--batch-size": "16", "--max-tokens": "4400",
    }  # fmt: skip


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("given", ["", "--optimizer adam", "--criterion x", "--lr-scheduler fixed"])
def test_a_language_model_never_gets_the_recipe_of_translation(given: str, adaptive: bool) -> None:
    found = added(f"{TEXT} {given}", adaptive=adaptive)
    assert "--label-smoothing" not in found
    of_recipe = adaptive and "--optimizer" not in given
    assert found.get("--criterion") in (None, "adaptive_loss" if of_recipe else "ls_cross_entropy")
    assert found.get("--weight-decay") != "1e-4" and found.get("--max-update") != "300000"


@pytest.mark.parametrize(
    ("given", "tokens", "micro_batches"),
    [
        ("", "2048", "16"),
        ("--max-tokens 32768", None, "1"),
        ("--batch-size 8", None, "1"),
        ("--update-freq 2", "2048", None),
        ("--max-tokens 512 --update-freq 2", None, None),
    ],
)
def test_who_sets_the_batch_sets_the_tokens_of_an_update(
    given: str, tokens: str | None, micro_batches: str | None
) -> None:
    found = added(f"{TEXT} {given}")
    assert (found.get("--max-tokens"), found.get("--update-freq")) == (tokens, micro_batches)


@pytest.mark.parametrize(
    ("given", "total", "last"),
    [
        ("--max-update 7", "7", None),
        ("--max-update 0", "2036", None),
        ("--max-epoch 3", "2036", None),
        ("--total-num-update 9", None, "2036"),
        ("--lr-scheduler fixed", None, "2036"),
    ],
)
def test_a_falling_rate_ends_with_the_run(given: str, total: str | None, last: str | None) -> None:
    found = added(f"{ROBERTA} sentence_prediction {given}")
    assert (found.get("--total-num-update"), found.get("--max-update")) == (total, last)


def test_other_tasks_of_roberta_have_its_recipes() -> None:
    assert added(f"{ROBERTA} multilingual_masked_lm") == added(f"{ROBERTA} masked_lm")
    ranking, prediction = (added(f"{ROBERTA} sentence_{x}") for x in ("ranking", "prediction"))
    assert ranking == {**prediction, "--criterion": "sentence_ranking"}


@pytest.mark.parametrize("task", ["masked_lm", "sentence_prediction"])
@pytest.mark.parametrize("given", ["", "--optimizer adam", "--criterion x", "--lr-scheduler fixed"])
def test_roberta_never_gets_the_recipe_of_translation(task: str, given: str) -> None:
    found = added(f"{ROBERTA} {task} {given}")
    assert "--label-smoothing" not in found
    assert found.get("--lr-scheduler") in (None, "polynomial_decay")
    updates = {"masked_lm": "125000", "sentence_prediction": "2036"}[task]
    converted = "--optimizer" in given or "--criterion" in given
    assert found.get("--max-update") == (None if converted else updates)


@pytest.mark.parametrize(
    ("given", "sentences", "tokens"),
    [("", "16", "4400"), ("--max-tokens 99", None, None), ("--batch-size 8", None, None)],
)
def test_who_sets_the_batch_of_fine_tuning_sets_all_of_it(
    given: str, sentences: str | None, tokens: str | None
) -> None:
    found = added(f"{ROBERTA} sentence_prediction {given}")
    assert (found.get("--batch-size"), found.get("--max-tokens")) == (sentences, tokens)


def test_other_tasks_have_the_recipe_of_translation() -> None:
    for task in ("multilingual_translation", "translation_multi_simple_epoch", "mine"):
        assert added(f"{ARCH} --task {task}") == added(ARCH)


@pytest.mark.parametrize(
    ("given", "machine", "precision"),
    [
        ("", GPU, "--bf16"),
        ("", OLD_GPU, "--fp16"),
        ("", CPU, None),
        ("--lr 1e-3", GPU, "--bf16"),
        ("--optimizer ls_adam --lr 1e-3", GPU, None),
        ("--criterion ls_cross_entropy", GPU, None),
        ("--cpu", GPU, None),
        ("--fp16", GPU, None),
        ("--amp", GPU, None),
        ("--memory-efficient-fp16", GPU, None),
        ("--memory-efficient-bf16", GPU, None),
    ],
)
def test_precision_is_chosen_for_the_arch_alone(
    given: str, machine: Machine, precision: str | None
) -> None:
    chosen = added(f"{ARCH} {given}", machine).keys() & {"--bf16", "--fp16"}
    assert chosen == ({precision} if precision else set())


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
    assert added(command).keys() == ALL
    assert defaults.uses_lightseq(shlex.split(command))


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
    assert defaults.uses_lightseq(shlex.split(command)) is ours


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
def test_native_twin_takes_the_prefixes_away_and_nothing_else(command: str, native: str) -> None:
    assert defaults.native_twin(shlex.split(command)) == shlex.split(native)


@pytest.mark.parametrize("machine", [CPU, GPU, OLD_GPU])
@pytest.mark.parametrize("given", ["", "--save-dir 'a b' --lr 1e-3", "--optimizer adam", "-- x"])
def test_the_printed_line_is_the_run(given: str, machine: Machine) -> None:
    completed = defaults.complete(shlex.split(f"--arch ls_transformer {given}"), machine)
    program, *words = shlex.split(defaults.command_line(completed))
    assert program == "lightseq-train"
    assert words == completed
    assert defaults.complete(words, Machine(ranks=8, gpus=8, bf16=True)) == words


def test_a_forgotten_learning_rate_is_mentioned() -> None:
    assert "--lr" in (defaults.note(["--optimizer", "ls_adam"]) or "")
    assert defaults.note(["--optimizer", "ls_adam", "--lr=1"]) is None
