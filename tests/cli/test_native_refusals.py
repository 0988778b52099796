"""What docs/flags.md says under "Wrong input": commands with --native refuse it as well."""

from __future__ import annotations

import re
import shlex
import string
from pathlib import Path

import pytest
from helpers import pages
from helpers.cli_runs import SMALL, binarise, binarise_text, run, succeed
from helpers.golden import matches, titled

ARCH = "--arch ls_transformer_tiny --lr 0.1"
SIZE = "--encoder-layers 1 --decoder-layers 1"
TRAIN = f"train bin {ARCH} --max-tokens 200 --max-update 1 --cpu --save-dir new"
TRAIN_TEXT = "train text --task language_modeling --arch ls_transformer_lm --max-tokens 200 --cpu"
MASKED = "train text --task masked_lm --arch ls_roberta --max-tokens 200 --cpu --no-save"
GENERATE = "generate bin --path mt/checkpoint_last.pt --cpu"
EVAL = "eval-lm text --path lm/checkpoint_last.pt --cpu"
CASES = titled(Path(__file__).with_name("native_refusals.txt"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    binarise(place / "pairs").rename(place / "bin")
    binarise_text(place / "lines").rename(place / "text")
    succeed("train", place / "bin", *ARCH.split(), *SMALL, "--save-dir", place / "mt")
    text = [f"--decoder-{name}" for name in ("layers 1", "embed-dim 16", "attention-heads 2")]
    words = shlex.split(f"--task language_modeling --arch ls_transformer_lm {' '.join(text)}")
    words += shlex.split("--tokens-per-sample 16 --max-tokens 200 --max-update 1 --cpu")
    succeed("train", place / "text", *words, "--num-workers", "0", "--save-dir", place / "lm")
    return place


def test_the_list_has_a_case_for_each_point() -> None:
    (_, section) = pages.text("docs/flags.md").split("## Wrong input")
    points = re.findall(r"^\* \*\*(.*?):\*\*", section.partition("\n## ")[0], re.M)
    assert points == list(CASES)


@pytest.mark.parametrize(
    ("line", "sentence"), [case for cases in CASES.values() for case in cases], ids=lambda x: x
)
def test_native_commands_refuse_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentence: str
) -> None:
    monkeypatch.chdir(place)
    command, *words = shlex.split(string.Template(line).substitute(globals()))
    result = run(command, *words, "--native")
    assert result.exit_code == 2, (result.output, result.exception)
    assert matches(result.stderr.splitlines()[-1], f"lightseq-{command}: error: {sentence}")
