"""For tests of searches: compares the hypotheses of two runs, and counts searches and graphs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightseq_fairseq.generation.search import search
from lightseq_fairseq.plugins import generator as plugin

Found = Sequence[Sequence[Mapping[str, Tensor]]]  # the hypotheses of each sentence or prompt


@pytest.fixture(name="searches")
def counted_searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that gets the options of each run of our own search."""
    seen: list[Any] = []

    def counted(*arguments: Any) -> Any:
        seen.append(arguments[4])
        return search(*arguments)

    monkeypatch.setattr(plugin, "search", counted)
    return seen


def forbid_waits(monkeypatch: pytest.MonkeyPatch, *functions: tuple[Any, str]) -> list[str]:
    """While one of the functions runs, given as (owner, name), waiting for the GPU is an error.

    Returns a list that gets the name of each call.
    """
    calls: list[str] = []

    def without_waiting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*arguments: Any) -> Any:
            calls.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return wrapped

    for owner, name in functions:
        monkeypatch.setattr(owner, name, without_waiting(name, getattr(owner, name)))
    return calls


def graphs(model: Any) -> int:
    """The number of CUDA graphs that the model's search keeps."""
    kept = model.decoder.steps._graphs
    return 0 if kept is None else len(kept._graphs)


def tokens_of(found: Found) -> list[list[list[int]]]:
    return [[h["tokens"].tolist() for h in each] for each in found]


class Hypothesis(NamedTuple):
    """A hypothesis as it is compared: the words are equal, the numbers within a tolerance."""

    score: float
    words: list[Any]
    numbers: list[float]  # such as the scores of its words


def difference(ours: Sequence[Hypothesis], expected: Sequence[Hypothesis], atol: float) -> str:
    """How two n-best lists differ beyond rounding; "" if they do not.

    Which of two hypotheses of equal scores comes first, and which of them is still found when a
    search ends, is decided by the last bits, which depend on the processor. So hypotheses whose
    scores differ by at most ``atol`` may be in any order, and one may stand for another whose score
    is equal, that is within a tenth of ``atol``.
    """
    if len(ours) != len(expected):
        return f"{len(ours)} hypotheses, expected {len(expected)}"
    if not _near([each.score for each in ours], [each.score for each in expected], atol):
        return f"scores {[each.score for each in ours]}, expected {[e.score for e in expected]}"
    others, missing = [], list(expected)
    for mine in ours:
        found = [
            place
            for place, its in enumerate(missing)
            if mine.words == its.words and _near(_scores(mine), _scores(its), atol)
        ]
        if found:
            del missing[found[0]]
        else:
            others.append(mine)
    if not _near([each.score for each in others], [each.score for each in missing], atol / 10):
        return f"{others}, expected {missing}"
    # Such a pair differs in its words and in their scores. Otherwise one of the two is wrong.
    for mine, its in itertools.product(others, missing):
        if mine.words == its.words or _near(mine.numbers, its.numbers, atol):
            return f"{mine}, expected {its}"
    return ""


def _scores(hypothesis: Hypothesis) -> list[float]:
    return [hypothesis.score, *hypothesis.numbers]


def _near(mine: Sequence[float], other: Sequence[float], atol: float) -> bool:
    return len(mine) == len(other) and all(
        math.isclose(a, b, rel_tol=0, abs_tol=atol) for a, b in zip(mine, other, strict=True)
    )


def assert_close(ours: Any, expected: Any, atol: float = 1e-4) -> None:
    """The same hypotheses up to rounding: lists of fairseq's dicts, in a list or by sentence."""
    assert len(ours) == len(expected)
    for sentence in expected if isinstance(expected, Mapping) else range(len(expected)):
        lists = [[_of_search(each) for each in found[sentence]] for found in (ours, expected)]
        assert not difference(*lists, atol), sentence


def _of_search(found: Mapping[str, Tensor]) -> Hypothesis:
    scores = found["positional_scores"].tolist()
    return Hypothesis(float(found["score"]), found["tokens"].tolist(), scores)


Lines = Sequence[Sequence[str]]  # printed lines, split into fields


def difference_of_lines(ours: Lines, expected: Lines, atol: float) -> str:
    """How the lines that two commands print differ; `difference` compares their hypotheses."""
    labels = [[label for label, *_ in lines] for lines in (ours, expected)]
    if labels[0] != labels[1]:
        return f"{labels[0]}, expected {labels[1]}"
    for (label, part), (_, other) in zip(_parts(ours), _parts(expected), strict=True):
        if found := difference(part, other, atol):
            return f"{label}: {found}"
    return ""


def _parts(lines: Lines) -> list[tuple[str, list[Hypothesis]]]:
    """Each line that is of no hypothesis, and all hypotheses of each sentence; with a label."""
    parts: list[tuple[str, list[Hypothesis]]] = []
    for label, *fields in lines:
        kind, _, number = label.partition("-")
        of_hypothesis = kind in ("H", "D", "P", "A") and number.isdigit()
        if not of_hypothesis:
            parts.append((label, [_parsed(fields)]))
            continue
        if not parts or parts[-1][0] != f"hypotheses of {number}":
            parts.append((f"hypotheses of {number}", []))
        hypotheses = parts[-1][1]
        if kind == "H":
            hypotheses.append(_parsed(fields[1:], float(fields[0])))
        else:
            hypothesis, more = hypotheses[-1], _parsed(fields)
            hypothesis.words.extend(more.words)
            hypothesis.numbers.extend(more.numbers)
    return parts


def _parsed(fields: Sequence[str], score: float = 0.0) -> Hypothesis:
    """Fields of numbers, such as scores or the weights of a soft alignment, and fields of words."""
    found = Hypothesis(score, [], [])
    for place, text in enumerate(fields):
        try:
            found.numbers.extend(float(number) for number in text.replace(",", " ").split())
        except ValueError:
            found.words.append((place, text))
    return found


def assert_equal(run: Found, other: Found) -> None:
    """Equal words, and scores with the same bits."""
    assert tokens_of(run) == tokens_of(other)
    for mine, its in zip(run, other, strict=True):
        for a, b in zip(mine, its, strict=True):
            for name in ("score", "positional_scores"):
                assert torch.equal(a[name], b[name])
