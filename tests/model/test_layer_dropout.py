"""Dropout of the layers: masks follow the rng, and each layer draws its own."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterable

import pytest
import torch
from helpers.layer_inputs import RATES, RECOMPUTED, RNG, lengths, rows
from torch import Tensor, nn

from lightseq_fairseq.layers import DecoderLayer, Embedding, EncoderLayer, draw_rng, run_encoder


def test_dropout_follows_mode_and_counter() -> None:
    layer = EncoderLayer(16, 32, 2, **RATES, site=8)
    x, segments = torch.randn(9, 16), lengths(4, 5)
    a, b = layer(x, segments, RNG), layer(x, segments, RNG)
    assert torch.equal(a, b)
    assert not torch.equal(a, layer(x, segments, RNG + torch.tensor([0, 1])))
    layer.site = 16
    assert not torch.equal(a, layer(x, segments, RNG))
    layer.eval()
    assert torch.equal(layer(x, segments, RNG), layer(x, segments, RNG + 1))


@RECOMPUTED
@pytest.mark.parametrize("learned", [False, True])
def test_backward_with_another_rng_than_forwards_is_refused(
    learned: bool, recomputed: bool
) -> None:
    """Each dropout would draw other masks."""
    segments, rng = lengths(3, 2), draw_rng()
    table = Embedding(20, 8, 1, dropout=0.3, learned=learned).double()
    layer = EncoderLayer(8, 16, 2, **RATES).double()
    x = rows(segments, 8)
    outputs = [
        table(torch.arange(2, 7), segments, rng, site=0),
        run_encoder([layer], None, x, segments, rng, checkpoint_activations=recomputed),
    ]
    rng.add_(1)
    for output in outputs:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_drawn_counters_follow_torchs_seed() -> None:
    torch.manual_seed(3)
    first, second = draw_rng(), draw_rng()
    torch.manual_seed(3)
    assert torch.equal(first, draw_rng())
    assert not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,)


def test_training_without_an_rng_says_how_to_get_one() -> None:
    layer = EncoderLayer(16, 32, 2, dropout=0.1)
    with pytest.raises(ValueError, match=r"layers need an rng.*draw_rng"):
        layer(torch.ones(3, 16), lengths(3), None)  # type: ignore[arg-type]


def dropping(count: int) -> nn.ModuleList:
    """Layers with equal weights, and without assigned dropout sites."""
    torch.manual_seed(3)
    first = EncoderLayer(16, 32, 2, dropout=0.5).double()
    return nn.ModuleList(copy.deepcopy(first) for _ in range(count))


def outputs_of(layers: Iterable[EncoderLayer], rng: Tensor) -> list[Tensor]:
    """The output of each layer for the same rows. The weights are equal, so outputs are equal if
    masks are."""
    segments = lengths(3, 4)
    x = torch.ones(7, 16, dtype=torch.float64)
    return [layer(x, segments, rng) for layer in layers]


def assert_all_differ(outputs: list[Tensor]) -> None:
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(outputs, 2))


def test_layers_without_sites_draw_masks_of_their_own() -> None:
    layers = dropping(3)
    rng = RNG.clone()
    outputs = outputs_of(layers, rng)
    assert_all_differ(outputs)
    # The same layers with the same rng, as in a recomputed pass; in the next pass; then new equal
    # layers.
    for again, counter in ((layers, rng), (layers, RNG.clone()), (dropping(3), RNG.clone())):
        assert all(map(torch.equal, outputs_of(again, counter), outputs))


def test_copies_draw_masks_of_their_own() -> None:
    layers = dropping(2)
    alone = outputs_of(layers, RNG.clone())
    copies = copy.deepcopy(layers)
    assert all(map(torch.equal, outputs_of(copies, RNG.clone()), alone))
    assert_all_differ(outputs_of([*layers, *copies], RNG.clone()))


def test_layers_may_be_left_out_of_a_pass() -> None:
    first, second, third = dropping(3)
    for used in ([second, third], [third], [first, second, third]):
        assert_all_differ(outputs_of(used, RNG.clone()))


def test_layers_that_first_met_in_different_passes_draw_masks_of_their_own() -> None:
    one, other = dropping(2)
    for layer in (one, other):
        outputs_of([layer], RNG.clone())
    rng = RNG.clone()
    met = outputs_of([one, other], rng)
    assert_all_differ(met)
    for again in (rng, RNG.clone()):
        assert all(map(torch.equal, outputs_of([other, one], again), reversed(met)))


@pytest.mark.parametrize("site", range(0, 33, 8))
def test_sites_that_are_given_meet_no_others(site: int) -> None:
    layers = dropping(3)
    layers[1].site = site
    assert_all_differ(outputs_of(layers, RNG.clone()))


def test_a_counter_that_layers_have_used_can_be_saved() -> None:
    rng, file = RNG.clone(), io.BytesIO()
    expected = outputs_of(dropping(2), rng)
    torch.save(rng, file)
    file.seek(0)
    assert all(map(torch.equal, outputs_of(dropping(2), torch.load(file)), expected))


def test_both_sides_draw_masks_of_their_own() -> None:
    segments = lengths(5)
    rng = RNG.clone()
    tables = [Embedding(9, 16, 1, dropout=0.5) for _ in range(2)]
    layers = [EncoderLayer(16, 32, 2, dropout=0.5), DecoderLayer(16, 32, 2, dropout=0.5)]
    tokens = torch.arange(5)
    dropped = [table(tokens, segments, rng) == 0 for table in tables]
    assert not torch.equal(*dropped)
    memory = layers[0](torch.randn(5, 16), segments, rng)
    layers[1](torch.randn(5, 16), memory, segments, segments, rng)
    sites = [module._own_site for module in (*tables, *layers)]
    assert all(b - a >= 6 for a, b in itertools.pairwise(sites))
