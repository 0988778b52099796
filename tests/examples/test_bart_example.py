"""The example of BART: its plot, and a short run of its command by both systems."""

from __future__ import annotations

import json
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
from helpers.example_runs import CODE, assert_refused, start
from helpers.multi30k_runs import EXAMPLES

from examples import curves
from examples.bart import gain

SYSTEMS = {"lightseq": [], "fairseq": ["--native"]}
NOUNS = {"dog": "Hund", "man": "Mann", "ball": "Ball", "tree": "Baum", "cow": "Kuh"}
LONG, SHORT = 40, 8  # updates of pre-training, and of each training on pairs


@pytest.mark.parametrize("words", [("--update", "3"), ("--pairs", f"1 {CODE}")])
def test_a_wrong_argument_is_refused(words: tuple[str, ...]) -> None:
    assert_refused("bart", *words)


def test_the_plot_has_the_mean_of_the_seeds() -> None:
    rows = [
        {"case": f"multi30k de-en, {size}, {pairs} pairs, {begin}", "system": "lightseq",
         "seed": seed, "pairs": pairs, "begin": begin, "bleu": pairs / 1000 + seed}
        for size, pairs in (("gpu", 5000), ("gpu", 1000), ("cpu", 1000))
        for begin in ("scratch", "pre-trained")
        for seed in (1, 4)
    ]  # fmt: skip
    found = gain.points(rows, "gpu")
    assert list(found) == [("lightseq", "pre-trained"), ("lightseq", "scratch")]
    assert found["lightseq", "scratch"] == [(1.0, 3.5), (5.0, 7.5)]
    (panel,) = gain.picture(found, "gpu").panels
    assert panel.limits == (0, 9.0) and len(panel.curves) == 2


def write_captions(folder: Path) -> Path:
    """Writes captions as examples/multi30k/prepare.sh does: all pairs of nouns, in each order."""
    text = folder / "text"
    text.mkdir(parents=True)
    captions = [(a, b, c) for a in NOUNS for b in NOUNS for c in NOUNS]
    splits = {"train": captions, "val": captions[::9], "test_2016_flickr": captions[::7]}
    for split, found in splits.items():
        for lang, words in (("en", {noun: noun for noun in NOUNS}), ("de", NOUNS)):
            lines = "".join(" ".join(words[x] for x in caption) + " .\n" for caption in found)
            (text / f"{split}.bpe.{lang}").write_text(lines)
            (text / f"{split}.{lang}").write_text(lines)
    words = ["-s", "en", "-t", "de", "--joined-dictionary", "--destdir", folder / "bin"]
    cli_runs.succeed("preprocess", *words, "--trainpref", text / "train.bpe")
    return folder


def test_both_systems_pre_train_alike_and_write_their_rows(tmp_path: Path) -> None:
    data, out = write_captions(tmp_path / "data"), tmp_path / "out"
    short = ["--size", "cpu", "--pairs", "90", "--pretraining-updates", str(LONG)]
    short += ["--updates", str(SHORT), "--data", str(data), "--out", str(out)]
    for process in [start("bart", *words, *short) for words in SYSTEMS.values()]:
        output, errors = process.communicate(timeout=280)
        assert process.returncode == 0, output[-3000:] + errors[-3000:]
    assert ": BLEU of 90 pairs: " in output

    folders = [out / f"cpu-{system}-seed1" for system in SYSTEMS]
    ours, native = (curves.read_curves(folder / "pretrain.log") for folder in folders)
    for name in ("train_loss", "valid_loss"):
        expected = pytest.approx(list(native[name].values()), abs=0.01)
        assert list(ours[name].values()) == expected and ours[name]
    losses = list(ours["valid_loss"].values())
    assert losses[-1] < losses[0] - 0.5

    # Training on pairs begins with another model: one that has learned to copy its source.
    logs = [folders[0] / f"90-{begin}.log" for begin in ("pre-trained", "scratch")]
    first = [next(iter(curves.read_curves(log)["train_loss"].values())) for log in logs]
    assert first[0] > first[1] + 1
    assert "pretrained/checkpoint_best.pt" in logs[0].read_text()

    rows = json.loads((out / "bleu.json").read_text())
    assert len(rows) == 4
    for row in rows:
        assert (row["updates"], row["pretraining_updates"]) == (SHORT, LONG)
        assert row["case"].endswith(f"{row['pairs']} pairs, {row['begin']}")
    assert (out / "cpu.svg").read_text().lstrip().startswith("<?xml")
    assert all((folder / "pretrain.svg").exists() for folder in folders)

    # The same command repeats no training that has a score.
    process = start("bart", *short)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "German to English:" not in output, errors
    assert json.loads((out / "bleu.json").read_text()) == rows


def test_the_text_stays_out_of_the_repository() -> None:
    assert {path.suffix for path in (EXAMPLES / "bart").iterdir()} <= {".sh", ".py", ".md", ""}
