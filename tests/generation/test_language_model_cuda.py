"""Language models on the GPU generate the same words as on the CPU, and captured steps are equal to
eager ones bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import helpers.counting as counting
import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers.counting import Toy, prompts
from helpers.searches import (  # noqa: F401  (a fixture among them)
    Found,
    assert_close,
    assert_equal,
    counted_searches,
    forbid_waits,
    graphs,
    tokens_of,
)

from lightseq_fairseq.generation import search
from lightseq_fairseq.generation.decoder import StepDecoder
from lightseq_fairseq.plugins import generator as plugin

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-4": {"beam": 4, "lenpen": 0.6},
    "beam-5": {"beam": 5, "unkpen": -1, "min_len": 9},
    "max-len": {"beam": 4, "max_len_a": 1.2, "max_len_b": 3},
    "shorter-than-prompts": {"beam": 2, "max_len_b": 5},
    "ngrams": {"beam": 3, "no_repeat_ngram_size": 2},
    "temperature": {"beam": 3, "no_repeat_ngram_size": 3, "temperature": 1.5},
}
# Words of each prompt. Batches 2 and 3 use the same number of rows, and batch 1 nearly as many.
Batches = tuple[tuple[int, ...], ...]
BATCHES: Batches = ((5,) * 13, (3, 7, 1, 5, 5, 2, 0, 19), (9, 1, 2, 4, 11, 12, 3, 0), (6,))


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> Toy:
    return counting.toy()


def batches(by: Any, options: dict[str, Any]) -> Batches:
    """The batches that the search ``by`` can continue with these options.

    fairseq's search ends with an AssertionError if a prompt repeats an n-gram that it blocks.
    """
    fails = by is SequenceGenerator and "no_repeat_ngram_size" in options
    return (BATCHES[0], BATCHES[-1]) if fails else BATCHES


def generate(
    model: Any, by: Any = None, on_cpu: bool = False, of: Batches = BATCHES, **options: Any
) -> Found:
    """The hypotheses of all batches. The samples are on the model's device, or on the CPU."""
    found: list[Any] = []
    for lengths in of:
        options = {"max_len_b": 30, **options}
        words = prompts(*lengths)
        results = counting.generate(counting.toy().task, [model], words, by, on_cpu, **options)
        found += results.values()
    return found


@pytest.mark.parametrize("by", [None, SequenceGenerator], ids=["own", "fairseqs"])
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_float32_is_the_cpus(toy: Toy, options: dict[str, Any], by: Any) -> None:
    model, of = copy.deepcopy(toy.ls).cuda(), batches(by, options)
    expected = generate(toy.ls, of=of, **options)
    assert_close(generate(model, by, of=of, **options), expected)
    before = graphs(model)
    # Graphs run from the first step on.
    assert_close(generate(model, by, of=of, **options), expected)
    assert graphs(model) >= before > 0


