"""Our language models generate the same text as fairseq's model with fairseq's search."""

from __future__ import annotations

import copy
from typing import Any

import helpers.counting as counting
import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers.counting import Toy, generate, prompts
from helpers.searches import assert_close, counted_searches  # noqa: F401  (a fixture)

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation import decoder
from lightseq_fairseq.generation import prompts as generation_prompts
from lightseq_fairseq.generation import search as generation_search
from lightseq_fairseq.generation.decoder import StepDecoder

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-4": {"beam": 4},
    "beam-5": {"beam": 5},
    "lenpen-0.6": {"beam": 4, "lenpen": 0.6},
    "lenpen-2": {"beam": 5, "lenpen": 2},
    "unnormalized": {"beam": 4, "unnormalized": True},
    "min-len": {"beam": 4, "min_len": 14},
    "min-len-within-prompts": {"beam": 2, "min_len": 4},
    "max-len": {"beam": 4, "max_len_a": 1.5, "max_len_b": 3, "min_len": 0},
    "shorter-than-prompts": {"beam": 3, "max_len_b": 5},
    "nothing": {"beam": 3, "max_len_b": 0, "min_len": 0},
    "temperature": {"beam": 4, "temperature": 2.0},
    "unkpen": {"beam": 4, "unkpen": -3, "max_len_b": 12},
    "bigrams": {"beam": 4, "no_repeat_ngram_size": 2},
    "trigrams": {"beam": 3, "no_repeat_ngram_size": 3, "temperature": 1.5, "min_len": 20},
}
# Options for which fairseq's own search runs.
OTHERS: dict[str, dict[str, Any]] = {
    "groups": {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": 0.7},
    "siblings": {"beam": 4, "diversity_rate": 2},
    "source-length": {"beam": 3, "match_source_len": True},
    "beam-of-all-words": {"beam": 14},
    "sampling": {"beam": 2, "sampling": True},
    "sampling-topk": {"beam": 3, "sampling": True, "sampling_topk": 3, "temperature": 2.0},
    "sampling-topp": {"beam": 3, "sampling": True, "sampling_topp": 0.8},
}
LONG = {"max_len_b": 30}
PROMPTS = {
    "equal": (4, 4, 4),
    "ragged": (3, 7, 1, 5, 5, 2),
    "empty": (0, 0),
    "some-empty": (0, 3, 0, 6),
    "one": (6,),
}


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> Toy:
    return counting.toy()


@pytest.mark.parametrize("lengths", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES)
def test_own_search(
    toy: Toy, options: dict[str, Any], lengths: tuple[int, ...], searches: list[Any]
) -> None:
    options = LONG | options
    native = generate(toy.task, [toy.native], prompts(*lengths), **options)
    assert not searches
    ours = generate(toy.task, [toy.ls], prompts(*lengths), **options)
    assert_close(ours, native)
    assert len(searches) == 1


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_searches_that_are_fairseqs(toy: Toy, options: dict[str, Any], searches: list[Any]) -> None:
    # Candidates of a beam or a group must be unequal, because equal ones may be in any order.
    lengths = (0, 0, 0) if "diverse_beam_groups" in options else (3, 7, 1, 5)
    found = []
    for model in (toy.ls, toy.native):
        torch.manual_seed(1)
        found.append(generate(toy.task, [model], prompts(*lengths), **LONG | options))
    assert_close(*found)
    assert not searches or "diverse_beam_groups" in options


def test_under_fairseqs_search(toy: Toy, searches: list[Any]) -> None:
    words = prompts(3, 7, 1, 5)
    native = generate(toy.task, [toy.native], words, beam=4, **LONG)
    assert_close(generate(toy.task, [toy.ls], words, SequenceGenerator, beam=4, **LONG), native)
    # An ensemble of the same model twice: each has its own keys and values.
    native = generate(toy.task, [toy.native] * 2, words, beam=2, **LONG)
    assert_close(generate(toy.task, [toy.ls] * 2, words, beam=2, **LONG), native)
    assert not searches


VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {"decoder_normalize_before": True},
    "no-final-norm": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "learned-tied": {"decoder_learned_pos": True, "share_decoder_input_output_embed": True},
    "no-positions": {"no_token_positional_embeddings": True},
    "layernorm-embedding": {"layernorm_embedding": True, "activation_fn": "gelu"},
    "other-widths": {"decoder_input_dim": 20, "decoder_output_dim": 12},
    "layers-to-keep": {"decoder_layers": 3, "decoder_layers_to_keep": "0,2"},
    "bos": {"add_bos_token": True},
    "adaptive-input": {"adaptive_input": True, "adaptive_input_cutoff": "6,10"},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_model(toy: Toy, flags: dict[str, Any], searches: list[Any]) -> None:
    task, ours, native = counting.variant(**flags)
    words = prompts(3, 7, 1, 5)
    for dtype in (torch.float32, torch.float64):
        for options in ({"beam": 1}, {"beam": 4, "no_repeat_ngram_size": 3}):
            expected = generate(task, [native.to(dtype)], words, **LONG | options)
            assert_close(generate(task, [ours.to(dtype)], words, **LONG | options), expected)
            tokens = {tuple(h["tokens"].tolist()) for each in expected.values() for h in each}
            assert len(tokens) == len(words) * options["beam"]
    assert len(searches) == 4


def test_adaptive_softmax_is_left_to_fairseqs_search(toy: Toy, searches: list[Any]) -> None:
    task, ours, native = counting.variant(adaptive_softmax_cutoff="6,10")
    words = prompts(3, 7, 1, 5)
    for options in ({"beam": 1}, {"beam": 4, "no_repeat_ngram_size": 3}):
        expected = generate(task, [native], words, **LONG | options)
        assert_close(generate(task, [ours], words, **LONG | options), expected)
    assert not searches


def test_prompts_that_are_finished(toy: Toy, searches: list[Any]) -> None:
    """A prompt may contain </s>, because blocks contain several sentences; it is then complete."""
    rows = [[5, 6, 7, 8, 2, 9], [4, 5, 6, 2, 2, 5], [5, 7, 9, 2, 1, 1], [7, 8, 1, 1, 1, 1]]
    prefix = torch.tensor(rows)
    for keep in ([0, 1, 2, 3], [0, 1, 2], [3, 1]):
        chosen = {"net_input": {"src_tokens": prefix[keep]}, "id": torch.arange(len(keep))}
        found = []
        for model in (toy.ls, toy.native):
            options = counting.GenerationConfig(beam=3, **LONG)
            generator = toy.task.build_generator([model], options)
            results = generator.generate([model], chosen, prefix_tokens=prefix[keep], bos_token=2)
            found.append(dict(enumerate(results)))
        assert_close(*found)
        for results, number in zip(found[0].values(), keep, strict=True):
            assert len(results) == 3
            if number < 3:
                tokens = rows[number][: rows[number].index(2) + 1]
                assert [h["tokens"].tolist() for h in results] == [tokens] * 3
    assert len(searches) == 3


def test_prompts_that_repeat_themselves(toy: Toy) -> None:
    """Our search never blocks a prompt's own tokens; fairseq's does, and fails an assertion."""
    words = [torch.tensor([5, 6, 5, 6, 2]), torch.tensor([5, 6, 7, 8, 9, 4, 2])]
    options = {"beam": 3, "no_repeat_ngram_size": 2, **LONG}
    with pytest.raises(AssertionError):
        generate(toy.task, [toy.native], words, **options)
    for results, prompt in zip(generate(toy.task, [toy.ls], words, **options).values(), words):
        for hypothesis in results:
            tokens = hypothesis["tokens"].tolist()
            assert tokens[: len(prompt) - 1] == prompt[:-1].tolist()
            found = list(zip([2, *tokens], tokens))
            new = found[len(prompt) - 1 :]
            assert len(set(new)) == len(new) and not set(new) & set(found[: len(prompt) - 1])


def test_a_prompt_is_read_at_once(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass reads all prompts; then each further token takes one step."""
    seen: list[str] = []
    for name in ("prefill", "features"):
        function = getattr(StepDecoder, name)

        def counted(
            *arguments: Any, function: Any = function, name: str = name, **options: Any
        ) -> Any:
            seen.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(StepDecoder, name, counted)
    generate(toy.task, [copy.deepcopy(toy.ls)], prompts(9, 9), beam=2, max_len_b=12, min_len=12)
    assert seen == ["prefill", *["features"] * 4]


def test_wrong_calls(toy: Toy) -> None:
    state: dict[str, Any] = {}
    toy.ls.decoder(torch.tensor([[2], [2]]), incremental_state=state)
    with pytest.raises(UserError, match="expected 2 tokens of 2 hypotheses, got 3 of 2"):
        toy.ls.decoder(torch.full((2, 3), 2), incremental_state=state)


@pytest.mark.parametrize("lengths", [*PROMPTS.values(), (20, 3, 11)])
@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 3, "no_repeat_ngram_size": 3}])
def test_row_counts_that_are_rounded(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """Row counts are rounded up as on a GPU: unused rows follow prompts and hypotheses."""
    words, options = prompts(*lengths), LONG | options
    expected = generate(toy.task, [toy.ls], words, **options)
    gpu = torch.device("cuda")
    for function in (decoder.bucket, decoder.first_bucket):

        def rounded(rows: int, device: torch.device, function: Any = function) -> int:
            return int(function(rows, gpu))

        for module in (decoder, generation_search, generation_prompts):
            if hasattr(module, function.__name__):
                monkeypatch.setattr(module, function.__name__, rounded)
    assert_close(generate(toy.task, [toy.ls], words, **options), expected)
