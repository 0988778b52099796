"""Translating on a GPU finds what a CPU finds, with and without graphs, and the loop does not
wait."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.digits as digits
import pytest
import torch
from fairseq import utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.sequence_generator import SequenceGenerator
from helpers.digits import Toy, held_out
from helpers.searches import (
    Found,
    assert_close,
    assert_equal,
    difference_of_lines,
    forbid_waits,
    graphs,
    tokens_of,
)

from lightseq_fairseq.generation import search
from lightseq_fairseq.generation.delayed_progress import DelayedProgress
from lightseq_fairseq.plugins import generator as plugin

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-4": {"beam": 4, "lenpen": 0.6},
    "beam-5": {"beam": 5, "unkpen": -1, "min_len": 3},
    "max-len": {"beam": 4, "max_len_a": 0.5, "max_len_b": 3},
    "groups": {"beam": 4, "diverse_beam_groups": 2, "diverse_beam_strength": 0.7},
    "ngrams": {"beam": 3, "no_repeat_ngram_size": 2},
}


@functools.cache
def batches(on_gpu: bool) -> list[dict[str, Any]]:
    samples = list(held_out(digits.toy().task))
    return [utils.move_to_cuda(sample) if on_gpu else sample for sample in samples]


def translate(model: Any, by: Any = None, on_cpu: bool = False, **options: Any) -> Found:
    """The hypotheses of all held-out sentences, from samples on the model's device or on the
    CPU."""
    toy = digits.toy()
    generator = toy.task.build_generator([model], GenerationConfig(**options), seq_gen_cls=by)
    found: list[Any] = []
    for sample in batches(next(model.parameters()).is_cuda and not on_cpu):
        found += toy.task.inference_step(generator, [model], sample)
    return found


@pytest.mark.parametrize("by", [None, SequenceGenerator], ids=["own", "fairseqs"])
@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
def test_float32_is_the_cpus(toy: Toy, options: dict[str, Any], by: Any) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    expected = translate(toy.ls, **options)
    assert_close(translate(model, by, **options), expected)
    before = graphs(model)
    assert_close(translate(model, by, **options), expected)  # with graphs from the first step
    assert graphs(model) >= before > 0


@pytest.mark.parametrize("by", [None, SequenceGenerator], ids=["own", "fairseqs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_captured_and_plain_steps_are_equal(
    toy: Toy, dtype: torch.dtype, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = copy.deepcopy(toy.ls).cuda().to(dtype)
    runs = [translate(captured, by, beam=5) for _ in range(2)]
    assert graphs(captured) > 0
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", "0")
    plain = copy.deepcopy(toy.ls).cuda().to(dtype)
    runs.append(translate(plain, by, beam=5))
    assert graphs(plain) == 0
    for run in runs[1:]:
        assert_equal(run, runs[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_translate_as_well_as_fairseqs(toy: Toy, dtype: torch.dtype) -> None:
    expected = tokens_of(translate(toy.ls, beam=4))

    def others(model: Any) -> int:
        """The number of sentences whose translation differs in 16-bit precision."""
        found = tokens_of(translate(copy.deepcopy(model).cuda().to(dtype), beam=4))
        return sum(a[0] != b[0] for a, b in zip(found, expected, strict=True))

    assert others(toy.ls) <= max(2 * others(toy.native), 0.03 * len(expected))


def test_nothing_waits_within_the_loop(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    for _ in range(3):  # afterwards nothing grows, and everything is captured
        translate(model, beam=5)
    loop = ("_refill", "_compact", "_step")
    calls = forbid_waits(monkeypatch, *((search.Search, name) for name in loop))
    translate(model, beam=5)
    assert set(calls) == {*loop}
    # With samples on the CPU, nothing before the loop waits either.
    calls = forbid_waits(monkeypatch, (search.Search, "of_all"))
    translate(model, on_cpu=True, beam=5)
    assert set(calls) == {"of_all"}
    with pytest.raises(RuntimeError, match="synchroniz"):
        translate(model, beam=5)


@pytest.fixture(name="devices")
def devices_of_searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Records which search runs, and on which device it gets its source tokens."""
    seen: list[tuple[str, str]] = []
    ours, fairseqs = search.search, SequenceGenerator._generate

    def counted(*arguments: Any) -> Any:
        seen.append(("ours", arguments[3][0].tokens.device.type))
        return ours(*arguments)

    def of_fairseq(self: Any, sample: Any, *others: Any, **options: Any) -> Any:
        given = (*sample["net_input"].values(), *others)
        seen.extend(("fairseq's", each.device.type) for each in given if torch.is_tensor(each))
        return fairseqs(self, sample, *others, **options)

    monkeypatch.setattr(plugin, "search", counted)
    monkeypatch.setattr(SequenceGenerator, "_generate", of_fairseq)
    return seen


LEFT_TO_FAIRSEQ: dict[str, dict[str, Any]] = {
    "source-length": {"beam": 4, "match_source_len": True}
}


