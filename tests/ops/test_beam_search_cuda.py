"""The kernels of beam search and sampling compared with the references on a GPU.

Logits are multiples of a step, so that sums are either equal or clearly different, and all tokens
must agree, also for ties.
"""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import make_rng, poison_cache
from torch import Tensor

from lightseq_fairseq import ops

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
PAD, EOS, UNK = 1, 2, 3
INF = torch.inf
# Numbers of rows for which blocks have middle and small sizes, and a number of tokens for which a
# row has several blocks.
MIDDLE, MANY = 400, 2500
SEVERAL = 20_001


def on_grid(rows, classes, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed + classes)
    x = torch.randn(rows, classes, generator=generator, device="cuda")
    return x.mul_(3).mul_(8).round_().div_(8).to(dtype)


def at(step, rows, last_step=50):
    """The steps and last steps of some rows, which are all at the same step."""
    steps = torch.tensor([[step], [last_step]], dtype=torch.int32, device="cuda")
    return steps.expand(2, rows).contiguous().unbind()


def rules(min_len=0, unk_penalty=0.0, temperature=1.0, pad=PAD, eos=EOS, unk=UNK, min_len_from=0):
    return pad, eos, unk, min_len, min_len_from, unk_penalty, temperature


def same_as_reference(logits, scores, step, count, options):
    """step: of all rows, or the steps and last steps of each."""
    steps = at(step, len(logits)) if isinstance(step, int) else step
    poison_cache()
    ours = ops.beam_candidates(logits, scores, *steps, count, *options)
    wanted = ops.REFERENCES["beam_candidates"](logits, scores, *steps, count, *options)
    torch.testing.assert_close(ours[0], wanted[0], rtol=1e-5, atol=2e-5)
    assert torch.equal(ours[1], wanted[1])
    again = ops.beam_candidates(logits, scores, *steps, count, *options)
    assert all(map(torch.equal, ours, again))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [10, 97, 1000, 40_001, 250_000])
@pytest.mark.parametrize("count", [1, 8, 10, 64, 128])
def test_candidates(count, classes, dtype):
    logits = on_grid(7, classes, dtype)
    scores = torch.tensor([0.0, -3.25, -INF, -1.0, -70.5, 0.0, -2.0], device="cuda")
    if count < classes:
        same_as_reference(logits, scores, 5, count, rules())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("step", [0, 3, 50])
@pytest.mark.parametrize(
    ("rows", "classes"), [(3, 1003), (MIDDLE, 1003), (MANY, 1003), (3, SEVERAL)]
)
def test_rules(rows, classes, step, dtype):
    """The tokens that rules concern are among the best, anywhere in the vocabulary."""
    logits = on_grid(rows, classes, dtype)
    scores = -torch.rand(rows, device="cuda")
    last, middle = classes - 1, classes // 2
    for pad, eos, unk in ((1, 2, 3), (last - 2, 4, last), (700, 300, 0), (5, middle, last)):
        logits[:, [pad, eos, unk]] = logits.amax(1, keepdim=True) + 1
        for options in ({}, {"min_len": 1}, {"min_len": 51}, {"unk_penalty": 1.5}):
            settings = rules(**options, pad=pad, eos=eos, unk=unk)
            same_as_reference(logits, scores, step, 10, settings)


@pytest.mark.parametrize("rows", [5, MANY])
def test_each_row_has_its_own_step(rows):
    logits, scores = on_grid(rows, 1003), torch.zeros(rows, device="cuda")
    logits[:, EOS] = logits.amax(1) + 1
    number = torch.arange(rows, dtype=torch.int32, device="cuda")
    steps = number % 7, 4 + number % 3
    for min_len_from in (0, 1):
        same_as_reference(logits, scores, steps, 10, rules(2, min_len_from=min_len_from))
        sentences, rng = number, make_rng().cuda()
        settings = sentences, *steps, rng, 1, 1, 0.0, *rules(2, min_len_from=min_len_from)
        drawn = ops.beam_sample(logits, scores, *settings)
        wanted = ops.REFERENCES["beam_sample"](logits, scores, *settings)
        assert torch.equal(drawn[1], wanted[1])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("penalty", [-3.97, 0.13])
