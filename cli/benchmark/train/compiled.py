"""The baseline without fairseq: plain PyTorch without pads under torch.compile, in its own loop.

    python -m lightseq_fairseq.cli.benchmark.train.compiled --case CASE --system SYSTEM --data DIR
        --report FILE --updates N --heat N --marks N [--workers N] [--log-interval N]

This is what an experienced PyTorch user could set up: inductor for everything between the GEMMs and
attention, forward and backward in one CUDA graph per batch size, torch's fused AdamW on float32
master weights of bf16 weights. It trains on fairseq's batches, made by the same number of worker
processes, and logs in fairseq's format. The benchmark starts it like the other systems.

Masked text is drawn in advance, in batches of one size, see `masked_batches`. The system
``transformers_graphs`` trains Hugging Face's models in the same loop, and ``transformers`` without
CUDA graphs. BART and NLLB train on the batches of `padded_pairs`, whose sizes are symbols of the
compiled code: it is compiled once.

Blocks of running text are equally long: nothing is packed, and there is one graph. Sentence pairs
are packed, and their batch is rounded up to one of a few static sizes, since each size is compiled
separately: both sides to the same multiple of an eighth of max-tokens, sentences to a power of two.
The added rows are pads, grouped into extra sentences, so that attention reads and writes every row.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.cli.benchmark.train import corpus, masked_batches, padded_pairs
from lightseq_fairseq.cli.benchmark.train.batches import Batch, Blocks, PaddedPairs, Pairs
from lightseq_fairseq.cli.benchmark.train.cases import LOG_INTERVAL, SYSTEMS, Case
from lightseq_fairseq.cli.benchmark.train.corpus import SOURCE, TARGET
from lightseq_fairseq.cli.benchmark.train.packed_transformer import (
    LONGEST,
    PAD,
    build,
    fastest_backend,
)
from lightseq_fairseq.cli.benchmark.train.shapes import WARM_UP
from lightseq_fairseq.cli.profiling.measured_trainer import StepMeter, meter_parser
from lightseq_fairseq.fairseq_compat.workers import no_loading_left

SIZES = 8  # row counts are multiples of max-tokens / SIZES; each is compiled separately
DRAWN = 256  # maximum number of batches of masked text; they are used in a cycle
LR, BETAS, WEIGHT_DECAY = 5e-4, (0.9, 0.98), 1e-4


def pack(padded: dict[str, Any], max_tokens: int) -> Pairs:
    """fairseq's batch of pairs, packed and its rows rounded up; runs in a DataLoader worker."""
    inputs = padded["net_input"]
    sides = (inputs["src_tokens"], inputs["prev_output_tokens"])
    lengths = [side.ne(PAD).sum(1) for side in sides]
    rows = [int(side.sum()) for side in lengths]
    # Room for the pads' sentences; none of them may be empty on one side only. (This is enough
    # unless the two sides of a batch differ by about max-tokens.)
    step, room = max(max_tokens // SIZES, 1), max(max_tokens // LONGEST, 1)
    size = -(-(max(rows) + room) // step) * step
    fill = -(-(size - min(rows)) // LONGEST)
    sentences = len(lengths[0]) + fill
    capacity = 1 << (sentences - 1).bit_length()
    packed = []
    for side, real, used in zip(sides, lengths, rows):
        pads = torch.full((fill,), (size - used) // fill)
        pads[: (size - used) % fill] += 1
        ends = torch.cat((real, pads)).cumsum(0)
        starts = torch.full((capacity + 1,), size, dtype=torch.int32)
        starts[0] = 0
        starts[1 : sentences + 1] = ends
        places = torch.arange(size)
        positions = places - starts[torch.searchsorted(ends, places, right=True)]
        packed += [_filled(side, size), positions, starts]
    packed.append(_filled(padded["target"], size))
    return Pairs(*packed)


def _filled(side: Tensor, size: int) -> Tensor:
    tokens = side[side.ne(PAD)]
    return functional.pad(tokens, (0, size - len(tokens)), value=PAD)


class Gradients:
    """Loss and gradients of batches: compiled, and on a GPU with one CUDA graph per size.

    Args:
        sizes_are_symbols: the code is compiled once, not for each size.
        replays: without it, no CUDA graphs are made.
    """

    def __init__(
        self, model: nn.Module, sizes_are_symbols: bool = False, replays: bool = True
    ) -> None:
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.gpu, self.replays = self.parameters[0].is_cuda, replays
        # Without a GPU speed does not matter, and a C++ compiler may be missing.
        backend = "inductor" if self.gpu else "eager"
        self._model = torch.compile(model, backend=backend, dynamic=sizes_are_symbols)
        self._graphs: dict[tuple[torch.Size, ...], tuple[Any, Batch, list[Tensor]]] = {}
        self._pool: Any = None
        self._stream: Any = torch.cuda.Stream() if self.gpu else None

    def __call__(self, batch: Batch) -> list[Tensor]:
        """[loss summed over real targets, for each parameter the gradient of their mean loss].

        The next batch overwrites them.
        """
        if not (self.gpu and self.replays):
            device = self.parameters[0].device
            return self._compute(type(batch)(*(x.to(device, non_blocking=True) for x in batch)))
        key = tuple(x.shape for x in batch)
        if key not in self._graphs:
            self._graphs[key] = self._capture(type(batch)(*(x.cuda() for x in batch)))
        graph, inputs, results = self._graphs[key]
        for static, new in zip(inputs, batch):
            static.copy_(new, non_blocking=True)
        graph.replay()
        return results

    def _compute(self, batch: Batch) -> list[Tensor]:
        for starts in (batch.cu_source, batch.cu_target) if isinstance(batch, Pairs) else ():
            torch._dynamo.mark_dynamic(starts, 0)
        loss = self._model(*batch)
        mean = loss / batch.target.ne(PAD).sum()
        return [loss.detach(), *torch.autograd.grad(mean, self.parameters)]

    def _capture(self, inputs: Batch) -> tuple[Any, Batch, list[Tensor]]:
        # One stream for all of it: autograd remembers the stream in which it first saw a parameter.
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile, and let libraries allocate their workspaces
                self._compute(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # One pool for all graphs: besides its results, a replay leaves nothing that is still used.
        # Thread-local: the thread that pins the next batches keeps calling CUDA during capture.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            results = self._compute(inputs)
        self._pool = graph.pool()
        return graph, inputs, results


class Update:
    """AdamW on float32 master weights, with an inverse square root learning rate schedule."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self.masters = [p.detach().float().clone() for p in parameters]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        for master, gradient in zip(self.masters, self.gradients):
            master.grad = gradient
        fused = parameters[0].is_cuda
        self.adam = torch.optim.AdamW(
            self.masters, LR, BETAS, weight_decay=WEIGHT_DECAY, fused=fused, foreach=not fused
        )

    @torch.no_grad()
    def __call__(self, number: int, gradients: list[Tensor]) -> None:
        """Update ``number`` (from 1)."""
        self.adam.param_groups[0]["lr"] = LR * min(number / WARM_UP, (WARM_UP / number) ** 0.5)
        torch._foreach_copy_(self.gradients, gradients)
        self.adam.step()
        torch._foreach_copy_(self.parameters, self.masters)


def batches(data: Path, case: Case, workers: int) -> Iterator[Batch]:
    """fairseq's batches of the training split without pads, epoch after epoch in fairseq's order.

    Raises:
        ValueError: an epoch has no batch; raised by the iterator.
    """
    task, limits = _text(data, case) if case.block else _pairs(data, case)
    task.load_dataset("train")
    dataset = task.dataset("train")
    collate = dataset.collater

    def without_pads(samples: Any) -> Batch:
        batch = collate(samples)
        if case.block:
            return Blocks(batch["net_input"]["src_tokens"], batch["target"])
        return pack(batch, case.max_tokens)

    dataset.collater = without_pads
    # The same call as in fairseq's Trainer, so the same sentences are dropped.
    epochs = task.get_batch_iterator(
        dataset, ignore_invalid_inputs=True, seed=1, num_workers=workers, **limits
    )

    def endless() -> Iterator[Batch]:
        while len(epoch := epochs.next_epoch_itr(shuffle=True)):
            yield from epoch
        raise ValueError(f"no batch of {case} can be made of {data}")

    return endless()


def _pairs(data: Path, case: Case) -> tuple[Any, dict[str, Any]]:
    """fairseq's task of the sentence pairs, and the limits of a batch."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    cfg = TranslationConfig(data=str(data), source_lang=SOURCE, target_lang=TARGET)
    cfg.train_subset, cfg.dataset_impl, cfg.required_seq_len_multiple = "train", None, 1
    positions = (case.max_tokens, case.max_tokens)
    limits = {"max_tokens": case.max_tokens, "max_positions": positions}
    return TranslationTask.setup_task(cfg), {**limits, "required_batch_size_multiple": 8}


def _text(data: Path, case: Case) -> tuple[Any, dict[str, Any]]:
    """fairseq's task of the running text, and the limits of a batch."""
    from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

    cfg = LanguageModelingConfig(data=str(data), tokens_per_sample=case.block)
    cfg.dataset_impl, cfg.use_plasma_view, cfg.plasma_path, cfg.seed = None, False, "", 1
    limits = {"max_sentences": case.blocks, "max_positions": case.block}
    return LanguageModelingTask.setup_task(cfg), {**limits, "required_batch_size_multiple": 1}


def train(
    case: Case, system: str, data: Path, updates: int, workers: int, interval: int, meter: StepMeter
) -> None:
    """Runs ``updates`` updates, then the profiled ones; logs every ``interval`` updates."""
    torch.manual_seed(1)
    torch._dynamo.config.recompile_limit = 2 * SIZES
    gpu = torch.cuda.is_available()
    model = _model(case, system, case.words(corpus.opened(data).vocabulary))
    model = model.to("cuda" if gpu else "cpu", torch.bfloat16)
    pads_pairs = case.has_pairs and SYSTEMS[system].package == "transformers"
    gradients = Gradients(model, sizes_are_symbols=pads_pairs, replays=system != "transformers")
    update = Update(gradients.parameters)
    feed: Iterator[Batch]
    count = updates + meter.heat + meter.marks
    if pads_pairs:
        feed = itertools.cycle(padded_pairs.drawn(data, case, count, workers))
    elif case.shape.is_masked:
        found = masked_batches.drawn(data, case, system, min(count, DRAWN), workers)
        feed = itertools.cycle(found)
    else:
        feed = batches(data, case, workers)
    with _attention(case, system) if gpu else nullcontext():
        _train(gradients, update, feed, updates, interval, meter)


def _model(case: Case, system: str, vocabulary: int) -> nn.Module:
    if SYSTEMS[system].package == "transformers":
        from lightseq_fairseq.cli.benchmark.train.hugging_face import Roberta, SequenceToSequence

        return (SequenceToSequence if case.has_pairs else Roberta)(case, vocabulary)
    return build(case.shape, vocabulary, case.block, system == "torch_compile_padded")


def _attention(case: Case, system: str) -> AbstractContextManager[None]:
    """The kernels of attention for a case on a GPU."""
    in_pairs = case.has_pairs and SYSTEMS[system].package == "transformers"
    if not (in_pairs or case.block or (case.shape.is_masked and system != "torch_compile")):
        return nullcontext()
    backend = fastest_backend(case, mask_of(case, system))
    print(f"fastest backend of attention: {backend.name}", flush=True)
    # While torch.compile traces, cuDNN accepts no mask; then the last backend is used. The decoder
    # of pairs has no mask, unlike the encoder, and FlashAttention accepts none.
    first = [SDPBackend.FLASH_ATTENTION] * in_pairs
    chosen = dict.fromkeys([*first, backend, SDPBackend.EFFICIENT_ATTENTION])
    return sdpa_kernel(list(chosen), set_priority=True)


def mask_of(case: Case, system: str) -> Tensor | None:
    """A mask as attention gets it on a GPU if half of the tokens are pads; None if it gets none."""
    if case.block and not case.has_pairs:
        return None
    mask = torch.arange(case.longest, device="cuda") < case.longest / 2
    queries = case.longest if SYSTEMS[system].package == "transformers" else 1
    return mask.expand(case.blocks, 1, queries, -1).contiguous()


def _train(
    gradients: Gradients, update: Update, feed: Iterator[Batch], updates: int, interval: int,
    meter: StepMeter,
) -> None:  # fmt: skip
    meter.begin()
    began, interval_tokens = time.perf_counter(), 0
    for number in range(1, updates + meter.heat + meter.marks + 1):
        batch = next(feed)
        counted = (  # as in fairseq
            batch.target if isinstance(batch, Pairs | PaddedPairs) else batch.tokens
        )
        tokens = int(counted.ne(PAD).sum())
        meter.before_step(number - 1, tokens)
        loss, *grads = gradients(batch)
        update(number, grads)
        interval_tokens += tokens
        if number % interval == 0:
            nats, now = loss.item() / int(batch.target.ne(PAD).sum()), time.perf_counter()
            _log(number, nats, interval_tokens, interval, now - began)
            began, interval_tokens = now, 0


def _log(number: int, nats: float, tokens: int, updates: int, seconds: float) -> None:
    """Prints fairseq's log line of an interval, with the entries that the benchmark reads."""
    line = {
        "loss": f"{nats / math.log(2):.3f}",
        "wps": f"{tokens / seconds:.1f}",
        "wpb": f"{tokens / updates:.1f}",
        "num_updates": str(number),
    }
    print(f"{time.strftime('%F %T')} | INFO | train_inner | {json.dumps(line)}", flush=True)


def main() -> None:
    parser = meter_parser(__doc__)
    parser.add_argument("--case", type=Case.parse, required=True)
    systems = [name for name, how in SYSTEMS.items() if how.compiled]
    parser.add_argument("--system", choices=systems, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--log-interval", type=int, default=LOG_INTERVAL)
    given = parser.parse_args()
    meter = StepMeter(given.report, given.updates, given.heat, given.marks)
    fairseq_compat.prepare()  # before fairseq is imported
    with no_loading_left():
        train(
            given.case, given.system, given.data, given.updates, given.workers,
            given.log_interval, meter,
        )  # fmt: skip


if __name__ == "__main__":
    main()
