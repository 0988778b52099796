"""The kernel that merges the beams of a sentence equals the reference on the CPU bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lightseq_fairseq import ops

EOS, V, MAX_LEN = 2, 40, 68
INF = torch.inf


def state(
    sentences: list[int], beam: int, positions: int, step: int, max_len: int = MAX_LEN,
    most: int | None = None, mixed: bool = False,
):  # fmt: skip
    """The state amid a search, by name, with up to ``most`` results of earlier steps.

    mixed: slots other than the first are at earlier steps.
    """
    count, rows = len(sentences) * beam, (max([*sentences, len(sentences)]) + 1) * beam + 3
    tensors = {
        "last_steps": torch.full((count,), max_len),
        "progress": torch.tensor([step, 0]),
        "sentences": torch.tensor(sentences),
        "steps": torch.full((count,), step),
        "places": torch.full((count,), step),
        "tokens": torch.randint(4, V, (count,)),
        "scores": torch.randn(count),
        "ancestry": torch.full((positions, rows), -9),
        "past_tokens": torch.randint(4, V, (positions, rows)),
        "past_scores": torch.randn(positions, rows),
        "hypothesis_tokens": torch.full((rows, positions), -5),
        "hypothesis_scores": torch.full((rows, positions), -5.0),
        "lengths": torch.zeros(rows),
        "totals": torch.full((rows,), -5.0),
        "reports": torch.full((len(sentences) + 1,), -5),
    }
    if mixed:
        slots = torch.arange(count) // beam
        tensors["steps"] -= slots % (step + 1)
        tensors["last_steps"] = torch.where(slots % 4 == 3, tensors["steps"], max_len)
        tensors["places"] = (tensors["steps"] - slots % 2).clamp_min(0)  # a pad before some prompts
    for slot in range(len(sentences)):
        mine = slice(slot * beam, (slot + 1) * beam)
        tensors["ancestry"][:step, mine] = mine.start + torch.randint(0, beam, (step, beam))
    for sentence in filter(lambda number: number >= 0, sentences):
        found = int(torch.randint(0, beam if most is None else most + 1, ()))
        tensors["lengths"][sentence * beam :][:found] = 4
        tensors["totals"][sentence * beam :][:found] = torch.randn(found)
    real = ("scores", "past_scores", "hypothesis_scores", "totals")
    return {name: x if name in real else x.int() for name, x in tensors.items()}


def candidates(count: int, beam: int, drawn: bool) -> tuple[Tensor, Tensor]:
    """Sorted lists with many ends and many ties, also between lists; some candidates have no finite
    score."""
    width = 1 if drawn else 2 * beam
    tokens = torch.empty(count, width, dtype=torch.int64)
    for row in tokens:
        others = torch.randperm(max(V, width + 1))
        row[:] = others[others != EOS][:width]
    tokens[::2, 0] = EOS
    scores = torch.randn(count, width).mul_(4).round_().div_(4)
    scores[:, width - width // 4 :] = -INF
    scores[1::5] = -INF
    order = tokens.argsort(dim=1)
    scores, tokens = scores.gather(1, order), tokens.gather(1, order)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    return scores, tokens.gather(1, order).int()


def to_gpu(tensors):
    """Copies on the GPU, except what the GPU writes to host memory."""
    return {n: x.clone().pin_memory() if n == "reports" else x.cuda() for n, x in tensors.items()}


def same_as_reference(found, tensors, *options):
    """Runs the step on both devices, and compares the modified tensors."""
    on_gpu = to_gpu(tensors)
    ops.beam_advance(*(x.cuda() for x in found), *on_gpu.values(), *options)
    ops.beam_advance(*found, *tensors.values(), *options)
    torch.cuda.synchronize()
    for name, x in tensors.items():
        assert torch.equal(on_gpu[name].cpu(), x), name


@pytest.mark.parametrize("beam", [1, 2, 4, 5, 8, 32, *range(52, 58), 64])
@pytest.mark.parametrize("step", [0, 1, 30, 67, MAX_LEN])
def test_beam_search(step, beam):
    torch.manual_seed(100 * step + beam)
    for _ in range(3):
        sentences = [2, -1, 0, 5, 1]
        tensors = state(sentences, beam, MAX_LEN + 2, step)
        found = candidates(len(sentences) * beam, beam, False)
        same_as_reference(found, tensors, beam, 1, 0.0, EOS, 0.6, 0)


@pytest.mark.parametrize("beam", [1, 4, 5, 64])
@pytest.mark.parametrize("stopping", range(4))
def test_slots_at_different_steps(stopping, beam):
    torch.manual_seed(beam)
    for step in (1, 9, 66):
        tensors = state([4, 0, -1, 2, 6, 1, 3, 5], beam, MAX_LEN + 2, step, mixed=True)
        found = candidates(8 * beam, beam, False)
        same_as_reference(found, tensors, beam, 1, 0.0, EOS, 0.6, stopping)


@pytest.mark.parametrize("beam", [1, 2, 5, 8, 32, 55, 64])
@pytest.mark.parametrize("stopping", [1, 2, 3])
def test_rules_of_transformers(stopping, beam):
    """The results that are there may be all, may be replaced, and may end a sentence."""
    torch.manual_seed(beam)
    ended = 0
    for step, penalty, better in itertools.product(
        (0, 7, 67, MAX_LEN), (0.0, 0.6, 2.0, -1.0), (0.0, 9.0)
    ):
        tensors = state([2, -1, 0, 5, 1], beam, MAX_LEN + 2, step, most=beam)
        tensors["totals"] += better * (tensors["lengths"] > 0)
        found = candidates(5 * beam, beam, False)
        prompt = step // 2
        same_as_reference(found, tensors, beam, 1, 0.0, EOS, penalty, stopping, prompt)
        ended += int(tensors["sentences"].lt(0).sum() > 1) if step < MAX_LEN else 0
    assert ended or beam > 5


@pytest.mark.parametrize(("beam", "groups"), [(4, 2), (6, 3), (6, 2), (5, 5), (32, 4)])
@pytest.mark.parametrize("diversity", [0.25, 0.3, 2.0])
def test_diverse_beam_search(diversity, beam, groups):
    torch.manual_seed(beam)
    for step in (0, 9, 33):
        tensors = state([1, 0, 2], beam, MAX_LEN + 2, step)
        same_as_reference(
            candidates(3 * beam, beam, False), tensors, beam, groups, diversity, EOS, 1.0, 0
        )


@pytest.mark.parametrize("beam", [1, 3, 64])
def test_sampling(beam):
    torch.manual_seed(beam)
    for step in (0, 20):
        tensors = state([1, -1, 0], beam, MAX_LEN + 2, step)
        same_as_reference(candidates(3 * beam, beam, True), tensors, beam, 1, 0.0, EOS, 1.0, 0)


@pytest.mark.parametrize("stopping", range(4))
def test_a_whole_search(stopping):
    """All steps from the beginning until every sentence has ended."""
    torch.manual_seed(0)
    beam, slots = 4, 30
    tensors = state(list(range(slots)), beam, 20, 0, max_len=18)
    tensors["lengths"].zero_()
    for _ in range(19):
        found = candidates(slots * beam, beam, False)
        same_as_reference(found, tensors, beam, 1, 0.0, EOS, 0.6, stopping)
    assert tensors["progress"].tolist() == [19, 0] and tensors["sentences"].eq(-1).all()


@pytest.mark.parametrize("beam", [4, 5, 64])
def test_all_end_at_once(beam):
    """As many hypotheses end as results are still missing; the best that have not ended take their
    places."""
    torch.manual_seed(beam)
    for step in (0, 1, 66):
        tensors = state([1, 0, -1, 2], beam, MAX_LEN + 2, step)
        scores, tokens = candidates(4 * beam, beam, False)
        scores[:, 0], tokens[:, 0] = 9.0, EOS
        for row in tokens[:, 1:]:
            row[row == EOS] = V + 200
        same_as_reference((scores, tokens), tensors, beam, 1, 0.0, EOS, 0.6, 0)


def test_nobody_there():
    tensors = state([], 4, 20, 3)
    same_as_reference(candidates(0, 4, False), tensors, 4, 1, 0.0, EOS, 1.0, 0)
    assert tensors["progress"][0] == 4 and tensors["reports"].tolist() == [4]


def test_one_graph_serves_all_steps():
    torch.manual_seed(0)
    beam, slots = 5, 200
    tensors = state(list(range(slots)), beam, 12, 0, max_len=10)
    tensors["lengths"].zero_()
    on_gpu = to_gpu(tensors)
    found = [x.cuda() for x in candidates(slots * beam, beam, False)]
    options = beam, 1, 0.0, EOS, 0.6, 0
    warm = to_gpu(tensors)
    ops.beam_advance(*found, *warm.values(), *options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.beam_advance(*found, *on_gpu.values(), *options)
    for _ in range(11):
        new = candidates(slots * beam, beam, False)
        for x, y in zip(found, new, strict=True):
            x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        ops.beam_advance(*new, *tensors.values(), *options)
        for name, x in tensors.items():
            assert torch.equal(on_gpu[name].cpu(), x), name


@pytest.mark.parametrize("slots", [1, 300])
def test_kernels_wait_for_each_other(slots):
    """Each step reads what the step before has written, without a pause for the host."""
    torch.manual_seed(0)
    beam, steps = 4, 18
    logits = torch.randn(slots * beam, 9000, device="cuda").mul_(3)
    logits[:, EOS] += 7

    def search(wait):
        tensors = state(list(range(slots)), beam, steps + 2, 0, max_len=steps)
        tensors["lengths"].zero_()
        on_gpu = to_gpu(tensors)
        on_gpu["scores"].view(slots, beam)[:, 1:] = -INF
        for name in ("ancestry", "past_tokens", "past_scores"):
            on_gpu[name].zero_()
        for step in range(steps + 1):
            torch.cuda._sleep(20_000)
            shifted = logits.roll(step, 1)
            shifted.add_(on_gpu["tokens"][:, None] % 7)
            at, rules = (on_gpu["steps"], on_gpu["last_steps"]), (1, EOS, 3, 0, 0, 0.0, 1.0)
            found = ops.beam_candidates(shifted, on_gpu["scores"], *at, 2 * beam, *rules)
            wait()
            ops.beam_advance(*found, *on_gpu.values(), beam, 1, 0.0, EOS, 0.6, 0)
            wait()
        torch.cuda.synchronize()
        return on_gpu

    torch.manual_seed(1)
    paused = search(torch.cuda.synchronize)
    torch.manual_seed(1)
    for name, x in search(lambda: None).items():
        assert torch.equal(x, paused[name]), name
    assert paused["progress"].tolist() == [steps + 1, 0]


@pytest.mark.parametrize("slots", [1, 700])
def test_whoever_sees_the_report_sees_the_results(slots):
    """The host polls the report in its own memory, and reads the results on another stream, while
    the first stream is busy."""
    torch.manual_seed(slots)
    beam, beside = 5, torch.cuda.Stream()
    kept = ("hypothesis_tokens", "hypothesis_scores", "lengths", "totals")
    for step in (3, 4, 60) * 5:
        tensors = state(list(range(slots)), beam, MAX_LEN + 2, step)
        found = candidates(slots * beam, beam, False)
        on_gpu, found_there = to_gpu(tensors), [x.cuda() for x in found]
        ops.beam_advance(*found, *tensors.values(), beam, 1, 0.0, EOS, 0.6, 0)
        seen = {name: torch.empty_like(tensors[name]).pin_memory() for name in kept}
        torch.cuda.synchronize()
        ops.beam_advance(*found_there, *on_gpu.values(), beam, 1, 0.0, EOS, 0.6, 0)
        torch.cuda._sleep(200_000_000)
        while int(on_gpu["reports"][0]) != step + 1:
            assert not torch.cuda.current_stream().query(), "nobody has reported"
        with torch.cuda.stream(beside):
            for name in kept:
                seen[name].copy_(on_gpu[name], non_blocking=True)
        beside.synchronize()
        assert not torch.cuda.current_stream().query(), "the stream was to be busy still"
        for name in kept:
            assert torch.equal(seen[name], tensors[name]), name
        assert torch.equal(on_gpu["reports"], tensors["reports"])
        torch.cuda.synchronize()


def test_refusals():
    found, tensors = candidates(65, 65, False), state([0], 65, 20, 3)
    with pytest.raises(RuntimeError, match=r"beam_advance: beam must be at most 64 .*, got 65"):
        same_as_reference(found, tensors, 65, 1, 0.0, EOS, 1.0, 0)
    found, tensors = candidates(4, 4, False), state([0], 4, 20, 3)
    on_gpu = to_gpu(tensors)
    on_gpu["ancestry"] = torch.stack((on_gpu["ancestry"],) * 2, 2)[..., 0]
    on_device = [x.cuda() for x in found]
    with pytest.raises(RuntimeError, match="beam_advance: ancestry must be contiguous"):
        ops.beam_advance(*on_device, *on_gpu.values(), 4, 1, 0.0, EOS, 1.0, 0)
    on_gpu = {**to_gpu(tensors), "reports": tensors["reports"]}
    with pytest.raises(RuntimeError, match="beam_advance: reports must be in pinned memory of"):
        ops.beam_advance(*on_device, *on_gpu.values(), 4, 1, 0.0, EOS, 1.0, 0)
    on_gpu = {name: x.cuda() for name, x in tensors.items()}
    with pytest.raises(ValueError, match="beam_advance: reports must be on the CPU, is on cuda"):
        ops.beam_advance(*on_device, *on_gpu.values(), 4, 1, 0.0, EOS, 1.0, 0)
