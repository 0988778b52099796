"""Every setting that docs/flags.md calls honoured in generate, validate and interactive.

Each line of settings runs with our model and with fairseq's (--native): what they print of the
sentences agrees, and so does whether it differs from what they print without these settings.
"""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import cli_runs
import pytest
from test_flags import SETTINGS, launch, names, rows, table

# {folder} and {checkpoint} are the files of the fixtures below.
DATA = (
    "--max-tokens 40 --required-batch-size-multiple 1 --num-workers 0 --data-buffer-size 2 "
    "--required-seq-len-multiple 4 --left-pad-source --truncate-source "
    "--max-source-positions 5 --max-target-positions 30 --num-batch-buckets 2 --load-alignments "
    "--dataset-impl mmap --train-subset valid --skip-invalid-size-inputs-valid-test "
    "--source-lang de --target-lang en --task translation --user-dir {folder} "
)
SEARCH = [
    "--beam 3 --nbest 2 --lenpen 0.5 --unkpen -3 --min-len 3 --max-len-a 0.5 --max-len-b 3",
    "--unnormalized --temperature 2 --no-repeat-ngram-size 1 --print-alignment",
    "--match-source-len",
    "--beam 4 --nbest 4 --diverse-beam-groups 2 --diverse-beam-strength 0.7",
    "--nbest 2 --diversity-rate 2",
    "--nbest 2 --sampling --sampling-topk 3 --seed 4",
    "--nbest 2 --sampling --sampling-topp 0.8",
    "--model-overrides {'no_scale_embedding':True}",
    "--checkpoint-suffix _x",
]
LINES = {
    "generate": [
        *SEARCH,
        "--prefix-size 1",
        "--score-reference",
        "--gen-subset valid --log-format json --log-interval 1 " + DATA,
        "--batch-size 2 --left-pad-target --distributed-world-size 2 --distributed-rank 1 "
        "--no-progress-bar",
        "--quiet --scoring sacrebleu --sacrebleu",
        "--post-process letter",
        "--results-path {folder}",
    ],
    "interactive": [
        *SEARCH,
        "--buffer-size 4 --batch-size 2 --max-tokens 50 --skip-invalid-size-inputs-valid-test "
        "--source-lang de --target-lang en --task translation --user-dir {folder} "
        "--max-source-positions 6 --max-target-positions 30",
        "--post-process letter",
    ],
    "validate": [
        "--valid-subset test --log-format simple --log-interval 1 --no-progress-bar " + DATA,
        "--batch-size 2 --seed 3 --left-pad-target --max-source-positions 6 "
        "--skip-invalid-size-inputs-valid-test",
        "--model-overrides {'no_scale_embedding':True}",
        "--eval-bleu --eval-bleu-detok space --eval-bleu-detok-args {} --eval-bleu-remove-bpe "
        '--eval-bleu-print-samples --eval-bleu-args {"max_len_b":5}',
        "--eval-bleu --eval-tokenized-bleu",
    ],
}
# Given in every run, run with more data by test_generation_flags.py, or wanting several machines,
# a GPU or a language model.
NOT_RUN = """
data --path --cpu --input --help --replace-unk --fp16 --memory-efficient-fp16 --lm-path --lm-weight
--constraints --tokenizer --bpe --checkpoint-shard-count --all-gather-list-size --device-id
--distributed-backend --distributed-init-method --distributed-no-spawn --distributed-num-procs
--distributed-port --distributed-rank --distributed-world-size
"""


@pytest.mark.parametrize("command", LINES)
def test_every_honoured_setting_is_tried(command: str) -> None:
    honoured = {n for n in rows(command, table.HONOURED) if not SETTINGS[n].choices}
    tried = set().union(*map(names, LINES[command]))
    assert tried <= honoured
    assert honoured - tried <= set(NOT_RUN.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    learned = "--max-update 30 --lr 0.02 --lr-scheduler fixed --dropout 0 --max-tokens 100"
    launch("train", data, folder, learned, ok=True)
    # Another model under the name that --checkpoint-suffix asks for.
    launch("train", data, folder / "x", learned + " --seed 5", ok=True)
    shutil.copy(folder / "x" / "checkpoint_last.pt", folder / "checkpoint_last_x.pt")
    return folder / "checkpoint_last.pt"


def shown(command: str, data: Path, checkpoint: Path, line: str, folder: Path) -> list[list[str]]:
    """Fields of each line about a sentence, and of the scores and losses."""
    folder.mkdir()
    (folder / "__init__.py").touch()
    result = launch(command, data, checkpoint, line.replace("{folder}", str(folder)), ok=True)
    # W- is the time that it took.
    told = re.findall(r"^(?:[STHDPA]-\d+\t|Generate ).*", result.stdout, re.MULTILINE)
    told += ["in a file" for _ in folder.glob("generate-*.txt")]
    told += re.findall(r"example \w+: .*|\b\w*loss [\d.]+|\bbleu [\d.]+", result.stdout)
    return [re.split(r"[\t ]+", text) for text in told]


def agree(one: list[list[str]], other: list[list[str]]) -> bool:
    return len(one) == len(other) and all(
        len(a) == len(b) and all(map(same, a, b)) for a, b in zip(one, other, strict=True)
    )


def same(a: str, b: str) -> bool:
    try:
        return float(a) == pytest.approx(float(b), abs=2e-3)
    except ValueError:
        return a == b


@functools.cache
def plain(command: str, data: Path, checkpoint: Path, folder: Path) -> list[list[str]]:
    return shown(command, data, checkpoint, "--native", folder)


@pytest.mark.parametrize(
    ("command", "line"), [(command, line) for command, lines in LINES.items() for line in lines]
)
def test_ours_does_what_fairseq_does(
    data: Path, checkpoint: Path, tmp_path: Path, command: str, line: str
) -> None:
    ours = shown(command, data, checkpoint, line, tmp_path / f"{tmp_path.name}_ours")
    theirs = shown(
        command, data, checkpoint, line + " --native", tmp_path / f"{tmp_path.name}_theirs"
    )
    assert agree(ours, theirs)
    without = plain(command, data, checkpoint, checkpoint.parent / f"plain_{command}")
    assert without and not agree(theirs, without) and not agree(ours, without)
