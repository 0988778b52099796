"""Models of Hugging Face transformers on the prompts or sentences of the other systems.

    python -m lightseq_fairseq.cli.benchmark.generate.hugging_face (options of ``decode``)

Random weights of the same sizes, and on a GPU a compiled forward pass as CUDA graphs, which is the
fastest that the library offers for one model on one GPU. GPT-2 continues prompts, and BART drawn
texts, greedily with a static cache; RoBERTa computes features. BART and NLLB search with the
library's beam search, which is not compiled, on the batches of fairseq-generate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.cli.benchmark.generate import stopwatch
from lightseq_fairseq.cli.benchmark.generate.cases import PRECISIONS, positions
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter
from lightseq_fairseq.cli.benchmark.train.corpus import EOS
from lightseq_fairseq.cli.benchmark.train.hugging_face import config, pair_config
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD

Samples = list[dict[str, Any]]
Run = Callable[[dict[str, Any]], list[int]]


def main() -> None:
    given = stopwatch.arguments(__doc__)
    memory, began = MemoryMeter(gpu=not given.cpu), time.perf_counter()
    torch.manual_seed(0)
    if given.case.prompt:
        run, samples = _continuing(given), _prompts(given)
    elif given.case.beam:
        run, samples = _translating(given), stopwatch.task_batches(given)[1]
    else:
        run, samples = _encoding(given), _sentences(given)
    with stopwatch.or_unable(given):
        run(samples[0])
    load_s = time.perf_counter() - began
    stopwatch.measure(given, samples, run, load_s, memory)


def _placed(model: Any, given: argparse.Namespace) -> Any:
    """The model in the case's precision on the device, for evaluation."""
    dtype = getattr(torch, PRECISIONS[given.case.precision])
    return model.eval().to("cpu" if given.cpu else "cuda", dtype)


def _static(given: argparse.Namespace) -> dict[str, Any]:
    """Options of greedy search: a static cache, and on a GPU compiled steps as CUDA graphs."""
    options: dict[str, Any] = {"cache_implementation": "static"}
    if not given.cpu:
        options["compile_config"] = transformers.CompileConfig(
            mode="reduce-overhead", fullgraph=True
        )
    return options


def _continuing(given: argparse.Namespace) -> Run:
    """GPT-2 for `stopwatch.measure`."""
    case, shape = given.case, given.case.shape
    config = transformers.GPT2Config(
        vocab_size=given.data.vocabulary, n_positions=positions(shape), n_embd=shape.width,
        n_layer=shape.decoder_layers, n_head=shape.heads, n_inner=shape.ffn,
        activation_function=shape.activation, tie_word_embeddings=shape.tied, bos_token_id=EOS,
        eos_token_id=None,
    )  # fmt: skip
    model = _placed(transformers.GPT2LMHeadModel(config), given)
    options: dict[str, Any] = {
        "max_new_tokens": case.new, "do_sample": False, "pad_token_id": EOS, "use_cache": True,
        **_static(given),
    }  # fmt: skip

    @torch.no_grad()
    def translate(sample: dict[str, Any]) -> list[int]:
        tokens = sample["tokens"].to(model.device)
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).cpu()
        return [found.shape[1] - 1] * len(found)  # without </s>, the first token

    return translate


def _prompts(given: argparse.Namespace) -> Samples:
    samples = []
    for batch in stopwatch.prompts(given.case, given.sentences, given.data.vocabulary):
        prompts = torch.stack(batch)
        first = prompts.new_full((len(prompts), 1), EOS)
        samples.append({"tokens": torch.cat((first, prompts), 1), "nsentences": len(prompts)})
    return samples


def _translating(given: argparse.Namespace) -> Run:
    """BART or NLLB for `stopwatch.measure`."""
    case, shape = given.case, given.case.shape
    sizes = pair_config(shape, given.data.vocabulary, "sdpa")
    model = getattr(transformers, f"{shape.hugging_face}ForConditionalGeneration")(sizes)
    model = _placed(model, given)
    # No hypothesis ends before its maximum length, as in the other systems. What is None in the
    # options of a call would be that of the model's configuration.
    model.generation_config = transformers.GenerationConfig()
    options: dict[str, Any] = {
        "num_beams": case.beam, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None,
        "decoder_start_token_id": EOS, "use_cache": True, "early_stopping": case.beam > 1,
    }  # fmt: skip
    if case.source:
        options |= _static(given)
    elif shape.is_bart:
        options["length_penalty"] = stopwatch.LENGTH_PENALTY
        options["no_repeat_ngram_size"] = stopwatch.NO_REPEAT

    @torch.no_grad()
    def translate(sample: dict[str, Any]) -> list[int]:
        tokens = sample["net_input"]["src_tokens"].to(model.device)
        if case.source:  # one shape, so one compilation; texts end with </s>
            pads = case.source[1] + 1 - tokens.shape[1]
            tokens = torch.nn.functional.pad(tokens, (pads, 0), value=PAD)
        search = transformers.GenerationConfig(
            max_new_tokens=stopwatch.wanted(case, sample), **options
        )
        mask = tokens.ne(PAD).long()
        found = model.generate(tokens, attention_mask=mask, generation_config=search).cpu()
        return [found.shape[1] - 1] * len(found)  # without the decoder's first token

    return translate


def _encoding(given: argparse.Namespace) -> Run:
    """RoBERTa for `stopwatch.measure`."""
    shape = given.case.shape
    sizes = config(shape, given.data.vocabulary + 1)
    model = _placed(transformers.RobertaModel(sizes, add_pooling_layer=False), given)
    # Lengths differ from batch to batch: one compilation, and a CUDA graph for each shape.
    compiled = model if given.cpu else torch.compile(model, mode="reduce-overhead", dynamic=True)

    @torch.no_grad()
    def encode(sample: dict[str, Any]) -> list[int]:
        tokens = sample["net_input"]["src_tokens"].to(model.device)
        mask = tokens.ne(sizes.pad_token_id).long()
        return stopwatch.rows_of(compiled(tokens, attention_mask=mask).last_hidden_state)

    return encode


def _sentences(given: argparse.Namespace) -> Samples:
    fairseq_compat.prepare()
    from fairseq.data import Dictionary

    words = Dictionary.load(str(given.data.folder / "dict.txt"))
    return stopwatch.sentence_batches(given, words)


if __name__ == "__main__":
    main()
