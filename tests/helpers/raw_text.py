"""Raw text of two invented languages, tokenizers trained on it, and a folder shaped like NLLB's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import helpers.hugging_face as hugging_face
import pytest
import torch

transformers = hugging_face.transformers
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

LANGUAGES = ["eng_Latn", "spa_Latn", "zul_Latn"]
SPLITS = {"train": 60, "valid": 8, "test": 8}
_PARTS = ("ba", "ko", "mi", "ru", "te", "lo", "ná", "shi")


def sentences(count: int, seed: int) -> list[str]:
    """Sentences with capitals, full stops and spaces that only a tokenizer removes."""
    source = random.Random(seed)

    def word() -> str:
        return "".join(source.choices(_PARTS, k=source.randint(1, 4)))

    return [
        " ".join(word() for _ in range(source.randint(2, 6))).capitalize() + "."
        for _ in range(count)
    ]


def write(folder: Path, source: str, target: str) -> Path:
    """Writes train, valid and test of both languages; the target is the source's words reversed."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate(SPLITS.items()):
        lines = sentences(count, seed)
        back = [" ".join(line.rstrip(".").split()[::-1]) + "!" for line in lines]
        for language, text in ((source, lines), (target, back)):
            path = folder / f"{split}.{language}"
            path.write_text("".join(f"{each}\n" for each in text), encoding="utf-8")
    return folder


def nllb(folder: Path, languages: list[str] = LANGUAGES, more: str = "QXZ") -> Any:
    """A small NLLB with random weights and a tokenizer of merges; returns its model.

    more: characters that no text has.
    """
    trained = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=150, special_tokens=list(hugging_face.SPECIAL), show_progress=False
    )
    trained.train_from_iterator([*sentences(80, 9), f"{more} {more}{more} {more}{more} !"], trainer)
    import json

    model = json.loads(trained.to_str())["model"]
    made = transformers.NllbTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        extra_special_tokens=languages,
    )
    made.save_pretrained(folder)
    torch.manual_seed(4)
    config = transformers.M2M100Config(
        vocab_size=len(made), **{**hugging_face._PAIR, "max_position_embeddings": 64},
        decoder_start_token_id=2, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    found = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    found.tie_weights()
    found.save_pretrained(folder)
    return found
