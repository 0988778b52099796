"""docs/flags.md has a row for every setting; settings that are refused or without effect behave as
their row says.

The other files test_flags_*.py test the settings that work.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
from helpers.flag_runs import SETTINGS, Proofs, launch, names, rows, table

from lightseq_fairseq.base import families
from lightseq_fairseq.cli.checks import flags
from lightseq_fairseq.plugins import settings
from lightseq_fairseq.plugins.settings import SEVERAL_RANKS, WITHOUT

# ---- the table ----


def test_the_table_is_what_the_script_writes() -> None:
    assert table.TABLE.read_text() == table.text()


@pytest.mark.parametrize("command", table.COMMANDS)
def test_every_setting_has_a_row_with_an_answer(command: str) -> None:
    parser = table.parser_of(command, families.TRANSLATION)
    column = 2 + list(table.COMMANDS).index(command)
    found = {
        name: line.split("|")[column].strip()
        for line in table.TABLE.read_text().partition("## Language models")[0].splitlines()
        for name in re.findall(r"`([^`]+)`", line.split("|")[1] if line.startswith("|") else "")
    }
    kinds = {table.WORKS, table.FALLBACK, table.REFUSED, table.UNREAD}
    missing = {
        option
        for action in parser._actions
        for option in action.option_strings or [action.dest]
        if found.get(option) not in kinds
    }
    assert not missing


def test_every_name_in_the_lists_is_a_setting() -> None:
    train = {
        *table.RANKS.split(), *table.NOTES, *table.OTHER_LAYERS,
        *(flag for flag, _ in settings.rows("train", table.FALLBACK)),
        *WITHOUT, *(w.split()[0] for w in WITHOUT.values() if w != SEVERAL_RANKS),
    }  # fmt: skip
    of_text = table.family_settings(table.OF_TEXT)
    of_roberta = table.family_settings(table.OF_ROBERTA)
    of_bart = table.family_settings(table.OF_BART)
    of_languages = table.family_settings(table.OF_LANGUAGES)
    assert train <= SETTINGS.keys() | of_text.keys() | of_bart.keys() | of_languages.keys()
    assert table.TEXT_NOTES.keys() <= of_text.keys()
    for command in table.COMMANDS:
        rows = [*SETTINGS.items(), *of_text.items()]
        own = {name for name, row in rows if command in row.commands}
        assert {flag for flag, _ in settings.rows(command, table.REFUSED)} <= own
    commands = settings.ALL.split()
    everywhere = set().union(*map(settings.unread, commands))
    assert everywhere <= SETTINGS.keys() | of_text.keys()
    assert table.ROBERTA_NOTES.keys() <= of_roberta.keys()
    for column in table.OF_ROBERTA.columns:
        command, task = column.split()
        assert settings.unread(command, task) - settings.unread(command) <= of_roberta.keys()


# ---- refused: the message names the setting, the reason and what to do ----

REFUSED = {
    "train": [
        "--adaptive-input", "--adaptive-softmax-cutoff 5,7", "--tie-adaptive-weights",
        "--quant-noise-pq 0.1", "--quant-noise-scalar 0.1", "--no-cross-attention",
        "--cross-self-attention", "--offload-activations", "--base-layers 1", "--char-inputs",
        "--encoder-xformers-att-config {}", "--decoder-xformers-att-config {}",
        "--pipeline-model-parallel",
        "--quantization-config-path x.yaml", "--amp", "--fp16-adam-stats", "--use-old-adam",
        "--tpu", "--model-parallel-size 2", "--use-plasma-view", "--encoder-layers-to-keep 0",
        "--decoder-layers-to-keep 0", "--cpu-offload",
    ],
    "generate": [
        "--pipeline-model-parallel", "--print-step", "--retain-iter-history", "--constraints",
    ],
    "validate": ["--pipeline-model-parallel"],
    "interactive": ["--pipeline-model-parallel", "--score-reference"],
}  # fmt: skip
# Refused for certain values, or on a machine without a GPU or a package.
ON_CONDITION = [
    "--activation-fn tanh", "--ddp-backend fully_sharded", "--fp16", "--profile",
    "--write-checkpoints-asynchronously", "--tensorboard-logdir board", "--wandb-project x",
    "--aim-repo x", "--azureml-logging", "--optimizer composite", "--criterion adaptive_loss",
    "--criterion ctc", "--criterion sentence_ranking", "--criterion speech_to_spectrogram",
]  # fmt: skip
PADS = "--left-pad-target --num-batch-buckets 2"


@pytest.mark.parametrize(
    ("command", "line"),
    [(command, line) for command, lines in REFUSED.items() for line in lines]
    + [("train", line) for line in ON_CONDITION]
    + [("generate", "--left-pad-target --score-reference")]
    + [(command, PADS) for command in ("train", "generate", "validate")],
)
def test_a_refusal_names_the_setting_the_reason_and_the_way_out(
    data: Path, checkpoint: Path, tmp_path: Path, command: str, line: str
) -> None:
    place = tmp_path / "save" if command == "train" else checkpoint
    result = launch(command, data, place, line)
    assert result.exit_code == 2, (result.output, result.exception)
    (sentence,) = [text for text in result.output.splitlines() if "error:" in text]
    flag = re.escape(line.split()[0])
    assert re.search(rf"{flag}\b.* (\(.+\)|needs a GPU|support)", sentence), sentence
    assert re.search(r"remove |use --|--native|pip install", sentence), sentence
    assert not (tmp_path / "save").exists() or not list((tmp_path / "save").glob("*.pt"))


# ---- no effect, and a note says so ----

# Values that differ from the default, for settings where `another` finds none.
VALUES = {
    "--optimizer-overrides": "{'x':7}",
    "--update-epoch-batch-itr": "True",
    "--eval-bleu-args": '{"beam":7}',
    "--eval-bleu-detok": "space",
    "--eval-bleu-detok-args": '{"x":7}',
    "--ema-seed-model": "nowhere.pt",
    "--phase-ratio": "(0.1,0.2,0.7)",
    "--epoch2lr": "{'1':0.1}",
    "--update2lr": "{'1':0.1}",
    "--ddp-backend": "legacy_ddp",
}
# Components whose settings a parser accepts once the component is chosen.
CHOICES = [
    ("", "", "", ""),
    ("inverse_sqrt", "moses", "fastbpe", "sacrebleu"),
    ("cosine", "space", "subword_nmt", "wer"),
    ("polynomial_decay", "nltk", "hf_byte_bpe", "bert_score"),
    ("tri_stage", "space", "bert", "chrf"),
    ("triangular", "space", "gpt2", "meteor"),
    ("step", "space", "sentencepiece", "chrf"),
    ("manual", "space", "byte_bpe", "chrf"),
    ("reduce_lr_on_plateau", "space", "tokenizer_folder", "chrf"),
]


KINDS = [f"--{kind.replace('_', '-')}" for kind in table.CHOICES]


def spelled(command: str, wanted: set[str], chosen: tuple[str, ...] = ("",) * 4) -> list[str]:
    """A command line of those ``wanted`` settings that the parser accepts, none at its default
    value."""
    line = [
        word
        for kind, name in zip(KINDS, chosen, strict=True)
        if name and kind in wanted
        for word in (kind, name)
    ]
    required = ["--max-lr", "0.3"] if "triangular" in line else []
    parser = table.parser_of(command, families.TRANSLATION, *line, *required)
    for action in parser._actions:
        flag = flags.name(action)
        if flag in wanted and flag not in KINDS:
            line.append(flag)
            if action.nargs != 0:
                line.append(VALUES.get(flag) or another(action))
    return line


def another(action: argparse.Action) -> str:
    if action.choices:
        return next(str(choice) for choice in action.choices if choice != action.default)
    if action.type is float:  # some are probabilities
        return "0.7"
    return "7" if str(action.default) != "7" else "5"


Shown = Callable[[str, str], tuple[list[str], set[str]]]


@pytest.fixture
def told(data: Path, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Shown:
    """Runs a command; returns the losses, hypotheses and references that it shows, and the settings
    in its notes."""

    def run(command: str, line: str) -> tuple[list[str], set[str]]:
        caplog.clear()
        caplog.set_level(logging.INFO)
        place = tmp_path if command == "train" else checkpoint
        if command == "train":
            line += " --no-save --log-interval 1 --log-format simple"
        result = launch(command, data, place, line, ok=True)
        text = result.stdout + "\n".join(record.getMessage() for record in caplog.records)
        shown = re.findall(r"^[HDPST]-\d+\t.*|\b(?:nll_)?loss'?[ :=]+[\d.]+", text, re.M)
        assert shown
        return sorted(shown), set(re.findall(r"note: (\S+) has no effect", result.stderr))

    return run


@pytest.mark.parametrize("command", table.COMMANDS)
def test_what_has_no_effect_is_noted_and_has_none(told: Shown, command: str) -> None:
    wanted = PROVEN[command, table.UNREAD]
    tried: set[str] = set()
    plain, _ = told(command, "")
    for chosen in CHOICES:
        line = spelled(command, wanted - tried | set(KINDS) & wanted, chosen)
        if set(line) & wanted - tried:
            shown, noted = told(command, "-s de -t en " + " ".join(line))
            assert noted == {word for word in line if word.startswith("--")}
            assert shown == plain
            tried |= noted
    assert tried == wanted


# With one rank these settings have no effect; --use-bmuf still wraps the optimizer.
RANKS = {flag for flag, whole in WITHOUT.items() if whole == SEVERAL_RANKS} - {"--use-bmuf"}
PART_OF = {flag: whole for flag, whole in WITHOUT.items() if whole != SEVERAL_RANKS}


def test_a_part_without_its_whole_has_no_effect(told: Shown) -> None:
    kinds = (table.WORKS, table.FALLBACK, table.REFUSED)
    parts = set().union(*(rows("train", kind) for kind in kinds)) & PART_OF.keys()
    plain, _ = told("train", "")
    shown, noted = told("train", " ".join(spelled("train", parts | RANKS)))
    assert noted == parts | RANKS
    assert shown == plain


def test_a_part_with_its_whole_is_not_noted(told: Shown) -> None:
    _, noted = told("train", "--amp-init-scale 4 --ema-decay 0.9 --store-ema")
    assert noted == {"--amp-init-scale"}


def test_fairseqs_own_runs_are_left_alone(data: Path, tmp_path: Path) -> None:
    result = launch("train", data, tmp_path, "--native --checkpoint-activations --pad 3", ok=True)
    assert "note: --pad" not in result.stderr


@pytest.mark.parametrize("command", table.COMMANDS)
def test_help_is_the_launchers(command: str) -> None:
    ours = cli_runs.succeed(command, "--help")
    assert ours.startswith(f"Usage: lightseq-{command}") and "--fairseq-help" in ours
    assert "--user-dir" in cli_runs.succeed(command, "--fairseq-help")


ENCODING = set(settings.ENCODING.split())
PROVEN: Proofs = {
    (command, kind): found
    for command in table.COMMANDS
    for kind, found in (
        (table.WORKS, {"--help"}),
        # test_flags_subwords.py: the settings of a tokenizer, which the command does read.
        (
            table.UNREAD,
            rows(command, table.UNREAD) - (ENCODING if command == "generate" else set()),
        ),
        (table.REFUSED, names(*REFUSED[command])),
    )
}
# A part of a refused setting is refused together with it; alone it has no effect.
PROVEN["train", table.REFUSED] |= {
    part
    for part, whole in PART_OF.items()
    if part in SETTINGS
    and (whole in PROVEN["train", table.REFUSED] or table.is_refused_choice(whole))
}
