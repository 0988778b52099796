"""Sentences that arrive while others are searched get the words of a search of their own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import pytest
import torch
from helpers.searches import assert_close
from torch import Tensor

from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search import Room, Search, search
from lightseq_fairseq.generation.source import Group, Ring, SearchBatch

PAD, EOS = 1, 2
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-4": {"beam": 4},
    "lenpen": {"beam": 3, "length_penalty": 2.0, "no_repeat_ngram": 3},
    "transformers": {"beam": 3, "early_stopping": False},
    "groups": {"beam": 4, "groups": 2, "diversity": 0.5},
}


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> digits.Toy:
    return digits.exact()


def requests(sources: Sequence[Tensor], rng: random.Random, forces: bool) -> list[SearchBatch]:
    """Each of one to four sources, with limits of their own."""
    found, first = [], 0
    while first < len(sources):
        some = sources[first : first + rng.randint(1, 4)]
        first += len(some)
        padded = torch.nn.utils.rnn.pad_sequence(list(some), batch_first=True, padding_value=PAD)
        forced = torch.randint(5, 12, (len(some), 2)) if forces else None
        found.append(SearchBatch(padded, rng.randint(6, 25), forced))
    return found


def arrive(
    opened: Search, asked: Sequence[SearchBatch], rng: random.Random, cancels: float = 0.0
) -> dict[int, Any]:
    """The results of the requests, which arrive one or a few at a time; {number: results}."""
    waiting, found = [*enumerate(asked)], {}
    living: dict[Group, int] = {}
    while waiting or opened.is_busy:
        some = waiting[: rng.randint(1, 3)]
        groups = opened.add([each for _, each in some]) if some and rng.random() < 0.5 else None
        if groups is not None:
            del waiting[: len(some)]
            living |= dict(zip(groups, (number for number, _ in some), strict=True))
        opened.advance()
        for group in opened.ended:
            found[living.pop(group)] = group.results.read()
        opened.ended.clear()
        if living and rng.random() < cancels:
            cancelled = rng.choice([*living])
            living.pop(cancelled)
            opened.cancel(cancelled)
            opened.cancel(cancelled)  # nothing happens
    assert opened.free == len(opened.in_slot)
    return found


def room(asked: Sequence[SearchBatch], slots: int, chunks: int, forced: int = 0) -> Room:
    tokens, longest = slots * 40, max(each.tokens.shape[1] for each in asked)
    most = max(each.max_len for each in asked)
    return Room(slots, chunks, 2 * slots, tokens, slots, tokens, longest, most, forced, forced)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("cancels", [0.0, 0.2])
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_translations(toy: digits.Toy, options: dict[str, Any], cancels: float) -> None:
    rng, model = random.Random(repr(options)), toy.ls
    sample = next(digits.first_held_out(toy.task, 60))
    sources = [each[each != PAD] for each in sample["net_input"]["src_tokens"]]
    chosen = SearchOptions(pad=PAD, eos=EOS, unk=3, **options)
    asked = requests(sources, rng, forces=options["beam"] == 4)
    steps, encoder, decoder = model.decoder.steps, model.encoder, model.decoder
    expected = [search(steps, encoder, decoder, [each], chosen, EOS)[0] for each in asked]
    forced = 2 * (asked[0].forced is not None)
    opened = Search(steps, encoder, decoder, chosen, EOS, room(asked, 12, 6, forced))
    found = arrive(opened, asked, rng, cancels)
    opened.close()
    assert cancels or len(found) == len(asked)
    assert len(found) > len(asked) / 4
    for number, mine in found.items():
        assert_close(dict(enumerate(mine)), dict(enumerate(expected[number])))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("beam", [1, 3])
def test_prompts(language_model: counting.Toy, beam: int) -> None:
    rng, decoder = random.Random(beam), language_model.ls.decoder
    chosen = SearchOptions(beam, PAD, EOS, 3)
    words = [each[: rng.randint(1, len(each) - 1)] for each in counting.prompts(*range(3, 12)) * 3]
    words[4] = torch.tensor([5, 6, EOS])  # this prompt has ended
    asked = requests(words, rng, forces=False)
    steps = decoder.steps
    expected = [search(steps, None, decoder, [each], chosen, EOS)[0] for each in asked]
    sizes = room(asked, 9, 6)
    sizes = sizes._replace(longest=sizes.longest + 1)  # the first decoder input
    opened = Search(steps, None, decoder, chosen, EOS, sizes, reads_prompts=True)
    found = arrive(opened, asked, rng)
    opened.close()
    assert len(found) == len(asked)
    for number, mine in found.items():
        assert_close(dict(enumerate(mine)), dict(enumerate(expected[number])))


def test_requests_without_room(toy: digits.Toy) -> None:
    """They change nothing, and have room when others have ended."""
    model = toy.ls
    chosen = SearchOptions(2, PAD, EOS, 3)
    five = SearchBatch(digits.sentences(4, 4, 4, 4, 4), 8)
    opened = Search(
        model.decoder.steps, model.encoder, model.decoder, chosen, EOS, room([five], 7, 2)
    )
    groups = opened.add([five])
    assert groups is not None
    assert opened.add([five]) is None  # two slots are left
    assert opened.add([five._replace(tokens=five.tokens[:2])]) is not None
    while opened.is_busy:
        opened.advance()
    assert len(opened.ended) == 2
    assert opened.add([five]) is not None


def test_places_of_a_ring() -> None:
    """No two that are taken overlap, and none is lost."""
    rng, ring, size = random.Random(2), Ring(20), 20
    taken: list[range] = []
    seen = 0
    for _ in range(2000):
        count = rng.randint(1, 20)
        start = ring.find(count)
        if start is None or rng.random() < 0.3:
            if taken:
                ring.give()
                taken.pop(0)
            continue
        ring.take(start, count)
        mine = range(start, start + count)
        assert start >= 0 and mine.stop <= size
        assert all(mine.stop <= each.start or each.stop <= mine.start for each in taken)
        taken.append(mine)
        seen = max(seen, sum(map(len, taken)))
    assert seen > 17
    while taken:
        ring.give()
        taken.pop()
    assert ring.find(size) == 0