@pytest.mark.parametrize("options", [{"beam": 5}, {"beam": 2, "no_repeat_ngram_size": 2}])
@pytest.mark.parametrize("by", [None, SequenceGenerator], ids=["own", "fairseqs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_captured_and_plain_steps_are_equal(
    toy: Toy, dtype: torch.dtype, by: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, of = copy.deepcopy(toy.ls).cuda().to(dtype), batches(by, options)
    runs = [generate(captured, by, of=of, **options) for _ in range(3)]
    assert graphs(captured) > 0
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    plain = copy.deepcopy(toy.ls).cuda().to(dtype)
    runs.append(generate(plain, by, of=of, **options))
    assert graphs(plain) == 0
    for run in runs[1:]:
        assert_equal(run, runs[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_as_good_as_fairseqs(toy: Toy, dtype: torch.dtype) -> None:
    expected = tokens_of(generate(toy.ls, beam=4))

    def others(model: Any) -> int:
        """Number of prompts that the model continues differently in ``dtype``."""
        found = tokens_of(generate(copy.deepcopy(model).cuda().to(dtype), beam=4))
        return sum(a[0] != b[0] for a, b in zip(found, expected, strict=True))

    assert others(toy.ls) <= max(2 * others(toy.native), 0.1 * len(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "flags",
    [
        {"decoder_normalize_before": True, "decoder_learned_pos": True},
        {"decoder_input_dim": 24, "decoder_output_dim": 16, "activation_fn": "gelu"},
        {"no_decoder_final_norm": True, "decoder_normalize_before": True, "add_bos_token": True},
    ],
)
def test_prompts_are_read_as_steps_read_them(flags: dict[str, Any], dtype: torch.dtype) -> None:
    """Prompts read in one packed pass give the same scores as prompts read token by token."""
    task, model, _ = counting.variant(**flags)
    model = model.cuda().to(dtype)
    words = prompts(3, 20, 11, 7)
    at_once, stepwise = (
        counting.generate(task, [model], words, by, beam=1, max_len_b=24, min_len=24)
        for by in (None, SequenceGenerator)
    )
    atol = 1e-4 if dtype == torch.float32 else 0.15
    for number, prompt in enumerate(words):
        mine, other = (found[number][0] for found in (at_once, stepwise))
        until = len(prompt)  # later tokens may differ if two candidates have nearly equal scores
        torch.testing.assert_close(
            mine["positional_scores"][: until - 1],
            other["positional_scores"][: until - 1].cpu().float(),
            rtol=0.02, atol=atol,
        )  # fmt: skip
        if dtype == torch.float32:
            assert mine["tokens"].tolist() == other["tokens"].tolist()


@pytest.mark.parametrize(
    "flags",
    [
        {"adaptive_input": True, "adaptive_input_cutoff": "6,10"},
        {"adaptive_softmax_cutoff": "6,10"},
    ],
)
def test_adaptive_models(flags: dict[str, Any]) -> None:
    task, model, _ = counting.variant(**flags)
    words = prompts(3, 7, 1, 5)
    expected, *found = (
        list(counting.generate(task, [each], words, beam=3, max_len_b=30).values())
        for each in (model, *[copy.deepcopy(model).cuda()] * 3)
    )
    for each in found:
        assert_close(each, expected)


def test_nothing_waits_within_the_loop(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    options = {"beam": 3, "no_repeat_ngram_size": 2}
    for _ in range(3):  # afterwards memory has its final size, and all graphs exist
        generate(model, **options)
    names = ("__init__", "_refill", "_compact", "_step")
    calls = forbid_waits(monkeypatch, *((search.Search, name) for name in names))
    generate(model, on_cpu=True, **options)
    assert set(calls) == {*names}


def test_a_prompt_is_one_pass_and_a_token_one_graph(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    words = prompts(9, 9, 9)
    options = {"beam": 2, "max_len_b": 20, "min_len": 20}
    for _ in range(3):
        counting.generate(toy.task, [model], words, **options)
    keys: list[Any] = []
    launch = StepDecoder.launch

    def recorded(self: Any, key: Any, function: Any) -> Any:
        keys.append(key[0])
        return launch(self, key, function)

    monkeypatch.setattr(StepDecoder, "launch", recorded)
    for name in ("features", "prefill"):  # only graphs may run
        monkeypatch.setattr(StepDecoder, name, None)
    counting.generate(toy.task, [model], words, **options)
    assert keys[0] == "prompts" and len(keys) == 1 + 20 - 9 + 1 and "prompts" not in keys[1:]


def test_samples_on_the_cpu(toy: Toy) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    for _ in range(2):
        moved = generate(model, beam=3)
    assert_equal(generate(model, on_cpu=True, beam=3), moved)


def test_prompts_that_are_finished(toy: Toy) -> None:
    rows = [[5, 6, 7, 8, 2, 9], [4, 5, 6, 2, 2, 5], [5, 7, 9, 2, 1, 1], [7, 8, 1, 1, 1, 1]]
    prefix = torch.tensor(rows)
    for keep in ([0, 1, 2, 3], [0, 1, 2], [3, 1]):
        found = []
        for model in (copy.deepcopy(toy.ls).cuda(), toy.ls):
            chosen = prefix[keep]
            sample = {"net_input": {"src_tokens": chosen}, "id": torch.arange(len(keep))}
            options = counting.GenerationConfig(beam=3, max_len_b=30)
            generator = toy.task.build_generator([model], options)
            assert isinstance(generator, plugin.LSSequenceGenerator)
            found.append(generator.generate([model], sample, prefix_tokens=chosen, bos_token=2))
        assert_close(*found)


@pytest.mark.parametrize("more", [{}, {"no_repeat_ngram_size": 2}])
def test_sampling(toy: Toy, more: dict[str, Any], searches: list[Any]) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    greedy = tokens_of(generate(model, beam=1, **more))
    torch.manual_seed(3)
    best = tokens_of(generate(model, beam=3, sampling=True, sampling_topk=1, **more))
    assert all(h == g[0] for each, g in zip(best, greedy, strict=True) for h in each)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tokens_of(generate(model, beam=3, sampling=True, sampling_topk=4, **more)))
    assert runs[0] == runs[1] != runs[2]
    assert len(searches) == 5 * len(BATCHES)
    for lengths, each in zip(BATCHES, range(len(BATCHES)), strict=True):
        start = sum(len(batch) for batch in BATCHES[:each])
        for prompt, results in zip(prompts(*lengths), runs[0][start:], strict=False):
            words = prompt[:-1].tolist()
            assert all(result[: len(words)] == words for result in results)


def test_samples_have_fairseqs_distribution(toy: Toy) -> None:
    """Compares the first word after a prompt in 3000 samples of our search and of fairseq's."""
    model = copy.deepcopy(toy.ls).cuda()
    words = prompts(4) * 50
    counts = []
    for by in (None, SequenceGenerator):
        found = torch.zeros(len(toy.task.target_dictionary))
        for seed in range(20):
            torch.manual_seed(seed)
            results = counting.generate(
                toy.task, [model], words, by, beam=3, sampling=True, temperature=1.5, max_len_b=5
            )
            first = torch.tensor([h["tokens"][4] for each in results.values() for h in each])
            found += torch.bincount(first, minlength=len(found))
        counts.append(found)
    total = counts[0].sum()
    assert total == counts[1].sum() == 3000
    often = (counts[0] + counts[1]) > 20
    difference = (counts[0] - counts[1])[often].square() / (counts[0] + counts[1])[often]
    assert difference.sum() < 6 * often.sum()  # chi-square; its mean is about often.sum()


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_slots_that_are_refilled(toy: Toy, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    model, words = copy.deepcopy(toy.ls).cuda(), prompts(3, 7, 1, 5, 9, 2, 4, 4, 6, 3, 3)
    options = {"beam": 3, "max_len_b": 20}
    expected = counting.generate(toy.task, [toy.ls], words, **options)
    monkeypatch.setattr(search, "most_rows", lambda decoder, positions: 3 * slots)
    for _ in range(3):
        assert_close(counting.generate(toy.task, [model], words, **options), expected)
