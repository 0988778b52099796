"""The example of summaries: its pairs, its score, and a short run by both systems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.example_runs import CODE, assert_refused, start

from examples.summaries import docstrings, rouge

SYSTEMS = {"lightseq": [], "fairseq": ["--native"]}
UPDATES = 4
SOURCE = '''
"""A module has none. It is no function."""

class Queue:
    """A queue of items. The first one that is put into it
    is the first one that is taken. See put()."""

    async def put(self, item, wait):
        "Put an item into it."

    def size(self):
        """The size is this. E.g. 3"""

    def nothing(self): pass
'''


def test_a_docstring_is_a_summary_and_a_text() -> None:
    found = list(docstrings.docstrings(SOURCE))
    assert [each.name for each in found] == ["class Queue", "put(item, wait)", "size()"]
    queue, put, size = found
    assert queue.summary == "A queue of items."
    assert queue.text == (
        "class Queue: The first one that is put into it is the first one that is taken. See put()."
    )
    assert put.all == "put(item, wait): Put an item into it."
    assert queue.is_pair() and not put.is_pair() and not size.is_pair()
    long = docstrings.Docstring("f()", "A summary of it.", "word " * 500)
    assert len(long.text.split()) == len(long.all.split()) == docstrings.TEXT


def test_no_summary_is_in_two_splits(tmp_path: Path) -> None:
    code = "def f():\n    '''{} the value of it. It has a value, which is {}.'''\n"
    for number in range(200):
        both = code.format("Return", number) + code.format(f"Find {number % 50} times", number)
        (tmp_path / f"module{number}.py").write_text(both)
    found = docstrings.splits(tmp_path)
    test, valid, train = ({each.summary for each in found[split]} for split in found)
    assert "Return the value of it." in test and test and valid and train
    assert not test & valid and not (test | valid) & train
    assert len(docstrings.splits(tmp_path, files=10)["train"]) < len(found["train"])


@pytest.mark.parametrize(
    ("summary", "reference", "score"),
    [
        ("Return the size.", "return the size", 100.0),
        ("Return the size of it", "The size", 200 * 2 / 7),
        ("b a", "a b", 50.0),
        ("", "a b", 0.0),
        ("", "", 0.0),
    ],
)
def test_rouge_l(summary: str, reference: str, score: float) -> None:
    assert rouge.rouge_l(summary, reference) == pytest.approx(score)


def test_the_lead_is_the_first_sentence_of_the_text() -> None:
    assert rouge.lead("f(x): One. Two.") == "One."
    assert rouge.lead("class A: One: two") == "One: two"


@pytest.mark.parametrize("words", [("--update", "3"), ("--size", "tpu"), ("--updates", CODE)])
def test_a_wrong_argument_is_refused(words: tuple[str, ...]) -> None:
    assert_refused("summaries", *words)


def test_both_systems_summarise(tmp_path: Path) -> None:
    short = ["--size", "cpu", "--files", "20", "--pretraining-updates", str(UPDATES)]
    short += ["--updates", str(UPDATES), "--out", str(tmp_path)]
    for process in [start("summaries", *words, *short) for words in SYSTEMS.values()]:
        output, errors = process.communicate(timeout=280)
        assert process.returncode == 0, output[-3000:] + errors[-3000:]
        assert output.splitlines()[-1].startswith("ROUGE-L ") and "\nreference: " in output
    for system, arch in zip(SYSTEMS, ("ls_bart_base", "bart_base")):
        run = tmp_path / f"cpu-{system}-seed1"
        for log in ("pre-training.log", "fine-tuning.log"):
            assert f"| model: {arch}, " in (run / log).read_text()
        first = (run / "fine-tuning.log").read_text().split("| step: ")[0]
        assert "pretrained/checkpoint_best.pt" in first
        lines = len((run / "text/test.text").read_text().splitlines())
        assert len((run / "summaries.txt").read_text().splitlines()) == lines > 0
    rows = json.loads((tmp_path / "rouge.json").read_text())
    assert {row["system"]: row["updates"] for row in rows} == dict.fromkeys(SYSTEMS, UPDATES)
    assert rows[0]["rouge_l_of_lead"] == rows[1]["rouge_l_of_lead"] > 0
