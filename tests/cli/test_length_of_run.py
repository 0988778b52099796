"""A filled-in schedule has the length of the run: its total is the number of updates that the run
makes, with each task's batches and with users' defaults."""

from __future__ import annotations

import argparse
import logging
import random
import re
import shlex
from pathlib import Path
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.languages as languages
import pytest

from lightseq_fairseq.cli.checks import epoch
from lightseq_fairseq.cli.words.argv import value
from lightseq_fairseq.cli.words.defaults import Epoch

SIZE = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
BART = f"--arch ls_bart_base {SIZE} --encoder-attention-heads 2 --decoder-attention-heads 2 "
BART += "--decoder-layers 1 --update-freq 1 "
ROBERTA = f"--arch ls_roberta {SIZE} --encoder-attention-heads 2 --update-freq 1 "
PAIRS = f"--arch ls_transformer {SIZE} --decoder-layers 1 "
TEXT = "--arch ls_transformer_lm --task language_modeling --decoder-layers 1 --decoder-embed-dim "
TEXT += "16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 "
LANGUAGES = f"{PAIRS} --task translation_multi_simple_epoch --lang-pairs aa-bb,bb-aa,aa-cc "
SHORT = "--no-epoch-checkpoints --disable-validation --dropout 0 --attention-dropout 0 --cpu"


def write(folder: Path, pairs: int) -> Path:
    """Binarises sentence pairs, most of 5 to 40 words; and one side of them as text and as
    sentences with labels."""
    source, raw = random.Random(pairs), folder / "raw"
    raw.mkdir()
    for split, count in (("train", pairs), ("valid", 10)):
        lengths = [max(1, int(source.lognormvariate(2.6, 0.5))) for _ in range(count)]
        for side, most in (("de", 0), ("en", 3)):
            lines = [source.choices(range(50), k=k + source.randint(0, most)) for k in lengths]
            text = "".join(" ".join(f"w{i}" for i in line) + "\n" for line in lines)
            (raw / f"{split}.{side}").write_text(text)
        labels = "".join(f"{source.choice('ab')}\n" for _ in range(count))
        (raw / f"{split}.label").write_text(labels)
    for words, end, place in (
        ("-s de -t en --joined-dictionary", "", "pairs"),
        ("--only-source", ".de", "text"),
        ("--only-source", ".de", "classes/input0"),
        ("--only-source", ".label", "classes/label"),
    ):
        for split in ("train", "valid"):
            words += f" --{split}pref {raw / split}{end}"
        cli_runs.succeed("preprocess", *words.split(), "--destdir", folder / place)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of data -> folder."""
    some, few = (write(tmp_path_factory.mktemp("data"), pairs) for pairs in (487, 50))
    found = {name: some / name for name in ("pairs", "text", "classes")}
    return found | {
        "few pairs": few / "pairs",
        "languages": languages.write(tmp_path_factory.mktemp("languages")),
    }


@pytest.mark.parametrize(
    ("data", "flags"),
    [
        ("pairs", f"{BART} --max-tokens 4096 --max-epoch 2"),
        ("pairs", f"{BART} --max-tokens 1024 --max-epoch 2"),
        ("pairs", f"{BART} --max-tokens 256 --max-epoch 1"),
        ("pairs", f"{BART} --max-tokens 1024 --max-epoch 1 --max-source-positions 30"),
        ("few pairs", f"{BART} --max-tokens 256 --max-epoch 6 --finetune-from-model MODEL"),
        ("pairs", f"{PAIRS} --max-tokens 400 --max-epoch 1 --pack-tokens"),
        ("pairs", f"{PAIRS} --max-tokens 400 --max-epoch 3 --update-freq 2,3"),
        ("pairs", f"{PAIRS} --max-tokens 400 --max-epoch 2 --update-freq 2 --skip-remainder-batch"),
        ("languages", f"{LANGUAGES} --max-tokens 20 --max-epoch 1 --update-freq 1"),
        ("text", f"{TEXT} --tokens-per-sample 100 --max-tokens 900 --max-epoch 2 --update-freq 1"),
        ("text", f"{TEXT} --tokens-per-sample 30 --sample-break-mode eos --max-tokens 900 "
         "--max-epoch 2 --update-freq 1"),
        ("text", f"{ROBERTA} --task masked_lm --tokens-per-sample 64 --max-tokens 400 "
         "--max-epoch 1"),
        ("text", f"{BART} --task denoising --tokens-per-sample 64 --max-tokens 400 --max-epoch 1"),
        # Sentences in a random order.
        ("classes", f"{ROBERTA} --task sentence_prediction --num-classes 2 --max-tokens 900 "
         "--max-epoch 1"),
    ],
)  # fmt: skip
def test_the_schedule_has_the_updates_of_the_run(
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    data: str,
    flags: str,
) -> None:
    model = tmp_path / "first" / "checkpoint_last.pt"
    if "MODEL" in flags:
        words = shlex.split(f"{BART} --max-update 1 --disable-validation --cpu")
        cli_runs.succeed("train", folders[data], *words, "--save-dir", model.parent)
    caplog.set_level(logging.INFO)
    caplog.clear()
    words = shlex.split(f"{flags.replace('MODEL', str(model))} {SHORT}")
    out = cli_runs.succeed("train", folders[data], *words, "--save-dir", tmp_path)
    (updates,) = map(int, re.findall(r"trained: (\d+) update", caplog.text))
    command = shlex.split(out.splitlines()[0])
    assert value(command, ("--warmup-updates",)) == str(max(1, updates // 10))
    assert value(command, ("--total-num-update",)) in (None, str(updates))
    assert ("ls_transformer" in flags) == (value(command, ("--total-num-update",)) is None)
    (logged,) = re.findall(r"command: (lightseq-train .*)", caplog.text)
    assert shlex.split(logged)[: len(command)] == command


def test_the_last_update_has_the_smallest_rate(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run gets the fitted numbers, and not those of the first estimate."""
    caplog.set_level(logging.INFO)
    words = shlex.split(f"{BART} --max-tokens 1024 --max-epoch 1 --log-interval 1 {SHORT}")
    words += ["--lr", "1", "--log-format", "json", "--save-dir", str(tmp_path)]
    cli_runs.succeed("train", folders["pairs"], *words)
    rates = [float(x) for x in re.findall(r'"lr": "(\S+?)", "gnorm"', caplog.text)]
    updates, warm_up = len(rates), len(rates) // 10
    falling = [1 - (n - warm_up) / (updates - warm_up) for n in range(warm_up, updates + 1)]
    assert rates[warm_up - 1 :] == pytest.approx(falling, abs=1e-4)


def test_more_sentences_are_estimated() -> None:
    """Counting the batches of large data would take long."""
    data = Epoch(1000, 40_960)
    with mock.patch.object(epoch, "_MOST", 999):
        assert epoch.counted(data, argparse.Namespace()) is data
