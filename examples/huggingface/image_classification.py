"""Classes of images: in which quarter is the bright spot?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForImageClassification, ViTConfig

from examples.huggingface.common import arguments, training_arguments
from lightseq_fairseq.huggingface import Trainer  # this line in place of: from transformers ...

SIZE = 32


def images(count: int) -> list[dict[str, object]]:
    generator, made = torch.Generator().manual_seed(1), []
    for _ in range(count):
        image = torch.randn(3, SIZE, SIZE, generator=generator)
        top, left = torch.randint(SIZE - 4, (2,), generator=generator).tolist()
        image[:, top : top + 4, left : left + 4] += 3.0
        label = 2 * (top + 2 >= SIZE // 2) + (left + 2 >= SIZE // 2)
        made.append({"pixel_values": image, "labels": label})
    return made


def main(given: Sequence[str] | None = None) -> Trainer:
    args = arguments(__doc__, given, steps=300)
    if args.model is None:
        config = ViTConfig(
            image_size=SIZE, patch_size=8, hidden_size=64, num_hidden_layers=2,
            num_attention_heads=4, intermediate_size=128, num_labels=4,
        )  # fmt: skip
        model = AutoModelForImageClassification.from_config(config)
    else:
        model = AutoModelForImageClassification.from_pretrained(args.model)
    trainer = Trainer(model, training_arguments(args), train_dataset=images(1000))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
