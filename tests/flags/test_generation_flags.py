"""With every flag of generation our model gives what fairseq's model gives, for 40 sentences."""

from __future__ import annotations

import functools
import itertools
import shlex
from pathlib import Path

import helpers.digits as digits
import pytest
from helpers.cli_runs import succeed
from helpers.flag_runs import Proofs, names, pieces, table
from helpers.searches import difference_of_lines

# Kinds of output lines: Source, Target, Hypothesis, Detokenised, Positional scores, Alignment,
# Constraint. "W" lines hold times and are not compared.
KINDS = "STHDPAC"
SENTENCES = 40
TOLERANCE = 1e-3  # for log2-probabilities in float32, printed with four decimals
PLAIN = "--beam 4"

# All run with `lightseq-generate`; each gives another output than PLAIN.
SEARCHES = {
    "greedy": "--beam 1",
    "beam-5-nbest": "--beam 5 --nbest 5",
    "lenpen-0.6": "--beam 4 --lenpen 0.6",
    "lenpen-2": "--beam 4 --lenpen 2 --min-len 12",
    "unnormalized": "--beam 4 --unnormalized",
    "max-len": "--beam 4 --max-len-a 0.5 --max-len-b 3",
    "match-source-len": "--beam 4 --match-source-len",
    "unkpen": "--beam 4 --unkpen -3 --max-len-b 12",
    "prefix": "--beam 4 --prefix-size 2",
    "no-repeat-ngram": "--beam 4 --no-repeat-ngram-size 2",
    "temperature": "--beam 4 --temperature 2",
    "diverse-groups": "--beam 4 --diverse-beam-groups 2 --diverse-beam-strength 0.7 --nbest 4",
    "diverse-siblings": "--beam 4 --diversity-rate 2 --nbest 4",
    "alignment": "--beam 4 --print-alignment",
    "soft-alignment": "--beam 2 --print-alignment soft",
    "score-reference": "--score-reference --print-alignment",
    "replace-unk": "--beam 2 --replace-unk --unkpen -3 --max-len-b 8",
    "replace-unk-file": "--beam 2 --replace-unk {dictionary} --unkpen -3 --max-len-b 8",
    "sampling": "--beam 2 --nbest 2 --seed 4 --sampling",
    "sampling-topk": "--beam 2 --nbest 2 --seed 4 --sampling --sampling-topk 3",
    "sampling-topp": "--beam 2 --nbest 2 --seed 4 --sampling --sampling-topp 0.8",
    "ensemble": "--beam 4 --path {halfway}:{last}",
    "odd-batches": "--beam 4 --batch-size 7 --required-batch-size-multiple 4",
}
CONSTRAINTS = ("ordered", "unordered")
# A line of several settings shows that they work together, not that each of them has an effect.
ALONE = [line for line in SEARCHES.values() if len(pieces(line.removeprefix(PLAIN))) == 1]
PROVEN: Proofs = {
    ("generate", table.WORKS): names(*ALONE),
    ("interactive", table.WORKS): names("--constraints"),
}


@pytest.fixture(scope="module", autouse=True)
def files() -> None:
    """A split with the first sentences of "test", and the file for --replace-unk: a German word and
    its English translation on each line."""
    folder = digits.toy().folder
    for side in ("src", "tgt"):
        lines = (folder / f"test.src-tgt.{side}").read_text().splitlines(keepends=True)
        (folder / f"few.src-tgt.{side}").write_text("".join(lines[:SENTENCES]))
    words = "".join(f"{a} {b}\n" for a, b in zip(*digits.DIGITS, strict=True))
    (folder / "german-english.txt").write_text(words)


