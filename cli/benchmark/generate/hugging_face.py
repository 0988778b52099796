"""GPT-2 of Hugging Face transformers on the prompts of the other systems.

    python -m lightseq_fairseq.cli.benchmark.generate.hugging_face (options of ``decode``)

Random weights of the same sizes, a static cache, and on a GPU a compiled forward pass as a CUDA
graph, which is the fastest that the library offers for one model on one GPU.
"""

from __future__ import annotations

import json
import time
from typing import Any

from lightseq_fairseq.cli.benchmark.generate import stopwatch
from lightseq_fairseq.cli.benchmark.generate.cases import PRECISIONS, positions
from lightseq_fairseq.cli.benchmark.generate.test_set import vocabulary
from lightseq_fairseq.cli.benchmark.memory import MemoryMeter
from lightseq_fairseq.cli.benchmark.train.corpus import EOS


def main() -> None:
    given = stopwatch.arguments(__doc__)
    import torch
    import transformers

    case, gpu = given.case, not given.cpu
    shape, words = case.shape, vocabulary(given.data)
    memory, began = MemoryMeter(gpu), time.perf_counter()
    config = transformers.GPT2Config(
        vocab_size=words, n_positions=positions(shape), n_embd=shape.width,
        n_layer=shape.decoder_layers, n_head=shape.heads, n_inner=shape.ffn,
        activation_function=shape.activation, tie_word_embeddings=shape.tied, bos_token_id=EOS,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).to(getattr(torch, PRECISIONS[case.precision]))
    model = model.eval().to("cuda" if gpu else "cpu")
    options: dict[str, Any] = {
        "max_new_tokens": case.new, "do_sample": False, "pad_token_id": EOS, "use_cache": True,
        "cache_implementation": "static",
    }  # fmt: skip
    if gpu:
        options["compile_config"] = transformers.CompileConfig(
            mode="reduce-overhead", fullgraph=True
        )
    load_s = time.perf_counter() - began

    @torch.no_grad()
    def translate(sample: dict[str, Any]) -> list[int]:
        tokens = sample["tokens"].to(model.device)
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options).cpu()
        return [found.shape[1] - 1] * len(found)  # without the first token

    samples = []
    for prompts in stopwatch.prompts(case, given.sentences, words):
        first = prompts.new_full((len(prompts), 1), EOS)
        samples.append({"tokens": torch.cat((first, prompts), 1), "nsentences": len(prompts)})
    try:
        translate(samples[0])
    except (RuntimeError, ValueError, TypeError) as error:  # a version that cannot do this
        reason = " ".join(str(error).split())
        given.report.write_text(json.dumps({"unable": reason}) + "\n", encoding="utf-8")
        return
    stopwatch.measure(given, samples, translate, load_s, memory)


if __name__ == "__main__":
    main()
