"""The comparison of translations by both systems, on digits and on made-up hypotheses."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.digits as digits
import helpers.forked_commands as forked_commands
import pytest
from helpers.multi30k_runs import script

# Sentence -> its hypotheses, best first, as [score, tokens]
MadeUp = list[list[list[Any]]]
Change = Callable[[MadeUp], None]


def test_digits_are_translated_alike(tmp_path: Path) -> None:
    toy = digits.toy()
    (tmp_path / "text").mkdir()
    (tmp_path / "bin").symlink_to(toy.folder)
    targets = (toy.folder / "valid.src-tgt.tgt").read_text()
    (tmp_path / "text" / "test_2016_flickr.de").write_text(targets)
    result = script(
        *("translation.py", "--checkpoint", toy.paths[-1], "--data", tmp_path, "--out", tmp_path),
        *("--results", tmp_path / "rows.json", "--jobs", "2", "--case", "nbest-4/fp32"),
        *("--", "--source-lang=src", "--target-lang=tgt", "--dataset-impl=raw", "--cpu"),
        *("--gen-subset=valid", "--num-workers=0"),
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert {"commit", "date", "gpu", "torch", "signature"} <= row.keys()
    assert (row["case"], row["system"]) == ("nbest-4/fp32", "ours")
    assert (row["sentences"], row["hypotheses"]) == (digits.SENTENCES, 4 * digits.SENTENCES)
    assert row["identical_share"] >= 0.998 and row["greatest_score_difference"] <= 1e-4
    assert row["bleu"] > 50 and row["bleu_difference"] < 0.1


def nothing(found: MadeUp) -> None:
    pass


def tie(found: MadeUp) -> None:
    found[3][0] = [found[3][0][0] + 5e-6, "anderes"]


def no_tie(found: MadeUp) -> None:
    found[3][0] = [found[3][0][0] - 2e-5, "anderes"]


def other_score(found: MadeUp) -> None:
    found[5][0][0] += 2e-4


def last_hypotheses(found: MadeUp) -> None:
    for sentence in found[:3]:
        sentence[-1][1] = "anderes"


def one_fewer(found: MadeUp) -> None:
    del found[7]


def no_number(found: MadeUp) -> None:
    found[2][0][0] = float("nan")


def many(found: MadeUp) -> None:
    for sentence in found[:31]:
        sentence[0] = [-9.0, "anderes"]


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    """An environment whose lightseq-generate writes the files of the folder made-up."""
    command = tmp_path / "commands" / "lightseq-generate"
    command.parent.mkdir()
    command.write_text(
        f"""#!/usr/bin/env bash
        while [ "$1" != --output ]; do shift; done
        cp "{tmp_path}/made-up/$(basename "$2")" "$2"
        """
    )
    command.chmod(0o755)
    return {"PATH": os.pathsep.join([str(command.parent), forked_commands.path()])}


def compare(
    folder: Path, environment: dict[str, str], cases: dict[str, Change | None]
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    """The program's result, and its rows by case.

    cases: how fairseq's hypotheses differ from ours, for each case; None: fairseq writes none.
    """
    (folder / "made-up").mkdir()
    (folder / "bin").mkdir()
    (folder / "text").mkdir()
    texts = [f"das ist der Satz mit der Nummer {number}" for number in range(1000)]
    (folder / "text" / "test_2016_flickr.de").write_text("\n".join(texts) + "\n")
    (folder / "averaged.pt").touch()
    words: list[str | Path] = ["--checkpoint", folder / "averaged.pt", "--data", folder]
    words += ["--out", folder, "--results", folder / "rows.json"]
    for case, change in cases.items():
        words += ["--case", case]
        for system in ("ours", "fairseq_no_cudnn"):
            found: MadeUp = [
                [[-1.5 - rank, text.replace("Nummer", "Num@@ mer")] for rank in range(4)]
                for text in texts
            ]
            if system != "ours":
                if change is None:
                    continue
                change(found)
            lines = [
                f"H-{number}\t{score}\t{tokens}\n"
                for number, its in enumerate(found)
                for score, tokens in its
            ]
            (folder / "made-up" / f"{case.replace('/', '-')}-{system}").write_text("".join(lines))
    result = script("translation.py", *words, **environment)
    written = folder / "rows.json"
    rows = json.loads(written.read_text()) if written.exists() else []
    return result, {row["case"]: row for row in rows}


def test_what_is_within_the_bounds(stand_in: dict[str, str], tmp_path: Path) -> None:
    result, rows = compare(tmp_path, stand_in, {"beam-4/fp32": nothing, "beam-5/fp32": tie})
    assert result.returncode == 0, result.stderr
    same, tied = rows["beam-4/fp32"], rows["beam-5/fp32"]
    assert (same["sentences"], same["hypotheses"], same["identical_share"]) == (1000, 4000, 1.0)
    assert same["differences"] == [] and same["greatest_gap_of_a_difference"] is None
    assert same["bleu"] == same["fairseq_bleu"] == 100.0  # after joining subwords
    assert tied["identical_share"] == 0.999 and tied["differences"] == [[3, 1, -1.5, -1.499995]]
    assert tied["greatest_gap_of_a_difference"] == pytest.approx(5e-6)


BROKEN: dict[str, tuple[Change | None, str]] = {
    "beam-5/fp32": (no_tie, "greatest_gap_of_a_difference is 2e-05, more than 1e-05"),
    "beam-4/fp32": (other_score, "greatest_score_difference is 0.0002, more than 0.0001"),
    "nbest-4/fp32": (last_hypotheses, "99.70% of the sentences are identical, less than 99.8%"),
    "beam-1/fp32": (one_fewer, "have different numbers of hypotheses for a sentence"),
    "min-len/fp32": (no_number, "has a score of nan"),
    "lenpen-0.6/fp32": (None, "lenpen-0.6/fp32/fairseq_no_cudnn failed"),
    "beam-5/fp16": (many, "96.90% of the sentences are identical, less than 97.0%"),
}


def test_what_breaks_a_bound_is_found(stand_in: dict[str, str], tmp_path: Path) -> None:
    changes = {case: change for case, (change, _) in BROKEN.items()}
    result, rows = compare(tmp_path, stand_in, changes)
    assert result.returncode == 1
    (sentence,) = result.stderr.splitlines()
    for case, (_, problem) in BROKEN.items():
        assert any(
            part.startswith(case) and problem in part
            for part in sentence.removeprefix("translation.py: ").split("; ")
        ), (case, sentence)
    assert "beam-5/fp16: bleu_difference is " in sentence
    # If nothing can be compared, no row is written.
    assert rows.keys() == BROKEN.keys() - {"beam-1/fp32", "min-len/fp32", "lenpen-0.6/fp32"}