def test_temperature(temperature, penalty):
    # Penalties that are no multiples of the logits' step: if one made two tokens tie, rounding
    # would decide.
    logits, scores = on_grid(9, 777), torch.zeros(9, device="cuda")
    options = rules(0, penalty, temperature)
    same_as_reference(logits, scores, 5, 10, options)


@pytest.mark.parametrize(
    ("rows", "classes"), [(4, 5000), (MIDDLE, 5000), (MANY, 5000), (4, SEVERAL)]
)
@pytest.mark.parametrize("count", [1, 10, 32, 128])
def test_ties(count, rows, classes):
    """Equal logits in all or many places; all of the best in one thread or one block."""
    zeros = torch.zeros(rows, classes, device="cuda")
    ramp = torch.arange(classes, device="cuda") / 8
    few, one_thread, two_values = on_grid(rows, classes), zeros.clone(), zeros.clone()
    one_block = zeros.clone()
    best = one_block[:, classes * 3 // 10 :][:, :300]
    best[:] = ramp[:300].flip(0) + 1
    best[:, 50:150] = 40.0
    few[:, 5:-3] = -INF
    two_values[:, ::3] = 1.0
    for first in range(8):
        one_thread[:, 1024 + first :: 1024] = ramp[: len(range(1024 + first, classes, 1024))] + 1
    scores = torch.zeros(rows, device="cuda")
    for logits in (zeros, zeros + ramp, zeros - ramp, few, one_thread, one_block, two_values):
        same_as_reference(logits, scores, 5, count, rules())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [300, SEVERAL])
def test_nan_and_infinities(classes, dtype):
    logits = on_grid(6, classes, dtype)
    logits[0] = -INF
    logits[1, 7], logits[2, classes - 1], logits[3, 20] = torch.nan, torch.nan, INF
    logits[4, ::2] = -INF
    logits[5, :] = -INF
    logits[5, 250] = 1.0
    same_as_reference(logits, torch.zeros(6, device="cuda"), 5, 10, rules())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", [0, 1, 5])
@pytest.mark.parametrize("classes", [3001, SEVERAL])
def test_rows_may_begin_anywhere(classes, shift, dtype):
    logits = on_grid(5, classes + 1100, dtype)[:, shift : shift + classes + shift]
    scores = torch.zeros(5, device="cuda")
    same_as_reference(logits, scores, 5, 10, rules())
    hypotheses = torch.arange(1, 6, dtype=torch.int32, device="cuda")
    drawn = draw(logits, scores, hypotheses, 1)
    assert torch.equal(drawn[1], draw(logits.contiguous(), scores, hypotheses, 1)[1])


@pytest.mark.large
def test_more_logits_than_32_bits_count():
    rows, classes = 60_000, 43_001
    logits = torch.zeros(rows, classes, dtype=torch.bfloat16, device="cuda")
    row = torch.arange(rows, device="cuda")
    logits[row, 10 + row % 40_000] = 3.0
    best, tokens = ops.beam_candidates(
        logits, torch.zeros(rows, device="cuda"), *at(5, rows), 2, *rules()
    )
    assert torch.equal(tokens[:, 0], (10 + row % 40_000).int()) and tokens[:, 1].eq(0).all()
    assert best[:, 0].eq(best[0, 0]).all()


def test_one_graph_serves_all_steps():
    """Every replay reads logits, scores and the step on the device."""
    logits, scores = on_grid(6, 999), torch.zeros(6, device="cuda")
    steps, last_steps = at(0, 6)
    sentences = torch.arange(2, dtype=torch.int32, device="cuda")
    rng, options = make_rng().cuda(), rules(min_len=2)

    def run():
        its = steps, last_steps
        drawn = ops.beam_sample(logits, scores, sentences, *its, rng, 3, 0, 0.0, *options)
        return *ops.beam_candidates(logits, scores, *its, 8, *options), *drawn

    expected = []
    for step in (0, 2, 49, 50):
        steps.fill_(step)
        expected.append(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for step, wanted in zip((0, 2, 49, 50), expected, strict=True):
        steps.fill_(step)
        graph.replay()
        assert all(map(torch.equal, results, wanted))


# ---- sampling ----


def sampling(logits, scores, sentences, beam, topk=0, topp=0.0, step=4, **options):
    """The arguments of the op."""
    settings = beam, topk, topp, *rules(**options)
    return logits, scores, sentences, *at(step, len(logits)), make_rng().cuda(), *settings


def draw(*arguments, **options) -> tuple[Tensor, Tensor]:
    return ops.beam_sample(*sampling(*arguments, **options))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [10, 500, 40_001])
