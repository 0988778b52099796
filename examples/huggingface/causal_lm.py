"""A language model: continue 5 6 7 with 8 9 10."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from examples.huggingface.common import Padding, arguments, training_arguments
from lightseq_fairseq.huggingface import Trainer  # this line in place of: from transformers ...

WORDS = 64


def texts(count: int) -> list[dict[str, object]]:
    source, made = random.Random(1), []
    for _ in range(count):
        begin, step = source.randrange(1, 20), source.randint(1, 2)
        ids = list(range(begin, begin + step * source.randint(8, 20), step))
        made.append({"input_ids": ids, "labels": ids})
    return made


def main(given: Sequence[str] | None = None) -> Trainer:
    args = arguments(__doc__, given, steps=300)
    if args.model is None:
        config = GPT2Config(
            vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0,
            eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    trainer = Trainer(
        model, training_arguments(args), train_dataset=texts(2000),
        data_collator=Padding(input_ids=0, labels=-100),
    )  # fmt: skip
    trainer.train()
    model.eval()  # without dropout
    prompt = torch.tensor([[5, 6, 7]], device=model.device)
    mask = torch.ones_like(prompt)
    print(
        model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)[0].tolist()
    )
    return trainer


if __name__ == "__main__":
    main()
