"""Computes features of sentences with a model of Hugging Face, in bfloat16 without gradients.

    python -m lightseq_fairseq.cli.benchmark.huggingface.encoding (options of `cases.command`)

A batch is timed from token numbers in host memory to its features on the device.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.cli.benchmark.huggingface import reports
from lightseq_fairseq.cli.benchmark.huggingface.cases import SYSTEMS, Case
from lightseq_fairseq.cli.benchmark.huggingface.models import built
from lightseq_fairseq.cli.benchmark.huggingface.samples import (
    Sentences,
    collator,
    count_of,
    resized,
    shapes,
)
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter

WARM_UP, PASSES = 2, 5  # over all batches


def main() -> None:
    given = reports.arguments(__doc__)
    memory = MemoryMeter(gpu=not given.cpu)
    case, how = given.case, SYSTEMS[given.system]
    torch.manual_seed(1)
    model = built(case).eval()
    model = model.to("cpu" if given.cpu else "cuda", torch.bfloat16)
    if how.accelerated:
        lightseq.accelerate(model)
    function = model if how.mode is None else torch.compile(model, mode=how.mode)

    @torch.no_grad()
    def encode(batch: dict[str, Tensor]) -> None:
        function(**{name: x.to(model.device, non_blocking=True) for name, x in batch.items()})
        if not given.cpu:
            torch.cuda.synchronize()

    batches = _batches(given)
    for shape in shapes(case, given.system):
        for _ in range(3):  # torch runs a shape eagerly, then captures it, then replays
            encode(resized(batches[0], shape, model.config.pad_token_id))
    encode(batches[0])
    first = time.time()
    seconds = []
    for _ in range(WARM_UP + PASSES):
        began = time.time()
        for batch in batches:
            encode(batch)
        seconds.append(time.time() - began)
    report = {
        "block_batches": len(batches),
        "block_s": seconds[WARM_UP:],
        "block_tokens": [int(sum(count_of(batch, case) for batch in batches))] * PASSES,
        "start_to_first_s": first - given.began,
    }
    reports.write(given, model, memory, report)


def _batches(given: argparse.Namespace) -> list[dict[str, Tensor]]:
    """``--updates`` batches in host memory."""
    case: Case = given.case
    how, count = SYSTEMS[given.system], given.updates * given.case.batch
    sentences, collate = Sentences(case, count), collator(case, how.multiple)
    lengths = np.diff(sentences.starts)
    order = lengths.argsort(kind="stable") if how.grouped else np.arange(count)
    made = []
    for numbers in order.reshape(-1, case.batch):
        batch: dict[str, Any] = collate([sentences[number] for number in numbers])
        del batch["labels"]
        made.append({n: x if given.cpu else x.pin_memory() for n, x in batch.items()})
    return made


if __name__ == "__main__":
    main()