@pytest.mark.parametrize(
    ("topk", "topp"), [(0, 0.0), (1, 0.0), (7, 0.0), (0, 0.3), (0, 0.95), (3, 0.999)]
)
def test_draws_what_the_reference_draws(topk, topp, classes, dtype):
    """Except where rounding decides."""
    slots, beam = 60, 5
    logits = torch.randn(slots * beam, classes, device="cuda").mul_(3).to(dtype)
    scores = torch.randn(slots * beam, device="cuda")
    scores[7] = scores[25:30] = -INF
    sentences = torch.randperm(slots).int().cuda()
    sentences[5] = -1
    options = {"unk_penalty": 1.5, "temperature": 0.8, "min_len": 9}
    arguments = sampling(logits, scores, sentences, beam, topk, topp, **options)
    poison_cache()
    ours, again = ops.beam_sample(*arguments), ops.beam_sample(*arguments)
    wanted = ops.REFERENCES["beam_sample"](*arguments)
    assert all(map(torch.equal, ours, again))
    same = ours[1] == wanted[1]
    assert same.float().mean() > 0.98
    torch.testing.assert_close(ours[0][same], wanted[0][same], rtol=1e-5, atol=2e-5)
    for dead in (7, *range(25, 30)):
        assert ours[1][dead] == EOS and ours[0][dead] == -INF


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("classes", [10, 1003, SEVERAL])
def test_draws_among_equals_are_the_references(classes, dtype):
    """If all candidates have equal logits, no rounding decides. The lowest tokens are drawn."""
    draws = 2000
    tied = torch.arange(0, classes, 3, device="cuda")
    logits = torch.zeros(draws, classes, device="cuda", dtype=dtype)
    logits[:, tied] = 2.0
    probability = logits[0].double().softmax(0)[0].item()
    sentences, scores = torch.arange(draws).int().cuda(), torch.zeros(draws, device="cuda")
    for count in {1, 2, len(tied) // 2, len(tied) - 1, len(tied)}:
        for topk, topp in ((count, 0.0), (1, (count - 0.5) * probability)):
            arguments = sampling(logits, scores, sentences, 1, topk, topp)
            tokens = ops.beam_sample(*arguments)[1]
            assert torch.equal(tokens, ops.REFERENCES["beam_sample"](*arguments)[1]), count
            assert torch.isin(tokens, tied[:count]).all(), count
            assert len(tokens.unique()) == count or count > 100


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("unk_penalty", [0.0, -1.3])
def test_candidates_of_sampling(unk_penalty, dtype):
    """Tokens tie for the last place. unk ties for the first one, or is better than all others."""
    draws, classes, temperature = 5000, 2600, 6.0
    row = on_grid(1, classes, dtype)
    row[:, UNK] = row.amax()
    best = row[0].float().clone()
    best[PAD] = -INF
    best[UNK] -= torch.tensor(unk_penalty) * torch.tensor(temperature)
    falling, order = best.sort(descending=True, stable=True)
    sums = (falling.double() / temperature).exp().cumsum(0)
    sums /= (row[0].double() / temperature).exp().sum()
    logits, scores = row.expand(draws, classes).contiguous(), torch.zeros(draws, device="cuda")
    sentences = torch.arange(draws, dtype=torch.int32, device="cuda")
    options = {"unk_penalty": unk_penalty, "temperature": temperature}
    has_ties = False
    for count in range(1, 40, 2):
        has_ties |= bool(falling[count - 1] == falling[count])
        # Between two sums, so that rounding does not decide.
        topp = sums[count - 1].item() - 1e-4
        for settings in ((count, 0.0), (0, topp)):
            arguments = sampling(logits, scores, sentences, 1, *settings, **options)
            tokens = ops.beam_sample(*arguments)[1]
            assert torch.equal(tokens.unique().long(), order[:count].sort().values), settings
            same = tokens == ops.REFERENCES["beam_sample"](*arguments)[1]
            assert same.float().mean() > 0.999, settings
    assert has_ties


@pytest.mark.parametrize(("topk", "topp"), [(0, 0.0), (10, 0.0), (0, 0.7)])
def test_frequencies(topk, topp):
    """200,000 draws from one distribution: chi-square within five deviations of its mean."""
    draws, classes = 200_000, 50
    generator = torch.Generator("cuda").manual_seed(1)
    row = torch.randn(classes, generator=generator, device="cuda")
    probabilities = row.double().softmax(0)
    probabilities[PAD] = 0
    falling, order = probabilities.sort(descending=True)
    kept = falling.cumsum(0) - falling < topp if topp else torch.arange(classes).cuda() < topk
    if topp or topk:
        probabilities[order[~kept]] = 0
    probabilities /= probabilities.sum()
    sentences = torch.arange(draws, dtype=torch.int32, device="cuda")
    logits = row.expand(draws, classes).contiguous()
    scores = torch.zeros(draws, device="cuda")
    tokens = draw(logits, scores, sentences, 1, topk, topp)[1].flatten()
    counts = torch.bincount(tokens, minlength=classes).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = draws * probabilities[possible]
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum().item()
    freedom = int(possible.sum()) - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


def test_draws_differ_by_sentence_place_and_step():
    logits, scores = torch.zeros(12, 4000, device="cuda"), torch.zeros(12, device="cuda")
    sentences = torch.arange(4, dtype=torch.int32, device="cuda")
    first = draw(logits, scores, sentences, 3)[1]
    assert len(first.unique()) > 9
    assert not torch.equal(first, draw(logits, scores, sentences, 3, step=5)[1])
    moved = draw(logits, scores, sentences.flip(0), 3)[1].view(4, 3).flip(0)
    assert torch.equal(moved.reshape(-1, 1), first)


def test_nothing_to_say():
    logits = on_grid(3, 40)
    logits[0] = -INF
    logits[1, 4] = torch.nan
    sentences = torch.arange(3, dtype=torch.int32, device="cuda")
    scores, tokens = draw(logits, torch.zeros(3, device="cuda"), sentences, 1)
    assert tokens[:2].eq(EOS).all() and scores[:2].eq(-INF).all() and scores[2].isfinite()
    empty = torch.zeros(0, device="cuda")
    assert draw(logits[:0], empty, sentences[:0], 1)[1].shape == (0, 1)
    arguments = logits[:0], empty, *at(1, 0), 4, *rules()
    assert [len(x) for x in ops.beam_candidates(*arguments)] == [0, 0]


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, lambda x: x.double(), "logits must be float32, float16 or bfloat16"),
        (1, lambda x: torch.stack((x, x), 1)[:, 0], "scores, steps and last_steps must be contig"),
        (3, lambda x: torch.stack((x, x), 1)[:, 0], "scores, steps and last_steps must be contig"),
        (4, lambda count: 129, "count must be 1 to 128"),
        (5, lambda pad: 400, r"pad, eos and unk must be in \[0, V\), got 400"),
        (7, lambda unk: -1, r"pad, eos and unk must be in \[0, V\), got -1"),
        (11, lambda temperature: 0.0, "temperature must be positive"),
    ],
)
def test_refusals(place, change, message):
    arguments = [on_grid(3, 400), torch.zeros(3, device="cuda"), *at(3, 3), 4, *rules()]
    arguments[place] = change(arguments[place])
    with pytest.raises(RuntimeError, match=f"beam_candidates: {message}"):
        ops.beam_candidates(*arguments)
    if place in (0, 5):
        arguments[4:5] = [make_rng().cuda(), 1, 0, 0.0]
        sentences = torch.arange(3, dtype=torch.int32, device="cuda")
        with pytest.raises(RuntimeError, match=f"beam_sample: {message}"):
            ops.beam_sample(*arguments[:2], sentences, *arguments[2:])