@pytest.mark.parametrize("options", [*SEARCHES.values(), *LEFT_TO_FAIRSEQ.values()],
                         ids=[*SEARCHES, *LEFT_TO_FAIRSEQ])  # fmt: skip
def test_samples_on_the_cpu(
    toy: Toy, options: dict[str, Any], devices: list[tuple[str, str]]
) -> None:
    """Bitwise equal. Our search takes them from the CPU; for fairseq's search they are moved."""
    model = copy.deepcopy(toy.ls).cuda()
    for _ in range(2):  # afterwards both use the same algorithms and graphs
        moved = translate(model, **options)
    devices.clear()
    found = translate(model, on_cpu=True, **options)
    is_left = options in LEFT_TO_FAIRSEQ.values()
    assert set(devices) == {("fairseq's", "cuda") if is_left else ("ours", "cpu")}
    assert_equal(found, moved)


@pytest.mark.parametrize(
    "options", [{"beam": 3}, {"beam": 4, "no_repeat_ngram_size": 2, "min_len": 9, "lenpen": 2}]
)
def test_prefixes(toy: Toy, devices: list[tuple[str, str]], options: dict[str, Any]) -> None:
    """Of several lengths, from either device: what our search finds on a CPU."""

    def found(model: Any, sample: Any) -> Any:
        generator = toy.task.build_generator([model], GenerationConfig(**options))
        prefix = sample["target"][:, :3].clone()
        prefix[::2, 1:] = prefix[1::3, 2:] = toy.task.target_dictionary.pad()
        return tokens_of(generator.generate([model], sample, prefix_tokens=prefix))

    expected = found(toy.ls, batches(True)[0])
    model = copy.deepcopy(toy.ls).cuda()
    for _ in range(3):  # the last run replays graphs
        for sample in (batches(False)[0], batches(True)[0]):
            assert found(model, sample) == expected
    assert set(devices) == {("ours", "cuda"), ("ours", "cpu")}


@pytest.mark.parametrize("flags", ["", "--match-source-len", "--print-alignment hard"])
def test_where_the_launchers_leave_samples(
    toy: Toy, devices: list[tuple[str, str]], tmp_path: Path, flags: str
) -> None:
    (tmp_path / "lines").write_text(
        "eins zwei drei vier fünf sechs\nacht drei null neun eins eins zwei\n"
    )
    given = f"-s src -t tgt --dataset-impl raw --beam 2 --num-workers 0 {flags}".split()
    for command, more in (
        ("generate", ["--gen-subset", "valid", "--max-tokens", "800"]),
        ("interactive", ["--input", str(tmp_path / "lines")]),
    ):
        found = []
        for last in (["--cpu"], ["--distributed-world-size", "1"]):
            devices.clear()
            result = cli_runs.run(
                command, toy.folder, "--path", toy.paths[-1], *given, *more, *last
            )
            assert result.exit_code == 0, (result.output, result.exception)
            lines = [line.split("\t") for line in result.stdout.splitlines()]
            found.append([line for line in lines if line[0][:2] in ("S-", "T-", "H-", "D-", "P-")])
        assert not difference_of_lines(*found, 1e-3) and len(found[0]) >= 2 * 4
        assert set(devices) == {("fairseq's", "cuda") if flags else ("ours", "cpu")}


