"""Memory of a long run on a GPU."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest
import torch
from fairseq.tasks.translation import TranslationTask
from helpers.ops_testing import skip_without_fp8
from helpers.parity import write_corpus
from helpers.training_runs import ON_GPU

from lightseq_fairseq.layers import label_smoothed_cross_entropy, vocabulary_logits
from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.parameters import flatten_parameters
from lightseq_fairseq.memory.passes import Pass
from lightseq_fairseq.step import training_step

pytestmark = pytest.mark.gpu

SLACK = 32 << 20  # bytes, over 15000 updates


def resident() -> int:
    """Bytes of host memory that this process uses."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.large
@pytest.mark.alone
@pytest.mark.timeout(900)  # other tests have a shorter limit
def test_memory_stays_flat_over_twenty_thousand_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of fifteen shapes; besides the update, thirteen of them can have graphs at a time."""
    monkeypatch.setattr("lightseq_fairseq.memory.graphs.MOST_GRAPHS", 14)
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=2000, longest=60)
    run, reserved, captured = training_step.TrainingStep.update, [], []
    on_device, on_host = [], []  # measured at every hundredth update

    def recorded(self: training_step.TrainingStep, *arguments: Any) -> Any:
        if len(reserved) % 100 == 0:
            free, total = torch.cuda.mem_get_info()
            on_device.append(total - free)
            on_host.append(resident())
        reserved.append(torch.cuda.memory_reserved())
        captured.append(len(self._graphs._graphs))
        return run(self, *arguments)

    monkeypatch.setattr(training_step.TrainingStep, "update", recorded)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 640, "batch_size": 8, "no_save": True}
    flags.update(lr=1e-4, max_update=20_000, log_interval=1000)
    assert len(runs.run(data, tmp_path / "run", **flags)) == 20_000
    assert max(captured) == 14
    assert max(reserved) == max(reserved[:5000])
    for used in (on_device, on_host):
        assert max(used[50:]) <= max(used[:50]) + SLACK


def test_graphs_use_the_memory_of_plain_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=4000, longest=60)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 16_384, "max_update": 40, "no_save": True}
    reserved = {}
    for captured in (True, False):
        monkeypatch.setenv("LIGHTSEQ_CAPTURE", str(int(captured)))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        assert len(runs.run(data, tmp_path / str(captured), **flags)) == 40
        reserved[captured] = torch.cuda.max_memory_reserved() - before
    assert reserved[True] <= 1.5 * reserved[False]


@pytest.mark.alone
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_nllbs_vocabulary_needs_its_logits_once(smoothing: float) -> None:
    """4096 tokens and 256,206 words in bf16: 2.10 GB, of which the rest is scratch memory."""
    words, width, tokens = 256_206, 1024, 4096
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    table = torch.nn.Parameter(torch.randn(words, width, **options).mul_(0.02))
    other = torch.nn.Parameter(torch.ones(8, **options))
    (buffer,) = flatten_parameters(torch.nn.ParameterList([table, other]), spared=[table])
    gradients = DirectGradients(buffer)
    x = torch.randn(tokens, width, **options).requires_grad_()
    target = torch.randint(2, words, (tokens,), device="cuda")
    scale = torch.ones((), device="cuda")
    for _ in range(2):  # the first one also searches for algorithms
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with Pass(gradients).entered():
            logits = vocabulary_logits(x, table)
            losses, _, _ = label_smoothed_cross_entropy(
                logits, target, smoothing, 1, accuracy=True, dloss=scale
            )
            with gradients.write(accumulate=False):
                losses.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before
        del logits, losses
        x.grad = None
    assert 2 * tokens * words <= peak <= 2.2e9
    assert gradients.flat.isfinite().all() and gradients.flat.any()


@pytest.fixture
def model_is_made_fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By all cores, since other tests wait, and of zeros: billions of random numbers take minutes,
    and memory does not depend on them."""

    def zero(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor.detach().zero_()

    for name in ("kaiming_uniform_", "normal_", "uniform_", "xavier_uniform_"):
        monkeypatch.setattr(torch.nn.init, name, zero)
    monkeypatch.setattr(torch.Tensor, "normal_", zero)
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.large
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("model_is_made_fast")
@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("", 75e9),
        ("--checkpoint-activations", 62e9),
        ("--fp8", 75e9),
        ("--optimizer adafactor --lr 1e-4 --criterion ls_label_smoothed_cross_entropy", 50e9),
        ("--lora-rank 16", 30e9),
    ],
    ids=["bf16", "recomputed", "fp8", "adafactor", "lora"],
)
def test_nllb_3_3b_trains_on_one_gpu(
    tmp_path: Path, words: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4096 tokens of each side and 256,206 words. Expected, in GB: 16 bytes for each of 3.35
    billion parameters are 53.5, the logits 2.1, activations about 12.7."""
    if torch.cuda.get_device_properties(0).total_memory < 80e9:
        pytest.skip("needs 80 GB")
    if "--fp8" in words:
        skip_without_fp8()
    text, data, dictionary = tmp_path / "text", tmp_path / "data", tmp_path / "dict.txt"
    dictionary.write_text("".join(f"w{number} 1\n" for number in range(256_202)))
    source = random.Random(1)
    for side in ("src", "tgt"):
        lines = (" ".join(f"w{source.randrange(256_202)}" for _ in range(31)) for _ in range(640))
        text.with_suffix(f".{side}").write_text("\n".join(lines) + "\n")
    cli_runs.succeed(
        "preprocess", "-s", "src", "-t", "tgt", "--srcdict", dictionary, "--joined-dictionary",
        "--trainpref", text, "--validpref", text, "--destdir", data,
    )  # fmt: skip
    run, updates = training_step.TrainingStep.update, []

    def counted(self: training_step.TrainingStep, *arguments: Any) -> Any:
        updates.append(1)
        return run(self, *arguments)

    monkeypatch.setattr(training_step.TrainingStep, "update", counted)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cli_runs.succeed(
        "train", data, "--arch", "ls_transformer_nllb_3_3b", "--share-all-embeddings", "--bf16",
        "--max-tokens", 4096, "--max-update", 4, "--no-save", "--disable-validation",
        "--distributed-world-size", 1, "--log-interval", 1, *words.split(),
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{words or 'bf16'}: {peak / 1e9:.1f} GB")
    assert len(updates) == 4
    assert peak < most


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_recomputed_activations_need_less_memory(
    captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve layers of activations without the flag; the inputs of twelve and one layer with it."""
    monkeypatch.setenv("LIGHTSEQ_CAPTURE", str(int(captured)))
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=4000, longest=60)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 16_384, "max_update": 20, "no_save": True}
    flags.update(encoder_layers=6, decoder_layers=6, encoder_ffn_embed_dim=1024)
    flags.update(decoder_ffn_embed_dim=1024)
    peaks = []
    for again in (None, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        runs.run(data, tmp_path / str(again), **flags, checkpoint_activations=again)
        peaks.append(torch.cuda.max_memory_reserved() - before)
    assert peaks[1] < 0.7 * peaks[0]


def test_steps_leave_nothing_in_the_memory_of_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier graph would overwrite memory that is allocated there."""
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=2000, longest=60)
    run, left = Graphs.launch, []

    def recorded(self: Graphs, *arguments: Any) -> Any:
        before = torch.cuda.memory_allocated()
        assert run(self, *arguments) is None
        left.append(torch.cuda.memory_allocated() - before)

    monkeypatch.setattr(Graphs, "launch", recorded)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 1024, "update_freq": "3", "no_save": True}
    flags.update(max_update=40, validate_interval_updates=10, disable_validation=None)
    runs.run(data, tmp_path / "run", **flags)
    assert len(left) > 100
    # The first step allocates the position table, and the first graph two numbers of torch's
    # generator.
    assert sum(max(more, 0) for more in left[1:]) <= 4096


def test_a_validation_takes_the_memory_of_graphs_where_it_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    data = write_corpus(tmp_path / "data", pairs=2000, longest=60)
    flags = {**ON_GPU, "bf16": True, "max_tokens": 8192, "encoder_embed_dim": 512}
    flags.update(encoder_attention_heads=8, decoder_attention_heads=8)
    flags.update(max_update=24, validate_interval_updates=12, disable_validation=None, no_save=True)
    flags.update(validate_interval=100)  # not at the end of an epoch, so only at updates 12 and 24
    validates, valid = TranslationTask.valid_step, []
    # bytes that a validation allocates, and the limit for everything together
    more, limit = 0, 0

    def validated(self: TranslationTask, *arguments: Any) -> Any:
        loss, *others = validates(self, *arguments)
        valid.append(loss.item())
        return loss, *others

    def greedy(self: TranslationTask, *arguments: Any) -> Any:
        nonlocal limit, more
        torch.cuda.empty_cache()
        # It must not fit into what is free, outside of graphs, of the memory that is reserved.
        segments = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == (0, 0)]
        blocks = [block for segment in segments for block in segment["blocks"]]
        free = max((x["size"] for x in blocks if x["state"] == "inactive"), default=0)
        more = more or free + (64 << 20)
        limit = limit or torch.cuda.memory_reserved() + (32 << 20)
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        try:
            torch.empty(more, dtype=torch.uint8, device="cuda")
            return validated(self, *arguments)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    caplog.set_level(logging.INFO)
    found = []
    for name, valid_step in (("plenty", validated), ("little", greedy)):
        valid.clear()
        gc.collect()  # the run before and its graphs, which share this run's segments
        monkeypatch.setattr(TranslationTask, "valid_step", valid_step)
        found.append((runs.run(data, tmp_path / name, **flags), list(valid)))
    assert found[0] == found[1]
    assert caplog.text.count("the batch starts again") == 2
