"""Our search, and fairseq's search with our decoder, find what fairseq's search finds with
fairseq's model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import helpers.digits as digits
import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.sequence_generator import SequenceGenerator
from helpers.digits import Toy, held_out, translate
from helpers.searches import assert_close, counted_searches  # noqa: F401  (a fixture)
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation import decoder as step_decoder
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.parameter_addresses import ParameterAddresses
from lightseq_fairseq.generation.search import search
from lightseq_fairseq.generation.source import SearchBatch
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.plugins.generator import LSSequenceGenerator

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-4": {"beam": 4},
    "beam-5": {"beam": 5},
    "more-than-words": {"beam": 6},
    "lenpen-0.6": {"beam": 4, "lenpen": 0.6},
    "lenpen-2": {"beam": 5, "lenpen": 2, "min_len": 12},
    "unnormalized": {"beam": 4, "unnormalized": True},
    "unkpen": {"beam": 4, "unkpen": -3, "max_len_b": 12},
    "unkpen-up": {"beam": 4, "unkpen": 3},
    "max-len": {"beam": 4, "max_len_a": 0.5, "max_len_b": 3},
    "at-once": {"beam": 3, "max_len_b": 0, "min_len": 0},
    "temperature": {"beam": 4, "temperature": 2.0},
    "bigrams": {"beam": 4, "no_repeat_ngram_size": 2},
    "trigrams": {"beam": 3, "no_repeat_ngram_size": 3, "temperature": 1.5, "min_len": 18},
    "longer-than-sentences": {"beam": 2, "no_repeat_ngram_size": 300},
    "groups": {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": 0.7},
    "groups-of-one": {"beam": 3, "diverse_beam_groups": 3, "no_repeat_ngram_size": 2},
}
# Options for which fairseq's own search is used.
OTHERS: dict[str, dict[str, Any]] = {
    "siblings": {"beam": 4, "diversity_rate": 2},
    "single-words": {"beam": 3, "no_repeat_ngram_size": 1},
    "source-length": {"beam": 4, "match_source_len": True},
    "beam-of-all-words": {"beam": 9},
    "sampling": {"beam": 2, "sampling": True, "sampling_topk": 3},
}


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> Toy:
    return digits.exact()


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
def test_own_search(toy: Toy, options: dict[str, Any], searches: list[Any]) -> None:
    native = translate(toy, [toy.native], **options)
    assert not searches
    assert_close(translate(toy, [toy.ls], **options), native)
    assert len(searches) == len(list(held_out(toy.task)))


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_searches_that_are_fairseqs(toy: Toy, options: dict[str, Any], searches: list[Any]) -> None:
    found = []
    for model in (toy.ls, toy.native):
        torch.manual_seed(1)
        found.append(translate(toy, [model], **options))
    assert_close(*found)
    assert not searches


def test_under_fairseqs_search(toy: Toy, searches: list[Any]) -> None:
    native = translate(toy, [toy.native], beam=5)
    assert_close(translate(toy, [toy.ls], by=SequenceGenerator, beam=5), native)
    # The same model twice in one ensemble: each has its own keys and values.
    native = translate(toy, [toy.native] * 2, beam=2)
    assert_close(translate(toy, [toy.ls] * 2, beam=2), native)
    assert not searches


def test_prefixes_and_another_first_token(toy: Toy, searches: list[Any]) -> None:
    sample = next(iter(held_out(toy.task)))
    prefix = sample["target"][:, :2]
    found = []
    for model in (toy.ls, toy.native):
        generator = toy.task.build_generator([model], GenerationConfig(beam=3))
        for more in ({"prefix_tokens": prefix}, {"bos_token": 7}):
            results = generator.generate([model], sample, **more)
            found.append(dict(enumerate(results)))
    assert_close(found[0], found[2])
    assert_close(found[1], found[3])
    assert len(searches) == 2


def inputs(toy: Toy, sample: dict[str, Any] | None = None) -> dict[str, Any]:
    """The arguments of ``search`` for a batch."""
    sample = next(iter(held_out(toy.task))) if sample is None else sample
    tokens = sample["net_input"]["src_tokens"]
    return {
        "steps": toy.ls.decoder.steps, "encoder": toy.ls.encoder, "decoder": toy.ls.decoder,
        "batches": [SearchBatch(tokens, 20)], "options": SearchOptions(3, 1, 2, 3), "first": 2,
    }  # fmt: skip


def plain(results: Sequence[Sequence[Mapping[str, Tensor]]]) -> list[Any]:
    return [[(h["tokens"].tolist(), float(h["score"])) for h in each] for each in results]


def searched(given: dict[str, Any], **changes: Any) -> list[Any]:
    """The results of the only batch."""
    (results,) = search(**{**given, **changes})
    return results


def test_graphs_of_one_key_read_one_table(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second batch has as many tokens and sentences, but one sentence is longer than any
    position table so far."""
    model = copy.deepcopy(toy.ls)
    rows = model.encoder.table_rows(1)
    tables: dict[Any, set[int]] = {}
    run = Graphs.launch

    def seen(self: Graphs, key: Any, *arguments: Any) -> Any:
        if "source" in key:
            tables.setdefault(key, set()).add(len(model.encoder._table))
            before = model.encoder._table
        result = run(self, key, *arguments)
        # no table is created during a capture
        assert "source" not in key or model.encoder._table is before
        return result

    monkeypatch.setattr(Graphs, "launch", seen)
    for counts in ((rows - 10, rows - 10), (rows + 50, rows - 70)):
        tokens = digits.sentences(*counts)
        given = [SearchBatch(tokens, 1)], SearchOptions(1, 1, 2, 3), 2
        search(model.decoder.steps, model.encoder, model.decoder, *given)
    assert sorted(map(list, tables.values())) == [[rows], [2 * rows]]


