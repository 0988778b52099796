"""A search with fewer slots than sentences, which it refills, finds the same as fairseq's."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.sequence_generator import SequenceGenerator
from helpers.searches import assert_close, assert_equal

from lightseq_fairseq.generation import decoder, search_buffers
from lightseq_fairseq.generation import search as of_search
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.search import search
from lightseq_fairseq.generation.source import SearchBatch
from lightseq_fairseq.plugins import generator as plugin

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-5": {"beam": 5},
    "lenpen-2": {"beam": 5, "lenpen": 2, "min_len": 12},
    "max-len": {"beam": 4, "max_len_a": 0.5, "max_len_b": 3},
    "at-once": {"beam": 3, "max_len_b": 0, "min_len": 0},
    "trigrams": {"beam": 3, "no_repeat_ngram_size": 3, "temperature": 1.5, "min_len": 18},
    "unkpen": {"beam": 4, "unkpen": -3, "max_len_b": 12},
    "groups": {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": 0.7},
}

# A few times the slots: more sentences would only refill them more often.
translate = functools.partial(digits.translate, count=36)


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> digits.Toy:
    return digits.exact()


Found = dict[int, list[Any]]


@pytest.fixture(scope="module", name="native")
def searches_of_fairseq(toy: digits.Toy) -> Callable[[dict[str, Any]], Found]:
    """What fairseq's search finds with some options."""
    found: dict[str, Found] = {}

    def native(options: dict[str, Any]) -> Found:
        key = repr(options)
        if key not in found:
            found[key] = translate(toy, [toy.native], **options)
        return found[key]

    return native


