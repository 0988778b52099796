"""Translation by a Marian model: numbers into words, or the text of a folder (--data)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, MarianConfig, Seq2SeqTrainingArguments

from examples.huggingface.common import Padding, arguments, settings
from lightseq_fairseq.huggingface import Seq2SeqTrainer  # this line in place of: from transformers

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PAD, EOS, FIRST = 0, 1, 3  # 2 is a word that is not in the vocabulary


def numbers(count: int) -> list[tuple[list[str], list[str]]]:
    source = random.Random(1)
    digits = (
        [str(source.randrange(10)) for _ in range(source.randint(3, 9))] for _ in range(count)
    )
    return [(each, [NAMES[int(digit)] for digit in each]) for each in digits]


def texts(folder: Path) -> list[tuple[list[str], list[str]]]:
    """The pairs of train.de and train.en."""
    sides = [(folder / f"train.{name}").read_text().splitlines() for name in ("de", "en")]
    return [(german.split(), english.split()) for german, english in zip(*sides, strict=True)]


def main(given: Sequence[str] | None = None) -> Seq2SeqTrainer:
    args = arguments(__doc__, given, steps=500)
    pairs = numbers(3000) if args.data is None else texts(Path(args.data))
    counts = Counter(word for pair in pairs for side in pair for word in side)
    words = {word: n for n, (word, _) in enumerate(counts.most_common(8000), FIRST)}
    data = [
        {"input_ids": [*(words.get(w, 2) for w in source), EOS],
         "labels": [*(words.get(w, 2) for w in target), EOS]}
        for source, target in pairs
    ]  # fmt: skip
    width = 64 if args.data is None else 512
    if args.model is None:
        config = MarianConfig(
            vocab_size=FIRST + len(words), d_model=width, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=width // 32, decoder_attention_heads=width // 32,
            encoder_ffn_dim=2 * width, decoder_ffn_dim=2 * width, max_position_embeddings=128,
            pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD, forced_eos_token_id=EOS,
            activation_function="swish", scale_embedding=True, bos_token_id=None,
        )  # fmt: skip
        model = AutoModelForSeq2SeqLM.from_config(config)
    else:
        model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    trainer = Seq2SeqTrainer(
        model, Seq2SeqTrainingArguments(**settings(args, 3e-3)), train_dataset=data[8:],
        data_collator=Padding(input_ids=PAD, labels=-100),
    )  # fmt: skip
    trainer.train()
    names = {n: word for word, n in words.items()}
    model.eval()  # without dropout
    for (source, _), item in zip(pairs[:3], data[:3], strict=True):
        ids = torch.tensor([item["input_ids"]], device=model.device)
        found = model.generate(input_ids=ids, num_beams=4, max_length=40)[0].tolist()
        print(" ".join(source), "->", " ".join(names[n] for n in found if n in names))
    return trainer


if __name__ == "__main__":
    main()
