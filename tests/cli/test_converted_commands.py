"""A fairseq command with the prefixes ls_ trains on the same batches, with the same settings and
model sizes as before, in every task, and goes on from fairseq's checkpoints."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.roberta_runs as roberta
import pytest
import torch
from omegaconf import OmegaConf

import fairseq_cli.train  # isort: skip

from lightseq_fairseq.cli.words.argv import without_prefixes
from lightseq_fairseq.memory.packing import PackedBatch

ENCODER = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24"
DECODER = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 24"
RATE = "--lr 0.25"  # fairseq's default; without a rate, a command may get the recipe
TRANSLATION = f"--optimizer adam {RATE} {ENCODER} {DECODER} --cpu"
TEXT = f"{{text}} --task language_modeling --arch transformer_lm {DECODER} {RATE} --cpu"
ROBERTA = f"--arch roberta_base --optimizer adam {RATE} --dropout 0 {ENCODER} --cpu"
MASKED = f"{{letters}} --task masked_lm --criterion masked_lm {ROBERTA} --encoder-attention-heads 2"
CLASSES = (
    f"{{classes}} --task sentence_prediction --criterion sentence_prediction --num-classes 2 "
    f"{ROBERTA} --encoder-attention-heads 2"
)
SOFTMAX = "--criterion adaptive_loss --ddp-backend legacy_ddp --adaptive-softmax-cutoff 8,12"
OPTIONS = (
    "--lr-scheduler inverse_sqrt --warmup-updates 4 --warmup-init-lr 1e-6 --max-update 7 --seed 3 "
    "--clip-norm 0.5 --weight-decay 0.01 --update-freq 2"
)
# Commands of fairseq; each also runs with OPTIONS.
COMMANDS = {
    "translation": f"{{pairs}} --arch transformer {TRANSLATION} --max-tokens 100 "
    "--criterion label_smoothed_cross_entropy",
    "criterion": f"{{pairs}} --arch transformer {TRANSLATION} --batch-size 4",
    "learned": f"{{pairs}} --arch transformer {TRANSLATION} --criterion cross_entropy "
    "--max-tokens 100 --encoder-learned-pos --decoder-learned-pos",
    "multilingual": "{languages} --task multilingual_translation --arch multilingual_transformer "
    f"--lang-pairs de-en,en-de {TRANSLATION} --max-tokens 100 --lr 1e-3 "
    "--criterion label_smoothed_cross_entropy",
    "text": f"{TEXT} --optimizer adam --criterion cross_entropy --max-tokens 2048",
    "blocks": f"{TEXT} --optimizer adam --criterion cross_entropy --max-tokens 2048 "
    "--sample-break-mode eos --tokens-per-sample 32 --decoder-learned-pos",
    "adaptive": f"{TEXT} --optimizer nag {SOFTMAX} --max-tokens 2048",
    "masked": f"{MASKED} --batch-size 4",
    "masked-blocks": f"{MASKED} --max-tokens 96 --tokens-per-sample 24 --sample-break-mode eos",
    "languages-masked": MASKED.replace("masked_lm", "multilingual_masked_lm", 1).replace(
        "{letters}", "{corpora}"
    )
    + " --batch-size 4",
    "classes": f"{CLASSES} --batch-size 8",
    "classes-tokens": f"{CLASSES} --max-tokens 80 --init-token 0 --separator-token 2 "
    "--max-positions 64",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data of all tasks."""
    place = tmp_path_factory.mktemp("data")
    pairs = cli_runs.binarise(place / "pairs")
    letters, classes, _ = roberta.binarise(place / "roberta")
    for language in ("aa", "bb"):
        shutil.copytree(letters, place / "corpora" / language)
    shutil.copy(letters / "dict.txt", place / "corpora")
    # Both directions of one pair of languages.
    text = place / "pairs" / "text"
    prefixes = [word for split in cli_runs.SPLITS for word in (f"--{split}pref", text / split)]
    for source, target in (("de", "en"), ("en", "de")):
        dictionaries = (f"--{s}dict" for s in ("src", "tgt"))
        given = [word for flag, language in zip(dictionaries, (source, target), strict=True)
                 for word in (flag, pairs / f"dict.{language}.txt")]  # fmt: skip
        cli_runs.succeed("preprocess", "-s", source, "-t", target, "--destdir",
                         place / "languages", *prefixes, *given)  # fmt: skip
    return {
        "pairs": pairs, "languages": place / "languages", "corpora": place / "corpora",
        "text": cli_runs.binarise_text(place / "text"), "letters": letters, "classes": classes,
    }  # fmt: skip


