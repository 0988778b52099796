"""For tests of searches: compares the hypotheses of two runs, and counts searches and graphs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

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


def assert_close(ours: Found, expected: Found) -> None:
    """Equal words, and scores that differ by rounding of float32 alone."""
    assert tokens_of(ours) == tokens_of(expected)
    for mine, other in zip(ours, expected, strict=True):
        for a, b in zip(mine, other, strict=True):
            for name in ("score", "positional_scores"):
                torch.testing.assert_close(a[name].cpu(), b[name], rtol=0, atol=1e-4)


def assert_equal(run: Found, other: Found) -> None:
    """Equal words, and scores with the same bits."""
    assert tokens_of(run) == tokens_of(other)
    for mine, its in zip(run, other, strict=True):
        for a, b in zip(mine, its, strict=True):
            for name in ("score", "positional_scores"):
                assert torch.equal(a[name], b[name])
