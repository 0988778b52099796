"""An engine on the GPU: requests get the words of a search of their own, and graphs are reused."""

from __future__ import annotations

import copy

import helpers.counting as counting
import helpers.digits as digits
import pytest
import torch
from helpers.requests import (
    EOS,
    PAD,
    assert_served,
    assert_streamed,
    engine_of,
    requests_of,
    run,
)
from helpers.searches import graphs

from lightseq_fairseq.generation.engine import Request
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.source import SearchBatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_requests_of_all_kinds(dtype: torch.dtype) -> None:
    model = copy.deepcopy(digits.toy().ls).to("cuda", dtype)
    engine = engine_of(model)
    for _ in range(2):  # the second time most steps are graphs
        rounds = dtype != torch.float32
        assert_served(engine, model, requests_of(digits.toy(), 60), rounds)
    assert graphs(model) > 3
    engine.close()


def test_tokens_are_told_as_they_are_found() -> None:
    assert_streamed(copy.deepcopy(counting.toy().ls).cuda())


def test_memory_and_graphs_do_not_grow() -> None:
    """However many requests there are."""
    model = copy.deepcopy(digits.toy().ls).cuda()
    engine, options = engine_of(model), SearchOptions(3, PAD, EOS, 3)
    requests = [
        Request(SearchBatch(digits.sentences(length), 20), options, EOS, 0)
        for length in (3, 9, 5, 7, 12, 4)
    ]
    seen = []
    for _ in range(6):
        for request in requests:
            engine.submit(request)
        run(engine)
        seen.append((torch.cuda.memory_reserved(), graphs(model)))
    assert seen[2:] == [seen[2]] * 4