class Seen(Exception):
    """Ends a run after its first update."""


@dataclass
class Run:
    """The settings of a run, the shapes of its parameters, and the batches of its first update."""

    settings: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    batches: list[Any] = field(default_factory=list)
    printed: str = ""  # the complete command


# Settings that differ: the names, and the languages of the data, which only our runs name.
OTHERS = {"_name", "arch", "optimizer", "criterion", "source_lang", "target_lang"}
PREFIX = re.compile(r"(--(?:arch|optimizer|criterion)) (?=[a-z])")


def converted(command: str) -> str:
    """The command with the prefixes; adaptive_loss and nag are fairseq's alone."""
    return (
        PREFIX.sub(r"\1 ls_", command)
        .replace("ls_adaptive_loss", "adaptive_loss")
        .replace("ls_nag", "nag")
    )


def begun(command: str) -> Run:
    """What ``lightseq-train`` trains with, up to its first update; with fairseq's workers."""
    run = Run()

    def recorded(cfg: Any, trainer: Any, task: Any, epoch: Any) -> Any:
        for group, values in dict(OmegaConf.to_container(cfg)).items():
            of_group = vars(values) if isinstance(values, Namespace) else values or {}
            for name in of_group.keys() - OTHERS:
                run.settings[f"{group}.{name}"] = of_group[name]
        run.shapes |= {n: tuple(p.shape) for n, p in trainer.model.state_dict().items()}
        step = trainer.train_step

        def train_step(samples: list[Any], *others: Any) -> Any:
            run.batches = contents(samples)
            step(samples, *others)
            raise Seen

        trainer.train_step = train_step
        train(cfg, trainer, task, epoch)

    train = fairseq_cli.train.train
    with mock.patch.object(fairseq_cli.train, "train", recorded):
        result = cli_runs.run("train", *shlex.split(f"{command} --no-save --log-format none"))
    assert isinstance(result.exception, Seen), (result.output, result.exception)
    run.printed = result.stdout.partition("\n")[0]
    return run


def contents(sample: Any) -> Any:
    """The counts of a batch, and the tokens and labels of its sentences, in whatever order."""
    if isinstance(sample, dict) and "net_input" not in sample:  # language pair -> its batch
        return contents(list(sample.values()))
    if isinstance(sample, list):
        return [contents(part) for part in sample]
    if isinstance(sample, PackedBatch):
        streams = sample.open()
        columns = [
            of_sentences(streams[name][column], streams[name].segments.cu_seqlens.tolist())
            for name, names in sample.layout
            for column in names
            if column != "rows"
        ]
        counts = sample.nsentences, sample.ntokens
    else:
        given, target = sample["net_input"], sample["target"]
        padded = [given["src_tokens"], given.get("prev_output_tokens"), target]
        # The label of a sentence may have the number of the pad.
        columns = [
            [row.tolist() if len(row) == 1 else row[row != 1].tolist() for row in rows]
            for rows in padded
            if rows is not None
        ]
        counts = sample["nsentences"], sample["ntokens"]
    return counts, sorted(zip(*columns, strict=False))


def of_sentences(column: Any, boundaries: list[int]) -> list[list[int]]:
    return [column[start:end].tolist() for start, end in itertools.pairwise(boundaries)]


