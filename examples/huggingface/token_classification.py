"""Classes of tokens: is a word greater than the one before it?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from transformers import AutoModelForTokenClassification, BertConfig

from examples.huggingface.common import Padding, arguments, training_arguments
from lightseq_fairseq.huggingface import Trainer  # this line in place of: from transformers ...


def sentences(count: int, words: int) -> list[dict[str, object]]:
    source, made = random.Random(1), []
    for _ in range(count):
        ids = [source.randrange(1, words) for _ in range(source.randint(6, 24))]
        labels = [0, *(int(b > a) for a, b in itertools.pairwise(ids))]
        made.append({"input_ids": ids, "labels": labels})
    return made


def main(given: Sequence[str] | None = None) -> Trainer:
    args = arguments(__doc__, given, steps=400)
    if args.model is None:
        config = BertConfig(
            vocab_size=24, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=64,
        )  # fmt: skip
        model = AutoModelForTokenClassification.from_config(config)
    else:
        model = AutoModelForTokenClassification.from_pretrained(args.model)
    trainer = Trainer(
        model, training_arguments(args), train_dataset=sentences(2000, 24),
        data_collator=Padding(input_ids=0, labels=-100),
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
