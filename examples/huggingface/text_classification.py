"""Classes of texts: does the word 7 come in a sentence?"""

from __future__ import annotations

import random
from collections.abc import Sequence

from transformers import AutoModelForSequenceClassification, RobertaConfig

from examples.huggingface.common import Padding, arguments, training_arguments
from lightseq_fairseq.huggingface import Trainer  # this line in place of: from transformers ...

PAD = 1


def sentences(count: int, words: int) -> list[dict[str, object]]:
    source, made = random.Random(1), []
    for _ in range(count):
        ids = [source.randrange(5, words) for _ in range(source.randint(6, 24))]
        if source.random() < 0.5:
            ids[source.randrange(len(ids))] = 7
        made.append({"input_ids": ids, "labels": int(7 in ids)})
    return made


def main(given: Sequence[str] | None = None) -> Trainer:
    args = arguments(__doc__, given, steps=200)
    if args.model is None:
        config = RobertaConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=128, max_position_embeddings=64, pad_token_id=PAD,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(args.model)
    data = sentences(2200, 64)
    trainer = Trainer(
        model, training_arguments(args), train_dataset=data[200:], eval_dataset=data[:200],
        data_collator=Padding(input_ids=PAD), compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    print(trainer.evaluate())
    return trainer


def accuracy(found: object) -> dict[str, float]:
    logits, labels = found  # type: ignore[misc]
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


if __name__ == "__main__":
    main()
