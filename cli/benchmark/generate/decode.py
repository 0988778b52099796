"""fairseq-generate's code on a test set: with our model and search, or with --native fairseq's own.

    python -m lightseq_fairseq.cli.benchmark.generate.decode --case CASE --data DIR --sentences N
        --warm-up N --passes N --report FILE [--native] [--cpu]

Calls the same functions as fairseq-generate: its parser, ``load_model_ensemble``, the task's
``build_generator``, ``move_to_cuda`` and ``inference_step``. ``move_to_cuda`` leaves samples on the
CPU for our search, as in lightseq-generate, and moves them to the GPU for fairseq's search. Also as
there, our search takes batches of a number of tokens, which are parts of a test set, together.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from lightseq_fairseq import cli
from lightseq_fairseq.cli.benchmark.generate import stopwatch
from lightseq_fairseq.cli.benchmark.generate.cases import PRECISIONS
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter
from lightseq_fairseq.cli.translate.cpu_samples import left_on_cpu


def main() -> None:
    given = stopwatch.arguments(__doc__)
    words = stopwatch.generation_words(given)
    # The program name decides which patches are applied, as for the launchers.
    sys.argv = ["fairseq-generate" if given.native else "lightseq-generate", *words]
    cli.register()
    with left_on_cpu():
        _run(given, words)


def _run(given: argparse.Namespace, words: list[str]) -> None:
    from fairseq import checkpoint_utils, options, tasks, utils
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    from lightseq_fairseq.plugins.generator import together

    args = options.parse_args_and_arch(options.get_generation_parser(), words)
    cfg = convert_namespace_to_omegaconf(args)
    gpu = not given.cpu
    memory, began = MemoryMeter(gpu), time.perf_counter()
    task = tasks.setup_task(cfg.task)
    (model,), _ = checkpoint_utils.load_model_ensemble([cfg.common_eval.path], task=task)
    # fairseq-generate supports only --fp16.
    model = model.to(getattr(torch, PRECISIONS[given.case.precision]))
    if gpu:
        model.cuda()
    model.prepare_for_inference_(cfg)
    generator = task.build_generator([model], cfg.generation)
    load_s = time.perf_counter() - began

    def search(sample: dict[str, Any]) -> Any:
        sample = utils.move_to_cuda(sample) if gpu else sample
        return task.inference_step(generator, [model], sample)

    def lengths(hypotheses: Any) -> list[int]:
        return [len(found[0]["tokens"].cpu()) for found in hypotheses]

    def search_together(samples: Sequence[dict[str, Any]]) -> list[Any]:
        return together(generator, [functools.partial(search, sample) for sample in samples])

    def saved() -> dict[str, Any]:
        """What one search of all batches saves, beside one search for each batch."""
        steps, words, seconds = [], [], []
        # The first pass captures graphs.
        runs: list[Any] = [functools.partial(map, search)] * (1 + given.passes)
        for run in (*runs, search_together):
            before, began = model.decoder.steps.launched, time.perf_counter()
            found = list(run(samples))
            list(map(lengths, found))  # reads the results
            seconds.append(time.perf_counter() - began)
            steps.append(model.decoder.steps.launched - before)
            words.append([each[0]["tokens"].tolist() for batch in found for each in batch])
        same = [a == b for a, b in zip(*words[-2:], strict=True)]
        return {
            "steps": steps[-1], "steps_one_by_one": steps[-2],
            "one_by_one_s": statistics.median(seconds[1:-1]), "same_words": sum(same) / len(same),
        }  # fmt: skip

    samples = stopwatch.batches(task, cfg, given)
    is_together = given.case.batch is None and not given.native
    stopwatch.measure(
        given, samples, lambda sample: lengths(search(sample)), load_s, memory,
        (lambda samples: list(map(lengths, search_together(samples)))) if is_together else None,
        saved if is_together and given.case.is_trained else dict,
    )  # fmt: skip


if __name__ == "__main__":
    main()
