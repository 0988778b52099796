"""Features of a test set by a RoBERTa: by our layers, or with --native by fairseq's own.

    python -m lightseq_fairseq.cli.benchmark.generate.encode (options of ``decode``)

Calls the functions that users of fairseq call: ``RobertaModel.from_pretrained``, ``eval`` and
``extract_features`` of padded sentences, without gradients.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from lightseq_fairseq import RobertaModel, fairseq_compat
from lightseq_fairseq.cli.benchmark.generate import stopwatch
from lightseq_fairseq.cli.benchmark.generate.cases import PRECISIONS
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter


def main() -> None:
    given = stopwatch.arguments(__doc__)
    fairseq_compat.prepare()
    from fairseq.models.roberta import RobertaModel as Native

    gpu, files = not given.cpu, given.data
    memory, began = MemoryMeter(gpu), time.perf_counter()
    system: Any = Native if given.native else RobertaModel
    roberta = system.from_pretrained(
        str(files.folder), files.checkpoint.name, str(files.folder), bpe=None
    )
    dtype = getattr(torch, PRECISIONS[given.case.precision])
    roberta = roberta.eval().to("cuda" if gpu else "cpu", dtype)
    load_s = time.perf_counter() - began

    @torch.no_grad()
    def encode(sample: dict[str, Any]) -> list[int]:
        return stopwatch.rows_of(roberta.extract_features(sample["net_input"]["src_tokens"]))

    samples = stopwatch.sentence_batches(given, roberta.task.source_dictionary)
    stopwatch.measure(given, samples, encode, load_s, memory)


if __name__ == "__main__":
    main()
