"""Timed passes over a test set and their report, the same for every system.

Each batch is timed by itself, or the whole pass if a system searches batches together: from token
numbers in host memory to the best hypothesis of each sentence in host memory, or to its features on
the device. Not included are loading the model, making batches, and converting to text.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.cli.benchmark.generate.cases import Case
from lightseq_fairseq.cli.benchmark.generate.test_set import SEED, SPLIT, TestSet
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter
from lightseq_fairseq.cli.benchmark.train.corpus import SOURCE, SPECIALS, TARGET

# Of fairseq's examples/bart/README.summarization.md, for CNN/DailyMail: tokens with </s>, and more.
SUMMARY, LENGTH_PENALTY, NO_REPEAT = 141, 2.0, 3
LONGER, MORE = 1.5, 10  # limit of a trained model, as of examples/multi30k


def arguments(description: str | None) -> argparse.Namespace:
    """Parses the arguments that `cases.command` passes to a program."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--case", type=Case.parse, required=True)
    parser.add_argument("--data", type=lambda word: TestSet(Path(word)), required=True)
    for flag in ("--sentences", "--warm-up", "--passes"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def wanted(case: Case, sample: dict[str, Any]) -> int:
    """Tokens of each hypothesis, with ``</s>`` and, for a language model, with the prompt; the most
    tokens for a trained model."""
    if case.new:
        return case.prompt + case.new
    if case.shape.is_bart:
        return SUMMARY
    length: int = sample["net_input"]["src_tokens"].shape[1]
    return int(LONGER * length + MORE) + 1 if case.is_trained else length


def generation_words(given: argparse.Namespace) -> list[str]:
    """Arguments of fairseq-generate: hypotheses are as long as the longest source of their batch,
    or as the case says."""
    case: Case = given.case
    words = [str(given.data.folder), "--path", str(given.data.checkpoint)]
    words += ["--beam", str(case.beam)]
    words += ["--fp16"] * (case.precision == "fp16") + ["--cpu"] * given.cpu
    # fairseq's maximum length counts a prompt, but not </s>; the length of a source counts </s>.
    if case.new:
        words += ["--max-len-b", str(case.prompt + case.new - 1)]
    if case.prompt:
        return [*words, "--task", "language_modeling"]
    words += ["-s", SOURCE, "-t", TARGET, "--gen-subset", SPLIT, "--num-workers", "0"]
    words += ["--distributed-world-size", "1"]
    if case.new:
        return words
    if case.shape.is_bart:
        words += ["--max-len-b", str(SUMMARY - 1), "--min-len", "55"]
        words += ["--lenpen", str(LENGTH_PENALTY), "--no-repeat-ngram-size", str(NO_REPEAT)]
    elif case.is_trained:
        words += ["--max-len-a", str(LONGER), "--max-len-b", str(MORE)]
    else:
        words += ["--max-len-a", "1", "--max-len-b=-1"]
    if case.batch is None:
        # With fairseq's default, 8, the three longest sentences would form their own batch, with a
        # quarter of all decode steps.
        words += ["--max-tokens", str(case.max_tokens), "--required-batch-size-multiple", "1"]
    else:
        words += ["--batch-size", str(case.batch)]
    return words


def batches(task: Any, cfg: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    """fairseq-generate's collated batches of the first ``--sentences`` sentences, or those of
    `prompts`, collated as in fairseq-interactive."""
    if given.case.new:
        return _prompt_batches(task, given.case, given.sentences)
    task.load_dataset(SPLIT)
    dataset = task.dataset(SPLIT)
    order = dataset.ordered_indices()
    dataset.ordered_indices = lambda: order[order < given.sentences]
    iterator = task.get_batch_iterator(
        dataset, max_tokens=cfg.dataset.max_tokens, max_sentences=cfg.dataset.batch_size,
        required_batch_size_multiple=cfg.dataset.required_batch_size_multiple,
    )  # fmt: skip
    return list(iterator.next_epoch_itr(shuffle=False))


def task_batches(given: argparse.Namespace) -> tuple[Any, list[dict[str, Any]]]:
    """fairseq-generate's task and batches, for a system without fairseq's models."""
    fairseq_compat.prepare()
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args = options.parse_args_and_arch(options.get_generation_parser(), generation_words(given))
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    return task, batches(task, cfg, given)


def sentence_batches(given: argparse.Namespace, words: Any) -> list[dict[str, Any]]:
    """Batches of the source sentences for RoBERTa: with ``<s>``, and padded on the right.

    words: fairseq's dictionary.
    """
    from fairseq.data import LanguagePairDataset, PrependTokenDataset, data_utils

    case: Case = given.case
    lines = data_utils.load_indexed_dataset(str(given.data.sources), words)
    lines = PrependTokenDataset(lines, words.bos())
    dataset = LanguagePairDataset(lines, lines.sizes, words, left_pad_source=False, shuffle=False)
    order = dataset.ordered_indices()
    chosen = dataset.batch_by_size(order[order < given.sentences], case.max_tokens, case.batch)
    return [dataset.collater([dataset[i] for i in batch]) for batch in chosen]


def prompts(case: Case, count: int, vocabulary: int) -> list[list[Any]]:
    """``count`` prompts or texts of random words, in full batches (at least one): for each batch
    its prompts, int64 [tokens] on the CPU."""
    assert case.batch is not None
    random = torch.Generator().manual_seed(SEED)
    shortest, longest = case.source or (case.prompt, case.prompt)
    shape = (max(count // case.batch, 1), case.batch)
    lengths = torch.randint(shortest, longest + 1, shape, generator=random)
    words = torch.randint(SPECIALS, vocabulary, (*shape, longest), generator=random)
    return [
        [row[:length] for row, length in zip(*batch, strict=True)]
        for batch in zip(words, lengths.tolist(), strict=True)
    ]


def _prompt_batches(task: Any, case: Case, count: int) -> list[dict[str, Any]]:
    words, found = task.source_dictionary, []
    for batch in prompts(case, count, len(words)):
        tokens = [torch.cat((prompt, torch.tensor([words.eos()]))) for prompt in batch]
        dataset = task.build_dataset_for_inference(tokens, [len(prompt) for prompt in tokens])
        sample = dataset.collater([dataset[i] for i in range(len(dataset))])
        found.append({**sample, "nsentences": len(tokens)})
    return found


def rows_of(features: Any) -> list[int]:
    """The number of rows of each sentence of features [B, L, C]; waits until the GPU has them."""
    if features.is_cuda:
        torch.cuda.synchronize()
    return [features.shape[1]] * len(features)


@contextmanager
def or_unable(given: argparse.Namespace) -> Iterator[None]:
    """If the block cannot run here, reports the reason and exits: for a missing library, or a
    version or a precision that it does not support."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        given.report.write_text(json.dumps({"unable": reason}) + "\n", encoding="utf-8")
        raise SystemExit(0) from error


def measure(
    given: argparse.Namespace,
    samples: Sequence[dict[str, Any]],
    translate: Callable[[dict[str, Any]], list[int]],
    load_s: float,
    memory: MemoryMeter,
    together: Callable[[Sequence[dict[str, Any]]], list[list[int]]] | None = None,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Translates the samples ``--warm-up`` + ``--passes`` times and writes the report.

    Args:
        translate: returns the number of tokens of the best hypothesis of each sentence, with
            ``</s>`` and, for a language model, with the prompt; or the number of rows of its
            features, with pads. The report counts neither prompts nor pads.
        memory: created before the model was loaded.
        together: as ``translate``, of all samples in one call, which takes its place.
        more: what else the report has, measured after the passes.

    Raises:
        RuntimeError: a hypothesis is not as long as it must be, or longer than it may be.
    """
    case: Case = given.case
    passes, tokens = [], 0
    for _ in range(given.warm_up + given.passes):
        seconds, tokens = [], 0
        found: list[list[int]] = []
        for part in [samples] if together else [[sample] for sample in samples]:
            began = time.perf_counter()
            found += together(part) if together else [translate(part[0])]
            seconds.append(time.perf_counter() - began)
        for sample, lengths in zip(samples, found, strict=True):
            length = wanted(case, sample)
            if max(lengths) > length or (not case.is_trained and min(lengths) < length):
                raise RuntimeError(f"results of {sorted(set(lengths))} tokens, not {length}")
            unseen = case.prompt * len(lengths)
            tokens += sum(lengths) - unseen if case.beam else sample["ntokens"]
        passes.append(seconds)
    report = {
        "load_s": load_s,
        "first_s": sum(passes[0]),
        "batch_s": passes[given.warm_up :],
        "sentences": sum(sample["nsentences"] for sample in samples),
        "tokens": tokens,
        "peak_gib": memory.peak() / 2**30,
        **more(),
    }
    given.report.write_text(json.dumps(report) + "\n", encoding="utf-8")
