"""The scripts of the WMT14 recipe from end to end, with stand-ins for the archives."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import helpers.forked_commands as forked_commands
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "wmt14"
WORDS = (
    "sun moon star rain-bow sea-side fire wind",
    "Sonne Mond Stern Regen-Bogen See-Rand Feuer Wind",
)
SMALL = shlex.split(
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2 --max-tokens 800 --update-freq 1 --num-workers 0 --cpu "
    "--log-interval 1"
)
EPOCHS = 3
# A folder name that would be executed if a shell evaluated it as code.
CODE = "it's $(touch hacked) `touch hacked`; touch hacked"


def script(name: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the shell scripts, in the environment of the tests."""
    result = subprocess.run(
        ["bash", str(FOLDER / name), *map(str, words)],
        env={**os.environ, "PATH": forked_commands.path(), "PRECISION": "fp32", **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert not Path("hacked").exists()
    return result


def succeed(name: str, *words: str | Path, **variables: str) -> list[str]:
    """Runs a script, which must succeed, and returns the lines it printed."""
    result = script(name, *words, **variables)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout.splitlines()


def pairs(count: int, seed: int) -> tuple[list[str], list[str]]:
    """English and German sentences that are equal word by word."""
    source = random.Random(seed)
    chosen = [source.choices(range(7), k=source.randint(3, 9)) for _ in range(count)]
    english, german = (
        [" ".join(words.split()[i] for i in line) + "." for line in chosen] for words in WORDS
    )
    return english, german


def pack(archive: Path, files: dict[str, list[str]]) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for name, lines in files.items():
            text = "".join(f"{line}\n" for line in lines).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, BytesIO(text))


def sgm(lines: list[str]) -> list[str]:
    segments = [f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(lines, 1)]
    return ['<srcset setid="newstest2014" srclang="any">', "<p>", *segments, "</p>", "</srcset>"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five archives with the names and the layout of statmt.org, with a few lines each."""
    folder = tmp_path_factory.mktemp("archives")
    for seed, (archive, corpus) in enumerate(
        {
            "training-parallel-europarl-v7": "training/europarl-v7.de-en",
            "training-parallel-commoncrawl": "commoncrawl.de-en",
            "training-parallel-nc-v9": "training/news-commentary-v9.de-en",
            "dev": "dev/newstest2013",
        }.items()
    ):
        english, german = pairs(60, seed)
        # Line ends of other systems and unusual spaces within lines, as in the crawled corpus; and
        # a pair that is no translation, as its lengths show.
        english[:2] = ["sun\rmoon\u2028star \u0085sun fire.", "sun. " * 40]
        german[:2] = ["Sonne Mond\tStern Sonne Feuer.", "Mond."]
        pack(folder / f"{archive}.tgz", {f"{corpus}.en": english, f"{corpus}.de": german})
    english, german = pairs(12, seed=9)
    files = {"src.en": sgm(english), "ref.de": sgm(german), "src.de": ["a trap"]}
    test = {f"test-full/newstest2014-deen-{name}.sgm": lines for name, lines in files.items()}
    pack(folder / "test-full.tgz", test)
    return folder


@pytest.fixture(scope="module")
def data(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wmt14") / CODE
    succeed("prepare.sh", "--from", archives, folder, MERGES="60", JOBS="1")
    return folder


def text(data: Path, name: str) -> list[str]:
    return (data / "text" / name).read_text(encoding="utf-8").split("\n")[:-1]


def test_prepared_pairs_stay_pairs(data: Path) -> None:
    assert text(data, "train.tok.en")[0] == "sun moon star sun fire ."
    assert text(data, "train.tok.de")[0] == "Sonne Mond Stern Sonne Feuer ."
    assert len(text(data, "train.tok.en")) == len(text(data, "train.tok.de")) == 3 * 60
    clean = text(data, "train.clean.en"), text(data, "train.clean.de")
    assert 90 < len(clean[0]) == len(clean[1]) <= 3 * 59  # without the pair of unequal lengths
    for english, german in zip(*clean):
        assert 2 / 3 <= len(english.split()) / len(german.split()) <= 1.5
    assert text(data, "test.de") == pairs(12, seed=9)[1]
    assert " @-@ " in "".join(text(data, "test.tok.de"))
    assert all(len(text(data, f"test.tok.{lang}")) == 12 for lang in ("en", "de"))
    assert {"train", "valid", "test"} <= {
        path.name.split(".")[0] for path in (data / "bin").iterdir()
    }


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    result = script("prepare.sh", "--from", tmp_path, tmp_path / "data")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "training-parallel-europarl-v7.tgz" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("train.sh", ["--recipe", "huge"], "--recipe must be vaswani-big or t2t-big, not huge"),
        ("train.sh", ["--data", "nowhere"], "nowhere/bin is missing; make it with bash"),
        ("train.sh", ["--update", "3"], "unknown argument --update"),
        ("evaluate.sh", ["nowhere"], "'nowhere' is no folder of a run"),
        ("prepare.sh", ["--form", "x"], "unknown argument --form"),
    ],
)
def test_a_wrong_argument_is_refused(name: str, words: list[str], message: str) -> None:
    result = script(name, *words)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_settings_are_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "settings").write_text("touch hacked\n")
    result = script("evaluate.sh", tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "run train.sh again" in result.stderr


def rows_of_a_run(data: Path, out: Path, *words: str) -> tuple[Path, list[str], dict[str, object]]:
    """A short run of train.sh and evaluate.sh: its folder, its last two lines, its row."""
    options = ("--data", data, "--out", out, "--updates", "1000")
    last = succeed("train.sh", *words, *options, "--", *SMALL, "--max-epoch", str(EPOCHS))[-1]
    run = Path(shlex.split(last)[-1])
    results = out / "bleu.json"
    lines = succeed(
        *("evaluate.sh", run, "--average", str(EPOCHS)),
        *("--reference", data / "text" / "test.de", "--results", results),
    )
    (row,) = json.loads(results.read_text())
    return run, lines[-2:], row


def test_a_run_ends_with_both_scores_and_its_row(data: Path, tmp_path: Path) -> None:
    run, lines, row = rows_of_a_run(data, tmp_path / CODE, "--seed", "3")
    command = re.search(r"lightseq-train .*", (run / "train.log").read_text())
    assert command is not None and "--arch ls_transformer_vaswani_wmt_en_de_big" in command[0]
    assert "--update-freq 128 " in command[0] and "--dropout 0.3" in command[0]
    assert len(list((run / "checkpoints").glob("checkpoint[0-9].pt"))) == EPOCHS
    split = f"compound-split-BLEU|{row['compound_split_signature']} = "
    assert lines[0].startswith(f"{split}{row['compound_split_bleu']:.2f} "), lines
    assert lines[1].startswith(f"BLEU|{row['signature']} = {row['bleu']:.2f} "), lines
    assert (row["case"], row["system"], row["seed"]) == (
        "wmt14 en-de vaswani-big fp32",
        "lightseq",
        3,
    )
    assert {"commit", "date", "gpu", "torch", "updates", "train_seconds"} <= row.keys()
    assert (run / "generate.log").read_text().count("\nD-") == 12


def test_the_native_twin_runs_with_the_same_flags(data: Path, tmp_path: Path) -> None:
    run, _, row = rows_of_a_run(data, tmp_path, "--native", "--recipe", "t2t-big")
    assert (row["case"], row["system"]) == ("wmt14 en-de t2t-big fp32", "fairseq")
    log = (run / "train.log").read_text()
    assert (
        "--arch transformer_wmt_en_de_big_t2t " in log and "ls_" not in log.split("--save-dir")[0]
    )
