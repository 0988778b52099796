"""What docs/flags.md says under "Wrong input": commands with --native refuse it as well."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from helpers import pages
from helpers.cli_runs import SMALL, binarise, binarise_text, run, succeed

ARCH = "--arch ls_transformer_tiny --lr 0.1"
SIZE = "--encoder-layers 1 --decoder-layers 1"
TRAIN = f"train bin {ARCH} --max-tokens 200 --max-update 1 --cpu --save-dir new"
TRAIN_TEXT = "train text --task language_modeling --arch ls_transformer_lm --max-tokens 200 --cpu"
MASKED = "train text --task masked_lm --arch ls_roberta --max-tokens 200 --cpu --no-save"
GENERATE = "generate bin --path mt/checkpoint_last.pt --cpu"
EVAL = "eval-lm text --path lm/checkpoint_last.pt --cpu"
# Point of the list -> (command, a part of the message).
CASES = {
    "Checkpoints": [
        (f"{TRAIN} --restore-file nowhere.pt", "--restore-file nowhere.pt does not exist"),
        (f"{TRAIN} --finetune-from-model no.pt", "--finetune-from-model no.pt does not exist"),
        (f"{TRAIN} --continue-once no.pt", "--continue-once no.pt does not exist"),
        (
            f"{TRAIN} --restore-file mt/checkpoint_last.pt --finetune-from-model no.pt",
            "cannot be used together",
        ),
        ("generate bin --path lm/checkpoint_last.pt --cpu", "contains no translation model"),
    ],
    "Data": [
        (f"train nowhere {ARCH}", "The data folder nowhere does not exist"),
        (f"train text {ARCH}", "text contains running text"),
        (f"{GENERATE} --gen-subset test2", "no split named test2"),
        (f"{TRAIN} --task sentence_prediction --criterion sentence_prediction", "--num-classes"),
        (
            f"{GENERATE} --skip-invalid-size-inputs-valid-test --max-source-positions 1",
            "Every sentence of the split is too long",
        ),
    ],
    "Lengths": [
        (f"{TRAIN} --max-tokens 3", "--max-tokens"),
        (f"{TRAIN} --max-tokens-valid 3", "--max-tokens-valid"),
        (f"{EVAL} --tokens-per-sample 64", "the model has only 16 positions"),
        (f"{TRAIN_TEXT} --tokens-per-sample 64 --max-target-positions 32", "needs a position"),
    ],
    "Values": [
        ("train bin --arch ls_transformer_tinny", "ls_transformer_tiny"),
        (f"{TRAIN} --task translations", "There is no task named translations"),
        (f"{TRAIN} --adam-betas 0.9", "--adam-betas"),
        (f"{TRAIN} --lr nan", "nan"),
        (f"{TRAIN} --num-workers -1", "at least 0"),
        (f"{GENERATE} --beam 0", "at least 1"),
        (f"{GENERATE} --lenpen 60", "--lenpen"),
        (f"{GENERATE} --sampling --sampling-topk 500", "--sampling-topk"),
        (f"{GENERATE} --sampling --sampling-topp 2", "--sampling-topp"),
        (f"{MASKED} --mask-prob 2", "--mask-prob"),
        (f"{TRAIN_TEXT} --adaptive-softmax-cutoff 9,5", "--adaptive-softmax-cutoff"),
        (f"{TRAIN} --best-checkpoint-metric bleu", "--best-checkpoint-metric bleu"),
    ],
    "Text": [
        (f"{GENERATE} --remove-bpe=words", "--remove-bpe words is unknown"),
        (f"{GENERATE} --remove-bpe=letter", "--remove-bpe letter"),
        (f"{GENERATE} --replace-unk --tokenizer space", "--replace-unk"),
        (f"{GENERATE} --constraints", "--constraints"),
        (
            "generate text --task language_modeling --path lm/checkpoint_last.pt --print-alignment",
            "--print-alignment",
        ),
    ],
    "Machine": [
        (f"{TRAIN} --fp16", "--fp16 needs a GPU"),
        (f"{TRAIN} --distributed-world-size 2 --distributed-backend nccl", "needs a GPU"),
        (f"{TRAIN} --distributed-rank 3", "--distributed-rank is 3"),
    ],
    "Our own flags": [
        (f"{TRAIN} --pack-tokens", "--pack-tokens"),
        (f"{TRAIN} --fp8", "--fp8 needs our layers"),
    ],
}


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
    ("line", "told"), [case for cases in CASES.values() for case in cases], ids=lambda x: x
)
def test_native_commands_refuse_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    monkeypatch.chdir(place)
    command, *words = shlex.split(line)
    result = run(command, *words, "--native")
    assert result.exit_code == 2, (result.output, result.exception)
    assert told in result.stderr.splitlines()[-1]
