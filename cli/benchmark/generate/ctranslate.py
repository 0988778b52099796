"""CTranslate2 on a test set, with the batches of the other systems.

    python -m lightseq_fairseq.cli.benchmark.generate.ctranslate (options of ``decode``)

The first run exports the checkpoint, as lightseq-export does. If CTranslate2 cannot run, the report
contains the reason.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from lightseq_fairseq.cli.benchmark.generate import stopwatch
from lightseq_fairseq.cli.benchmark.generate.cases import PRECISIONS
from lightseq_fairseq.cli.benchmark.generate.test_set import TestSet
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter


def main() -> None:
    given = stopwatch.arguments(__doc__)
    task, samples = stopwatch.task_batches(given)
    for sample in samples:
        sample["text"] = _text(sample["net_input"]["src_tokens"], task.source_dictionary)
    model = converted(given.data)
    memory, began = MemoryMeter(gpu=not given.cpu), time.perf_counter()
    with stopwatch.or_unable(given):
        translate = _translator(given, model)
        translate(samples[0])
    load_s = time.perf_counter() - began
    # CTranslate2's allocator never returns memory to the GPU: memory in use at the end is the peak.
    stopwatch.measure(given, samples, translate, load_s, memory)


def converted(files: TestSet) -> Path:
    """The folder of the model for CTranslate2, which is made if it does not exist."""
    made = files.ctranslate2
    if made.exists() and made.stat().st_mtime < files.checkpoint.stat().st_mtime:
        shutil.rmtree(made)  # the user has another model now
    if not made.exists():
        from lightseq_fairseq.checkpoints import export
        from lightseq_fairseq.checkpoints.trained import read

        trained = read(files.checkpoint)
        dictionaries = export.find_dictionaries(trained, str(files.folder))
        export.to_ctranslate2(trained, dictionaries, made, None)
    return made


def _text(tokens: Any, words: Any) -> list[list[str]]:
    """Words of the source sentences, without ``</s>``, which CTranslate2 adds itself."""
    special = (words.pad(), words.eos())
    return [[words[i] for i in row if i not in special] for row in tokens.tolist()]


def _translator(given: argparse.Namespace, model: Path) -> Any:
    """The ``translate`` function for `stopwatch.measure`."""
    import ctranslate2

    translator = ctranslate2.Translator(
        str(model), device="cpu" if given.cpu else "cuda",
        compute_type=PRECISIONS[given.case.precision],
    )  # fmt: skip

    case, options = given.case, {}
    if case.shape.is_bart and not case.new:
        options = {
            "length_penalty": stopwatch.LENGTH_PENALTY,
            "no_repeat_ngram_size": stopwatch.NO_REPEAT,
        }

    def translate(sample: dict[str, Any]) -> list[int]:
        # CTranslate2 stops at the maximum length, without </s>, which it never counts.
        end = int(case.is_trained)
        length = stopwatch.wanted(case, sample) - end
        results = translator.translate_batch(
            sample["text"], beam_size=case.beam, max_decoding_length=length,
            min_decoding_length=1 if case.is_trained else length, **options,
        )  # fmt: skip
        return [len(result.hypotheses[0]) + end for result in results]

    return translate


if __name__ == "__main__":
    main()