@pytest.fixture(name="slots")
def limited_slots(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Limits the slots of searches of a beam."""

    def limited(slots: int, beam: int) -> None:
        monkeypatch.setattr(of_search, "most_rows", lambda decoder, positions: slots * beam)

    return limited


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("beam", [1, 3, 5])
@pytest.mark.parametrize("most", [2, 7])
def test_slots_as_on_a_gpu(
    toy: digits.Toy, language_model: counting.Toy, native: Any, slots: Any, most: int, beam: int
) -> None:
    slots(most, beam)
    options = {"beam": beam, "max_len_a": 1.2, "max_len_b": 4, "no_repeat_ngram_size": 4}
    assert_close(translate(toy, [toy.ls], **options), native(options))
    words, task = counting.prompts(*range(9), 3, 5, 0, 6), language_model.task
    words[2] = torch.tensor([5, 2, 2])  # this prompt ends
    options = {"beam": beam, "max_len_b": 15}
    expected = counting.generate(task, [language_model.native], words, **options)
    assert_close(counting.generate(task, [language_model.ls], words, **options), expected)


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_few_slots(toy: digits.Toy, native: Any, options: dict[str, Any], slots: Any) -> None:
    slots(5, options["beam"])
    assert_close(translate(toy, [toy.ls], **options), native(options))


@pytest.mark.parametrize("lengths", [(3, 7, 1, 5, 5, 2, 9), (0, 3, 0, 6)])
@pytest.mark.parametrize("beam", [1, 4])
def test_few_slots_of_a_language_model(
    language_model: counting.Toy, beam: int, lengths: tuple[int, ...], slots: Any
) -> None:
    words, options = counting.prompts(*lengths), {"beam": beam, "max_len_b": 20}
    words[1][2:3] = 2  # this prompt ends
    toy = language_model
    native = counting.generate(toy.task, [toy.native], words, **options)
    slots(2, beam)
    assert_close(counting.generate(toy.task, [toy.ls], words, **options), native)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_unused_rows_of_fairseqs_search(toy: digits.Toy, native: Any) -> None:
    """They read no leftovers of the search before."""
    model, options = copy.deepcopy(toy.ls), {"beam": 3}
    for _ in range(2):
        found = translate(toy, [model], by=SequenceGenerator, **options)
        assert_close(found, native(options))
        model.decoder.steps.memory.ancestry.fill_(2**30)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_leftovers_of_another_search(
    toy: digits.Toy, native: Any, language_model: counting.Toy, slots: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slots(4, 3)
    monkeypatch.setattr(decoder, "_most_kept", lambda device: math.inf)
    model, text = copy.deepcopy(toy.ls), copy.deepcopy(language_model.ls)
    options, words = {"beam": 3, "max_len_b": 12}, counting.prompts(3, 7, 1, 5, 9, 2, 4)
    expected = counting.generate(language_model.task, [language_model.native], words, **options)
    for _ in range(2):
        assert_close(translate(toy, [model], **options), native(options))
        found = counting.generate(language_model.task, [text], words, **options)
        assert_close(found, expected)
        for memory in (model.decoder.steps.memory, text.decoder.steps.memory):
            for name in ("ancestry", "past_tokens", "hypothesis_tokens", "lengths"):
                getattr(memory, name).fill_(2**30)
            for name in ("cache", "source", "past_scores", "hypothesis_scores", "totals"):
                getattr(memory, name).fill_(torch.nan)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("most", [4, 100])
def test_buffers_that_grow(
    toy: digits.Toy, native: Any, slots: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    options = {"beam": 3, "max_len_a": 1.2, "max_len_b": 4, "count": digits.SENTENCES}
    slots(most, 3)
    monkeypatch.setattr(of_search, "expected_length", lambda source: 2)
    monkeypatch.setattr(search_buffers, "_ALIGNED", 4)
    grown: list[int] = []
    resize = search_buffers.SearchBuffers.resize

    def seen(self: Any, rows: int, positions: int, used: int) -> None:
        grown.append(positions)
        resize(self, rows, positions, used)

    monkeypatch.setattr(search_buffers.SearchBuffers, "resize", seen)
    assert_close(translate(toy, [copy.deepcopy(toy.ls)], **options), native(options))
    assert len(grown) > 3


def test_forced_tokens(toy: digits.Toy, slots: Any) -> None:
    sample = next(iter(digits.held_out(toy.task)))
    prefix = sample["target"][:, :3].clone()
    prefix[1::2, 1:] = 1  # pads
    prefix[2::3, 2:] = 1
    found = []
    slots(4, 3)
    for model in (toy.ls, toy.native):
        generator = toy.task.build_generator([model], GenerationConfig(beam=3, min_len=4))
        found.append(generator.generate([model], sample, prefix_tokens=prefix))
    assert_close(*(dict(enumerate(each)) for each in found))


@pytest.mark.parametrize(
    "more",
    [
        {"early_stopping": False},
        {"early_stopping": "never", "length_penalty": 2.0},
        {"early_stopping": True, "forces_eos": False},
        {"sampled": True, "topk": 4},
    ],
)
def test_other_rules(toy: digits.Toy, more: dict[str, Any], slots: Any) -> None:
    """The slots change nothing in the results, to the last bit."""
    sample = next(digits.first_held_out(toy.task, 36))
    batch = SearchBatch(sample["net_input"]["src_tokens"], 9)
    options, rng = SearchOptions(3, 1, 2, 3, **more), torch.tensor([5, 0])
    model = toy.ls
    run = functools.partial(
        search, model.decoder.steps, model.encoder, model.decoder, [batch], options, 2, rng
    )
    (expected,) = run()
    slots(3, 3)
    (found,) = run()
    assert_equal(found, expected)


@pytest.mark.parametrize("options", [{"match_source_len": True}, {"sampling": True, "beam": 2}])
def test_batches_of_fairseqs_search_are_searched_once(
    toy: digits.Toy, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """So samples are those of the seed."""
    generator = toy.task.build_generator([toy.ls], GenerationConfig(**options))
    digits.held_out(toy.task)  # loads them
    sentences = toy.task.dataset("valid")
    samples = [sentences.collater([sentences[i] for i in (n, n + 1)]) for n in range(0, 6, 2)]
    calls = [
        functools.partial(toy.task.inference_step, generator, [toy.ls], each) for each in samples
    ]
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(plugin, "TOGETHER", devices)
        torch.manual_seed(3)
        found.append(plugin.together(generator, calls))
        found.append(torch.rand(1))
    assert torch.equal(found[1], found[3])
    for mine, other in zip(found[0], found[2], strict=True):
        assert_close(mine, other)


def test_batches_that_are_searched_together(
    toy: digits.Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their results are those of each batch, and their sentences share the steps."""
    steps: list[int] = []
    features = decoder.StepDecoder.features

    def counted(self: Any, decoder: Any, rows: int, *more: Any) -> Any:
        steps.append(rows)
        return features(self, decoder, rows, *more)

    monkeypatch.setattr(decoder.StepDecoder, "features", counted)
    digits.held_out(toy.task)  # loads them
    sentences = toy.task.dataset("valid")
    samples = [
        sentences.collater([sentences[i] for i in range(first, first + 20)])
        for first in range(0, digits.SENTENCES, 20)
    ]
    options = {"beam": 4, "max_len_a": 1.2, "max_len_b": 6}
    generator = toy.task.build_generator([toy.ls], GenerationConfig(**options))
    calls = [
        functools.partial(toy.task.inference_step, generator, [toy.ls], each) for each in samples
    ]
    alone = plugin.together(generator, calls)
    apart = list(steps)
    steps.clear()
    monkeypatch.setattr(plugin, "TOGETHER", ("cpu",))
    found = plugin.together(generator, calls)
    for mine, other in zip(found, alone, strict=True):
        assert_close(dict(enumerate(mine)), dict(enumerate(other)))
    assert max(steps) == max(apart) and len(steps) < 0.85 * len(apart)