@functools.cache
def output(command: str, flags: str, native: bool) -> list[list[str]]:
    """What a command prints about its sentences: the fields of each line, the label first."""
    toy = digits.toy()
    halfway, last = toy.paths
    words: list[str | Path] = ["--path", last, "--dataset-impl", "raw", "--gen-subset", "few"]
    words += shlex.split("--cpu -s src -t tgt --num-workers 0")
    if "--batch-size" not in flags and command == "generate":
        words += ["--max-tokens", "2000"]
    given = flags.format(
        halfway=halfway, last=last, dictionary=toy.folder / "german-english.txt", folder=toy.folder
    )
    text = succeed(command, toy.folder, *words, *shlex.split(given), *["--native"] * native)
    lines = [line.split("\t") for line in text.splitlines()]
    return [fields for fields in lines if fields[0][:2] in {f"{kind}-" for kind in KINDS}]


def assert_same(ours: list[list[str]], native: list[list[str]]) -> None:
    assert not difference_of_lines(ours, native, TOLERANCE)


def sentences(found: list[list[str]]) -> list[int]:
    """The number of each sentence with a hypothesis, once for each hypothesis."""
    return [int(label[2:]) for label, *_ in found if label.startswith("H-")]


@pytest.mark.parametrize("flags", SEARCHES.values(), ids=SEARCHES.keys())
def test_generate(flags: str) -> None:
    native = output("generate", flags, True)
    assert_same(output("generate", flags, False), native)
    found = sentences(native)
    assert set(found) == set(range(SENTENCES))
    best = int(flags.partition("--nbest ")[2].partition(" ")[0] or 1)
    assert len(found) == best * SENTENCES
    assert native != output("generate", PLAIN, True)


def test_replaced_words_are_the_sources_or_the_dictionarys() -> None:
    copied, looked_up = (
        {word for fields in output("generate", SEARCHES[name], False) if fields[0][0] == "H"
         for word in fields[2].split()}
        for name in ("replace-unk", "replace-unk-file")
    )  # fmt: skip
    german, english = map(set, digits.DIGITS)
    assert copied & german and any(word.endswith("zig") for word in copied)
    assert "<unk>" not in copied | looked_up
    assert not looked_up & german and looked_up & english


def test_no_pair_of_words_comes_twice() -> None:
    found = output("generate", SEARCHES["no-repeat-ngram"], False)
    texts, scores = ([fields[-1].split() for fields in found if fields[0][0] == k] for k in "HP")
    # Each word and the end have a score. The model may also produce <s>, which is not printed.
    whole = [
        words for words, each in zip(texts, scores, strict=True) if len(each) == len(words) + 1
    ]
    assert len(whole) > SENTENCES * 0.9
    for words in whole:
        pairs = list(itertools.pairwise(words))
        assert len(pairs) == len(set(pairs)), words


@pytest.mark.parametrize("constraints", CONSTRAINTS)
def test_lexical_constraints(constraints: str) -> None:
    folder = digits.toy().folder
    lines = (folder / "few.src-tgt.src").read_text().splitlines()
    english = digits.DIGITS[1]
    asked = [(english[i % 10], english[i % 7]) for i in range(len(lines))]
    (folder / "constrained").write_text(
        "".join(f"{line}\t{a}\t{b}\n" for line, (a, b) in zip(lines, asked, strict=True))
    )
    flags = (
        f"--constraints {constraints} --beam 6 --buffer-size 100 --max-tokens 2000 "
        "--input {folder}/constrained"
    )
    native = output("interactive", flags, True)
    assert_same(output("interactive", flags, False), native)
    hypotheses = [fields[2].split() for fields in native if fields[0][0] == "H"]
    assert len(hypotheses) == SENTENCES
    for words, (a, b) in zip(hypotheses, asked, strict=True):
        assert a in words and b in words


@pytest.mark.parametrize(
    "buffers", ["--buffer-size 64 --batch-size 16", "--buffer-size 500 --max-tokens 300"]
)
def test_interactive_with_buffers(buffers: str) -> None:
    flags = "--beam 3 --print-alignment --input {folder}/few.src-tgt.src "
    native = output("interactive", flags + buffers, True)
    ours = output("interactive", flags + buffers, False)
    assert_same(ours, native)
    assert sentences(ours) == list(range(SENTENCES))
    assert_same(ours, output("interactive", flags + "--buffer-size 1", False))