def test_rows_that_vanish(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(toy)
    expected = plain(searched(given))
    assert len({len(tokens) for each in expected for tokens, _ in each}) > 3
    rows: list[int] = []
    features = step_decoder.StepDecoder.features

    def seen(self: Any, decoder: Any, count: int, *more: Any, **options: Any) -> Any:
        rows.append(count)
        return features(self, decoder, count, *more, **options)

    monkeypatch.setattr(step_decoder.StepDecoder, "features", seen)
    assert plain(searched(given)) == expected
    assert rows == sorted(rows, reverse=True) and rows[-1] < rows[0]


def test_memory_may_hold_anything(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one batch leaves in memory does not affect the next one, which uses other positions and
    rows."""
    monkeypatch.setattr(step_decoder, "_most_kept", lambda device: math.inf)
    toy = dataclasses.replace(toy, ls=copy.deepcopy(toy.ls))
    given = inputs(toy)
    expected = plain(searched(given))
    memory = toy.ls.decoder.steps.memory
    for each in (memory.ancestry, memory.past_tokens, memory.hypothesis_tokens):
        each.fill_(2**30)
    assert plain(searched(given)) == expected
    fewer = [SearchBatch(given["batches"][0].tokens[:3], 20)]
    assert plain(searched(given, batches=fewer)) == expected[:3]
    assert plain(searched(given)) == expected
    assert toy.ls.decoder.steps.memory is memory


def test_pads_anywhere(toy: Toy) -> None:
    given = inputs(toy)
    tokens = given["batches"][0].tokens
    assert tokens.eq(1).any()
    rightmost = tokens.eq(1).int().argsort(dim=1, stable=True)
    spread = torch.ones(len(tokens), 2 * tokens.shape[1], dtype=torch.int64)
    spread[:, ::2] = tokens
    expected = dict(enumerate(searched(given)))
    for padded in (tokens.gather(1, rightmost), spread, spread[:, ::2]):
        found = searched(given, batches=[SearchBatch(padded, 20)])
        assert_close(dict(enumerate(found)), expected)


def test_parts_in_whatever_order(toy: Toy) -> None:
    given = inputs(toy)
    expected, found = searched(given), searched(given)
    others = [h for each in found for h in each]
    names = ("positional_scores", "alignment", "tokens", "attention", "score")
    read = [{name: h[name] for name in names} for h in reversed(others)]
    for mine, h in zip(reversed(read), itertools.chain(*expected), strict=True):
        assert all(torch.equal(mine[name], h[name]) for name in names)
        torch.testing.assert_close(
            mine["positional_scores"].sum() / len(mine["tokens"]), mine["score"]
        )
    assert type(found) is list and {type(each) for each in found} == {list}


def test_buckets() -> None:
    gpu = torch.device("cuda")
    bucket, first_bucket = step_decoder.bucket, step_decoder.first_bucket
    assert [bucket(n, gpu) for n in (1, 2, 3, 5, 33, 64)] == [1, 2, 4, 8, 64, 64]
    sizes = sorted({bucket(n, gpu) for n in range(1, 5000)})
    assert [bucket(n, gpu) for n in sizes] == sizes
    assert all(bucket(n, gpu) >= n for n in range(1, 5000))
    assert all(n % 64 == 0 for n in sizes if n > 64)
    for first, most in ((64, 1), (128, 2), (256, 4), (512, 4), (1024, 8), (2048, 8)):
        assert sum(first < n <= 2 * first for n in sizes) == most
    for n in range(1, 5000):
        size = first_bucket(n, gpu)
        assert n <= size <= bucket(n, gpu)
        assert n <= 256 or (size % 64 == 0 and size < n + 64)
        assert {bucket(n, torch.device("cpu")), first_bucket(n, torch.device("cpu"))} == {n}


@pytest.mark.parametrize("bpe_symbol", [None, "@@ "])
def test_text_is_that_of_fairseqs_own_look_up(toy: Toy, bpe_symbol: str | None) -> None:
    words = toy.task.target_dictionary
    # also words that it does not have
    numbers = torch.randint(0, len(words) + 2, (7, 30), dtype=torch.int32)
    for tokens in (*numbers, numbers, numbers[0, :0], numbers[0].tolist()):
        for options in (
            {},
            {"unk_string": "?"},
            {"escape_unk": True, "include_eos": True},
            {"extra_symbols_to_ignore": {words.pad(), 7}, "separator": "_"},
        ):
            text = words.string(tokens, bpe_symbol, **options)
            assert text == type(words).string.__wrapped__(words, tokens, bpe_symbol, **options)


def test_hypotheses_are_dicts_to_their_users(toy: Toy) -> None:
    sample = next(iter(held_out(toy.task)))
    ours, native = (
        toy.task.build_generator([m], GenerationConfig(beam=3)).generate([m], sample)
        for m in (toy.ls, toy.native)
    )
    assert_close(dict(enumerate(ours)), dict(enumerate(native)))
    for mine, other in zip(ours[0], native[0], strict=True):
        assert list(mine) == list(other) and mine.keys() == other.keys()
        assert {k: v.dtype for k, v in mine.items()} == {k: v.dtype for k, v in other.items()}
        assert mine["score"].shape == other["score"].shape
    first, second, _ = ours[0]
    before, others = first["positional_scores"].clone(), second["positional_scores"].clone()
    first["positional_scores"].div_(2)  # as fairseq-generate does
    assert torch.equal(first["positional_scores"], before / 2)
    assert torch.equal(second["positional_scores"], others)
    for again in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), {**first}):
        assert again["tokens"].tolist() == first["tokens"].tolist()
        assert torch.equal(again["positional_scores"], before / 2)
        assert type(again) is dict and list(again) == list(native[0][0])
    alone = pickle.loads(pickle.dumps(first))["tokens"]
    # it does not keep the storage of all sentences alive
    assert alone.untyped_storage().nbytes() == alone.nbytes
    first["steps"] = torch.tensor(3)
    del first["alignment"]
    assert "steps" in first and "alignment" not in first and len(first) == 5
    assert first.get("alignment") is None and "steps" in repr(first)
    assert "steps" not in second and second.get("steps") is None and len(second) == 5
    with pytest.raises(KeyError):
        first["alignment"]


def test_new_weights_count_at_once(toy: Toy) -> None:
    model, native = copy.deepcopy(toy.ls), copy.deepcopy(toy.native)
    before = plain(list(translate(toy, [model], beam=2).values()))
    with torch.no_grad():
        for each in (model, native):
            each.decoder.layers[0].fc1.weight.mul_(-1.0)
    ours = translate(toy, [model], beam=2)
    assert_close(ours, translate(toy, [native], beam=2))
    assert plain(list(ours.values())) != before
    assert_close(
        translate(toy, [model.double()], beam=2), translate(toy, [native.double()], beam=2)
    )


def replaced(model: Any) -> None:
    old = model.decoder.layers[0].fc1.weight
    model.decoder.layers[0].fc1.weight = torch.nn.Parameter(old.detach().clone())


def moved(model: Any) -> None:
    model.encoder.layers[1].fc2.bias.data = model.encoder.layers[1].fc2.bias.data.clone()


def converted(model: Any) -> None:
    weight = model.decoder.layers[1].self_attn_layer_norm.weight
    weight.data = weight.data.view(torch.int32).view(torch.float32).double()


def assigned(model: Any) -> None:
    state = {name: x.clone() for name, x in model.decoder.state_dict().items()}
    torch.nn.Module.load_state_dict(model.decoder, state, assign=True)


def rebuilt(model: Any) -> None:
    model.encoder.layers[0] = copy.deepcopy(model.encoder.layers[0])


def without_a_layer(model: Any) -> None:
    model.decoder.layers = torch.nn.ModuleList(list(model.decoder.layers)[:1])


def without_a_bias(model: Any) -> None:
    model.decoder.layers[0].fc1.bias = None


CHANGES = (
    replaced, moved, converted, assigned, rebuilt, without_a_layer, without_a_bias,
    torch.nn.Module.half, torch.nn.Module.double,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_lie_elsewhere_are_seen(toy: Toy, change: Any) -> None:
    model = copy.deepcopy(toy.ls)
    addresses = ParameterAddresses(model.decoder, model.encoder)
    model.load_state_dict(toy.ls.state_dict())  # in place, as in training
    with torch.no_grad():
        model.decoder.layers[0].fc1.weight.mul_(2)
    assert addresses.intact(model.decoder, model.encoder)
    assert not addresses.intact(model.decoder)
    other = copy.deepcopy(model)
    assert not addresses.intact(other.decoder, other.encoder)
    assert not addresses.intact(model.decoder, other.encoder)
    change(model)
    assert not addresses.intact(model.decoder, model.encoder)


def test_copies_of_a_model_share_nothing(toy: Toy) -> None:
    sample = next(iter(held_out(toy.task)))
    generators = [
        toy.task.build_generator([model], GenerationConfig(beam=2))
        for model in (toy.ls, copy.deepcopy(toy.ls), pickle.loads(pickle.dumps(toy.ls)))
    ]
    first, *others = (plain(g.generate([], sample)) for g in generators)
    assert all(other == first for other in others)
    steps = [g.model.single_model.decoder.steps for g in generators]
    assert len(set(map(id, steps))) == 3


def test_hypotheses_that_are_reordered_at_will() -> None:
    """The order may have more hypotheses than before, and repeat or permute them, as a search may
    request."""
    toy = digits.toy()  # attention weights are float32 whatever the model's precision
    sample = next(iter(held_out(toy.task)))["net_input"]
    orders = [[0, 1, 1, 2], [3, 0, 2, 2, 1, 0, 3, 1, 0], [8, 1, 4]]
    found = []
    for model in (toy.ls, toy.native):
        with torch.no_grad():
            encoded = model.encoder(sample["src_tokens"][:3], sample["src_lengths"][:3])
            state: dict[str, Any] = {}
            tokens, outputs = torch.full((3, 1), 2), []
            for order in [*orders, [0, 1, 2]]:
                logits, extra = model.decoder(tokens, encoded, incremental_state=state)
                outputs += [logits, extra["attn"][0]]
                index = torch.tensor(order)
                model.decoder.reorder_incremental_state_scripting(state, index)
                encoded = model.encoder.reorder_encoder_out(encoded, index)
                tokens = torch.cat([tokens, 4 + torch.arange(len(tokens))[:, None]], 1)[index]
        found.append(outputs)
    for ours, native in zip(*found, strict=True):
        torch.testing.assert_close(ours, native, rtol=0, atol=2e-5)


def test_an_encoder_output_that_is_reordered(toy: Toy) -> None:
    """With each combination of encoder and decoder, with and without incremental state."""
    sample = next(iter(held_out(toy.task)))["net_input"]
    previous = sample["prev_output_tokens"][[5, 2, 2]]
    found = []
    for encoder, decoder in itertools.product((toy.native, toy.ls), repeat=2):
        with torch.no_grad():
            encoded = encoder.encoder(sample["src_tokens"], sample["src_lengths"])
            for order in ([2, 2, 0, 5], [3, 1, 0]):
                encoded = encoder.encoder.reorder_encoder_out(encoded, torch.tensor(order))
            whole = decoder.decoder(previous, encoded)[0]
            first = decoder.decoder(previous[:, :1], encoded, incremental_state={})[0]
        torch.testing.assert_close(first, whole[:, :1], rtol=0, atol=2e-5)
        found.append(whole[previous.ne(1)])
    for ours in found[1:]:
        torch.testing.assert_close(ours, found[0], rtol=0, atol=2e-5)


def test_empty_sources_and_empty_batches(toy: Toy) -> None:
    sample = copy.deepcopy(next(iter(held_out(toy.task))))
    tokens = sample["net_input"]["src_tokens"]
    tokens[1] = 1
    tokens[1, -1] = 2
    found = [
        dict(enumerate(toy.task.build_generator([m], GenerationConfig()).generate([m], sample)))
        for m in (toy.ls, toy.native)
    ]
    assert_close(*found)
    sample["net_input"]["src_tokens"] = tokens[:0]
    generator = toy.task.build_generator([toy.ls], GenerationConfig())
    assert generator.generate([toy.ls], sample) == []


def test_what_cannot_be_translated_is_said(toy: Toy) -> None:
    sample = next(iter(held_out(toy.task)))
    for model in (toy.ls, toy.native):
        generator = toy.task.build_generator([model], GenerationConfig(min_len=9, max_len_b=3))
        with pytest.raises(AssertionError, match="min_len cannot be larger than max_len"):
            generator.generate([model], sample)
    broken = copy.deepcopy(toy.ls)
    with torch.no_grad():
        broken.decoder.layers[0].fc1.weight.fill_(torch.nan)
    generator = toy.task.build_generator([broken], GenerationConfig(max_len_b=5))
    with pytest.raises(UserError, match="no translation with a finite score"):
        generator.generate([broken], sample)
    with pytest.raises(UserError, match="from their first token"):
        encoded = toy.ls.encoder(sample["net_input"]["src_tokens"])
        toy.ls.decoder(sample["net_input"]["prev_output_tokens"][:, :2], encoded, {})


@pytest.mark.parametrize("special", [{"topk": 1}, {"topk": 4}, {"topp": 0.5}, {}])
def test_sampling(toy: Toy, special: dict[str, Any]) -> None:
    given = inputs(toy)
    given["options"] = SearchOptions(4, 1, 2, 3, sampled=True, **special)
    draws = [plain(searched(given, rng=torch.tensor([seed, 0]))) for seed in (1, 1, 2)]
    assert draws[0] == draws[1]
    assert all(len(each) == 4 for each in draws[0])
    if special == {"topk": 1}:
        given["options"] = SearchOptions(1, 1, 2, 3)
        greedy = plain(searched(given))
        assert all(h[0] == g[0][0] for each, g in zip(draws[0], greedy, strict=True) for h in each)
    else:
        assert draws[0] != draws[2]
        assert any(len({tuple(tokens) for tokens, _ in each}) > 1 for each in draws[0])


def test_which_generator_a_task_builds(toy: Toy) -> None:
    def built(models: list[Any], **options: Any) -> type:
        return type(toy.task.build_generator(models, GenerationConfig(**options)))

    assert built([toy.ls]) is LSSequenceGenerator
    assert built([toy.native]) is built([toy.native, toy.ls]) is SequenceGenerator
    for options in ({"print_alignment": "hard"}, {"replace_unk": ""}, {"score_reference": True}):
        assert not issubclass(built([toy.ls], **options), LSSequenceGenerator)
    words = toy.task.target_dictionary
    assert LSSequenceGenerator([toy.ls], words)._options() is not None
    assert LSSequenceGenerator([toy.ls], words, match_source_len=True)._options() is None
    assert LSSequenceGenerator([toy.ls], words, tokens_to_suppress=("one",))._options() is None


PREFIXED: dict[str, dict[str, Any]] = {
    "beam": {"beam": 3},
    "trigrams": {"beam": 4, "no_repeat_ngram_size": 3, "min_len": 12, "lenpen": 2},
    "temperature": {"beam": 2, "temperature": 1.5, "unkpen": -1},
    "longer-than-results": {"beam": 3, "max_len_a": 0, "max_len_b": 2},
}


@pytest.mark.parametrize("options", PREFIXED.values(), ids=PREFIXED)
def test_forced_tokens(toy: Toy, options: dict[str, Any], searches: list[Any]) -> None:
    """Of several lengths, none, unlikely ones, and <unk>."""
    sample = next(iter(held_out(toy.task)))
    words = len(toy.task.target_dictionary)
    prefix = torch.randint(4, words, (len(sample["id"]), 3), generator=torch.manual_seed(5))
    prefix[::2] = sample["target"][::2, :3]
    prefix[::3, 1:] = prefix[1::3, 2:] = prefix[0] = toy.task.target_dictionary.pad()
    prefix[4, 0] = toy.task.target_dictionary.unk()
    found = []
    for model in (toy.ls, toy.native):
        generator = toy.task.build_generator([model], GenerationConfig(**options))
        found.append(generator.generate([model], sample, prefix_tokens=prefix))
    assert_close(*found)
    assert len(searches) == 1
    for hypotheses, forced in zip(found[0], prefix.tolist(), strict=True):
        forced = [token for token in forced if token != 1][: int(options.get("max_len_b", 3))]
        assert all(h["tokens"].tolist()[: len(forced)] == forced for h in hypotheses)


def test_a_prefix_that_ends_a_sentence_is_fairseqs(toy: Toy, searches: list[Any]) -> None:
    sample = next(iter(held_out(toy.task)))
    prefix = sample["target"][:, :2].clone()
    prefix[3, 1] = toy.task.target_dictionary.eos()
    found = []
    for model in (toy.ls, toy.native):
        generator = toy.task.build_generator([model], GenerationConfig(beam=3))
        found.append(generator.generate([model], sample, prefix_tokens=prefix))
    assert_close(*found)
    assert not searches
    assert found[0][3][0]["tokens"].tolist() == prefix[3].tolist()