@pytest.mark.parametrize("options", ["", OPTIONS], ids=["bare", "options"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_converted_command_trains_as_before(
    folders: dict[str, Path], command: str, options: str
) -> None:
    command = f"{command} {options}".format(**folders)
    native, ours = begun(command), begun(converted(command))
    assert ours.settings == native.settings
    assert ours.shapes == native.shapes
    assert ours.batches == native.batches
    assert native.batches


@pytest.mark.parametrize("name", ["criterion", "classes"])
def test_the_printed_command_goes_back_to_fairseq(folders: dict[str, Path], name: str) -> None:
    """Without the prefixes, it has the whole recipe of a command that sets none of it."""
    short = re.sub(r"--(optimizer|criterion|lr) \S+", "", COMMANDS[name]).format(**folders)
    ours = begun(converted(short))
    program, *words = shlex.split(ours.printed)
    assert program == "lightseq-train" and "--lr-scheduler" in words
    back = begun(shlex.join(without_prefixes(words)))
    assert back.settings == ours.settings and back.batches == ours.batches
    assert back.settings["optimization.lr"] != [0.25]  # fairseq's default


@pytest.fixture(scope="module")
def pretrained(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with fairseq's checkpoints of masked text, of three updates."""
    folder = tmp_path_factory.mktemp("pretrained")
    command = f"{MASKED} --batch-size 4 --lr 1e-3 --max-update 3 --no-epoch-checkpoints"
    cli_runs.succeed("train", *shlex.split(command.format(**folders)), "--save-dir", folder)
    return folder


def logged(
    command: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> tuple[list[int], list[float]]:
    """The numbers of updates and the losses, of training and validation, that a run logs."""
    caplog.clear()
    words = [*shlex.split(command), "--log-format", "simple", "--log-interval", "1"]
    with caplog.at_level("INFO"):
        cli_runs.succeed("train", *words, "--save-dir", folder, "--no-epoch-checkpoints")
    counts, losses = (re.findall(rf"\| {name} (\S+)", caplog.text) for name in
                      ("num_updates", "loss"))  # fmt: skip
    return [*map(int, counts)], [*map(float, losses)]


def test_a_converted_run_resumes_fairseqs(
    folders: dict[str, Path], pretrained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = f"{MASKED} --batch-size 4 --lr 1e-3 --max-update 6 --attention-dropout 0"
    found = []
    for name, words in (("native", "--native"), ("ours", "")):
        shutil.copytree(pretrained, tmp_path / name)
        line = f"{converted(command.format(**folders))} {words}"
        found.append(logged(line, tmp_path / name, caplog))
    assert found[0][0] == found[1][0] and {*found[1][0]} == {4, 5, 6}
    assert found[1][1] == pytest.approx(found[0][1], abs=2e-3)
    model = torch.load(tmp_path / "ours" / "checkpoint_last.pt", weights_only=False)["model"]
    assert len(model["encoder.sentence_encoder.embed_positions.weight"]) == 1026


@pytest.mark.parametrize(
    "start",
    ["--finetune-from-model {}",
     "--restore-file {} --reset-optimizer --reset-dataloader --reset-meters"],
)  # fmt: skip
def test_a_converted_run_is_tuned_from_fairseqs(
    folders: dict[str, Path], pretrained: Path, tmp_path: Path, start: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = pretrained / "checkpoint_last.pt"
    command = f"{CLASSES} --batch-size 8 --lr 1e-3 --max-epoch 2 --attention-dropout 0".format(
        **folders
    )
    command += f" {start.format(path)}"
    counts, losses = logged(f"{command} --max-positions 1024", tmp_path / "native", caplog)
    found = logged(converted(command), tmp_path / "ours", caplog)
    assert found == (counts, pytest.approx(losses, abs=2e-3)) and len(losses) == 4


def test_a_recipe_keeps_the_positions_of_the_checkpoint(
    folders: dict[str, Path], pretrained: Path, tmp_path: Path
) -> None:
    """A command without optimizer and criterion has the recipe's --tokens-per-sample 512."""
    shutil.copytree(pretrained, tmp_path / "run")
    command = MASKED.format(**folders).replace("--criterion masked_lm", "")
    words = shlex.split(converted(command.replace("--optimizer adam", "")))
    words += ["--batch-size", "4", "--max-update", "5", "--save-dir", str(tmp_path / "run")]
    result = cli_runs.run("train", *words, "--reset-lr-scheduler")
    assert result.exit_code == 0 and "--max-positions 1024" in result.stderr
