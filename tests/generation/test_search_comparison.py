"""What tests of searches call the same hypotheses, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.searches import assert_close, difference_of_lines

ATOL = 1e-4
# A list of four hypotheses; the middle ones have equal scores.
SCORES = {(5, 9, 2): [-0.1, -0.2, -0.3], (7, 5, 2): [-0.3, -0.4, -0.5],
          (5, 7, 2): [-0.4, -0.3, -0.5], (8, 8, 2): [-0.5, -0.9, -1.0]}  # fmt: skip
BEST, FIRST, SECOND, LAST = SCORES
OTHER = (9, 9, 2)
LIST = [BEST, FIRST, SECOND, LAST]


def hypotheses(
    *words: tuple[int, ...], of: dict[tuple[int, ...], list[float]] = SCORES, less: float = 0.0
) -> list[dict[str, Any]]:
    """As fairseq's searches return them, with scores lowered by ``less``."""
    found = []
    for each in words:
        scores = torch.tensor(of[each]) - less
        found.append({"tokens": torch.tensor(each), "positional_scores": scores,
                      "score": scores.mean()})  # fmt: skip
    return found


def printed(found: list[dict[str, Any]], sentence: int = 3) -> list[list[str]]:
    """The lines of a command, in fields."""
    lines = [[f"S-{sentence}", "a b"]]
    for each in found:
        score, words = str(float(each["score"])), " ".join(f"w{n}" for n in each["tokens"].tolist())
        scores = " ".join(f"{x:.4f}" for x in each["positional_scores"].tolist())
        lines += [[f"H-{sentence}", score, words], [f"D-{sentence}", score, words],
                  [f"P-{sentence}", scores]]  # fmt: skip
    return lines


def is_same(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """By both comparisons, which must agree."""
    try:
        assert_close([ours], [expected], ATOL)
        same = True
    except AssertionError:
        same = False
    assert (not difference_of_lines(printed(ours), printed(expected), 3 * ATOL)) is same
    return same


def test_the_same() -> None:
    assert is_same(hypotheses(*LIST), hypotheses(*LIST))
    assert is_same(hypotheses(*LIST), hypotheses(*LIST, less=ATOL / 2))
    assert is_same([], [])


def test_equal_scores_are_in_any_order() -> None:
    assert is_same(hypotheses(BEST, SECOND, FIRST, LAST), hypotheses(*LIST))
    assert not is_same(hypotheses(FIRST, BEST, SECOND, LAST), hypotheses(*LIST))


def test_one_of_two_equal_scores_is_found() -> None:
    assert is_same(hypotheses(BEST, FIRST), hypotheses(BEST, SECOND))
    # A hypothesis that was finished earlier may have a lower score.
    assert is_same(hypotheses(BEST, FIRST, LAST), hypotheses(BEST, SECOND, LAST))
    assert not is_same(hypotheses(BEST, FIRST), hypotheses(BEST, FIRST, SECOND))
    for lower, same in ((ATOL / 20, True), (ATOL / 2, False)):
        of = {**SCORES, SECOND: [score - lower for score in SCORES[SECOND]]}
        ours, native = [hypotheses(BEST, SECOND, LAST, of=of)], [hypotheses(*LIST[:2], LAST)]
        if same:
            assert_close(ours, native, ATOL)
        else:
            with pytest.raises(AssertionError):
                assert_close(ours, native, ATOL)


@pytest.mark.parametrize("place", range(4))
def test_wrong_words(place: int) -> None:
    of = {**SCORES, OTHER: SCORES[LIST[place]]}
    words = [*LIST[:place], OTHER, *LIST[place + 1 :]]
    assert not is_same(hypotheses(*words, of=of), hypotheses(*LIST))
    # also with a hypothesis less, that is with any of them at the end
    assert not is_same(hypotheses(*words[: place + 1], of=of), hypotheses(*LIST[: place + 1]))


@pytest.mark.parametrize("place", range(4))
def test_wrong_scores(place: int) -> None:
    for lower in ([0, 0, -0.01], [-0.1, 0.1, 0]):  # of the whole; of two words alone
        scores = [a + b for a, b in zip(SCORES[LIST[place]], lower, strict=True)]
        of = {**SCORES, LIST[place]: scores}
        assert not is_same(hypotheses(*LIST, of=of), hypotheses(*LIST)), lower
    assert not is_same(hypotheses(*LIST, less=3e-3), hypotheses(*LIST))


def test_missing_hypotheses() -> None:
    for place in range(4):
        fewer = [*LIST[:place], *LIST[place + 1 :]]
        assert not is_same(hypotheses(*fewer), hypotheses(*LIST))
        assert not is_same(hypotheses(*LIST), hypotheses(*fewer))
        twice = [*fewer[:1], *fewer]
        assert not is_same(hypotheses(*twice), hypotheses(*LIST))


def test_sentences_and_other_lines() -> None:
    found = hypotheses(*LIST)
    with pytest.raises(AssertionError):
        assert_close({1: found}, {1: found, 2: found})
    assert_close({2: found, 1: found[:1]}, {1: found[:1], 2: found})
    lines = printed(found)
    assert difference_of_lines(lines, printed(found, 4), ATOL)
    assert difference_of_lines([["S-3", "a c"], *lines[1:]], lines, ATOL)
    assert difference_of_lines(lines[1:], lines, ATOL)
    assert difference_of_lines(lines[:-1], lines, ATOL)
    assert difference_of_lines(lines + printed(found, 4), lines, ATOL)
    soft = [*lines, ["A-3", "0.1,0.2 0.3,0.4"]]
    assert not difference_of_lines([*lines, ["A-3", "0.1,0.2 0.3,0.40001"]], soft, ATOL)
    assert difference_of_lines([*lines, ["A-3", "0.1,0.2 0.3,0.5"]], soft[:-1], ATOL)
    hard = [*lines[:4], ["A-3", "0-0 1-1"], *lines[4:]]
    assert difference_of_lines([*lines[:4], ["A-3", "0-0 1-0"], *lines[4:]], hard, ATOL)