def test_the_host_is_one_step_late(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host learns of the same ends of sentences as on a CPU, one step later."""
    seen: list[list[tuple[int, int]]] = []
    begin, ended = DelayedProgress.begin, DelayedProgress.ended

    def begun(self: DelayedProgress) -> None:
        begin(self)
        seen.append([])

    def recorded(self: DelayedProgress) -> Any:
        number, ended_at = ended(self)
        seen[-1].append((number, int((ended_at == number).sum()) if number else 0))
        return number, ended_at

    monkeypatch.setattr(DelayedProgress, "begin", begun)
    monkeypatch.setattr(DelayedProgress, "ended", recorded)
    translate(toy.ls, beam=3)
    at_once = seen.copy()
    model = copy.deepcopy(toy.ls).cuda()
    for _ in range(3):  # eager, captured, replayed
        seen.clear()
        translate(model, beam=3)
        for late, early in zip(seen, at_once, strict=True):
            assert late == [(0, 0), *early][: len(late)] and len(late) >= len(early)


def test_reports_are_waited_for() -> None:
    """Copies stand in for decoding steps. The last step of a search may end after the next search
    has begun."""
    progress = DelayedProgress(torch.device("cuda"))
    stream = torch.cuda.current_stream()
    copies = {n: torch.tensor([n, n], dtype=torch.int32, device="cuda") for n in (1, 2, 3)}

    def step(number: int, slot: int) -> None:
        torch.cuda._sleep(50_000_000)
        ended = progress.reports[1 + slot : 2 + slot]
        ended.copy_(copies[number][1:], non_blocking=True)
        progress.reports[:1].copy_(copies[number][:1], non_blocking=True)

    for _ in range(3):
        progress.begin()
        stream.synchronize()
        assert not progress.reports.any()  # no copy is running any more
        step(1, 4)
        progress.step()
        assert progress.ended()[0] == 0 and not stream.query()
        step(2, 6)
        progress.step()
        number, ended_at = progress.ended()
        assert number == 1 and ended_at[4] == 1 and not stream.query()
    step(3, 0)
    progress.step()
    number, ended_at = progress.ended()
    assert number == 2 and ended_at[6] == 2
    progress.step()
    assert progress.ended()[0] == 3
    progress.step()
    with pytest.raises(RuntimeError, match="after 4 steps of a search, the last one has not rep"):
        progress.ended()


def test_searches_one_after_the_other(toy: Toy) -> None:
    """Each result is read, and the next search begun, while the last step may still be running."""
    model = copy.deepcopy(toy.ls).cuda()
    samples = batches(True)
    generator = toy.task.build_generator([model], GenerationConfig(beam=4))
    alone = [tokens_of(toy.task.inference_step(generator, [model], sample)) for sample in samples]
    found = [toy.task.inference_step(generator, [model], sample) for sample in samples * 5]
    assert [tokens_of(each) for each in found] == alone * 5


def test_graphs_are_bounded(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightseq_fairseq.memory.graphs.MOST_GRAPHS", 3)
    model = copy.deepcopy(toy.ls).cuda()
    expected = translate(toy.ls, beam=3)
    for _ in range(3):
        assert_close(translate(model, beam=3), expected)
        assert graphs(model) <= 3


def test_weights_that_change_or_move(toy: Toy) -> None:
    on_cpu, model = copy.deepcopy(toy.ls), copy.deepcopy(toy.ls).cuda()
    translate(model, beam=2)
    translate(model, beam=2)
    with torch.no_grad():  # in place, as an optimizer does
        for each in (on_cpu, model):
            each.decoder.layers[0].fc1.weight.mul_(-1.0)
    expected = translate(on_cpu, beam=2)
    assert tokens_of(expected) != tokens_of(translate(toy.ls, beam=2))
    assert_close(translate(model, beam=2), expected)
    ours = translate(model.half().float(), beam=2)
    assert_close(ours, translate(model.cpu(), beam=2))


@pytest.mark.parametrize("slots", [1, 3, 20])
def test_slots_that_are_refilled(toy: Toy, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    options = {"beam": 4, "max_len_a": 1.5, "max_len_b": 3}
    expected = translate(toy.ls, **options)
    limited = search.most_rows
    for most in (limited, lambda decoder, positions: 4 * slots, limited):
        monkeypatch.setattr(search, "most_rows", most)
        for _ in range(3):  # eager, captured, replayed
            assert_close(translate(model, **options), expected)


def test_batches_that_are_searched_together_on_a_gpu(toy: Toy) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    generator = toy.task.build_generator([model], GenerationConfig(beam=4, max_len_b=30))
    samples = batches(True)
    alone = [toy.task.inference_step(generator, [model], each) for each in samples]
    calls = [
        functools.partial(toy.task.inference_step, generator, [model], each) for each in samples * 3
    ]
    for _ in range(3):
        for mine, other in zip(plugin.together(generator, calls), alone * 3, strict=True):
            assert_close(dict(enumerate(mine)), dict(enumerate(other)))


def test_tables_of_positions_that_grow(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs with a smaller table stay valid, but none of them is used for a longer sentence."""
    rows = toy.ls.encoder.table_rows(1)
    short, long = (rows - 10, rows - 10), (rows + 50, rows - 70)
    shape = 8, rows, toy.ls.decoder.embed_tokens.embedding_dim
    nans = functools.partial(torch.full, shape, torch.nan, device="cuda")

    def found(captured: bool) -> list[Any]:
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", str(int(captured)))
        model = copy.deepcopy(toy.ls).cuda()
        results = []
        for counts in (short, short, short, long, long, long, short, short):
            tokens = digits.sentences(*counts).cuda()
            given = [search.SearchBatch(tokens, 8)], search.SearchOptions(2, 1, 2, 3), 2
            parts = model.decoder.steps, model.encoder, model.decoder
            results.append(tokens_of(search.search(*parts, *given)[0]))
            if len(results) == 3:  # the decoder's table grows too, outside of its steps
                with torch.no_grad():
                    model(tokens, None, digits.sentences(rows + 50).cuda().expand(2, -1))
                kept = [nans()]  # fills memory that has been freed
                kept += model.decoder.steps.launch(("nans",), lambda: [nans() for _ in range(2)])
        assert (graphs(model) > 0) == captured
        return results

    assert found(True) == found(False)


def test_sampling(toy: Toy) -> None:
    model = copy.deepcopy(toy.ls).cuda()
    greedy = tokens_of(translate(model, beam=1))
    torch.manual_seed(3)
    best = tokens_of(translate(model, beam=3, sampling=True, sampling_topk=1))
    assert all(h == g[0] for each, g in zip(best, greedy, strict=True) for h in each)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(tokens_of(translate(model, beam=3, sampling=True, sampling_topp=0.9)))
    assert runs[0] == runs[1] != runs[2]
