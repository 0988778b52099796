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

    def search_together(samples: Sequence[dict[str, Any]]) -> list[list[int]]:
        calls = [functools.partial(search, sample) for sample in samples]
        return [lengths(hypotheses) for hypotheses in together(generator, calls)]

    samples = stopwatch.batches(task, cfg, given)
    stopwatch.measure(
        given, samples, lambda sample: lengths(search(sample)), load_s, memory,
        search_together if given.case.batch is None and not given.native else None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
