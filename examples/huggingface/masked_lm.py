"""Masked words: restore the numbers that are missing in 3 4 _ 6 _ 8."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import AutoModelForMaskedLM, BertConfig

from examples.huggingface.common import Padding, arguments, training_arguments
from lightseq_fairseq.huggingface import Trainer  # this line in place of: from transformers ...

MASK, FIRST, WORDS = 1, 2, 48


def sentences(count: int) -> list[dict[str, object]]:
    source, made = random.Random(1), []
    for _ in range(count):
        begin, length = source.randrange(FIRST, WORDS - 30), source.randint(8, 30)
        ids = list(range(begin, begin + length))
        hidden = [source.random() < 0.15 for _ in ids]
        hidden[source.randrange(length)] = True
        shown = [MASK if is_hidden else word for word, is_hidden in zip(ids, hidden, strict=True)]
        labels = [word if is_hidden else -100 for word, is_hidden in zip(ids, hidden, strict=True)]
        made.append({"input_ids": shown, "labels": labels})
    return made


def main(given: Sequence[str] | None = None) -> Trainer:
    args = arguments(__doc__, given, steps=400)
    if args.model is None:
        config = BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=64,
        )  # fmt: skip
        model = AutoModelForMaskedLM.from_config(config)
    else:
        model = AutoModelForMaskedLM.from_pretrained(args.model)
    trainer = Trainer(
        model, training_arguments(args), train_dataset=sentences(2000),
        data_collator=Padding(input_ids=0, labels=-100),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
