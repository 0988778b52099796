"""Write a folder of Hugging Face `transformers` with an NLLB model of random weights, and captions
in files that are named as its languages.

    python -m examples.multilingual.model RAW FOLDER TEXT [--size cpu|gpu] [--seed N]

RAW has the raw files of Multi30k, such as train.en.gz; languages whose files are missing are left
out. FOLDER becomes the model: config.json, model.safetensors and a tokenizer that is learned from
the captions. TEXT gets a file for each split and language, such as train.eng_Latn.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CODES = {"en": "eng_Latn", "de": "deu_Latn", "fr": "fra_Latn", "cs": "ces_Latn"}
SPLITS = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
# Settings of M2M100Config; those of gpu are NLLB-600M's.
SIZES: dict[str, dict[str, int]] = {
    "cpu": {"layers": 3, "width": 128, "ffn": 256, "heads": 4, "words": 4000, "rows": 0},
    "gpu": {"layers": 12, "width": 1024, "ffn": 4096, "heads": 16, "words": 8000, "rows": 256206},
}


def read(raw: Path) -> dict[str, dict[str, list[str]]]:
    """Language -> split -> captions, of the languages that have all files."""
    found = {}
    for name, code in CODES.items():
        files = {split: raw / f"{file}.{name}.gz" for split, file in SPLITS.items()}
        if all(file.is_file() for file in files.values()):
            found[code] = {
                split: gzip.decompress(file.read_bytes()).decode("utf-8").splitlines()
                for split, file in files.items()
            }
    if len(found) < 2:
        raise SystemExit(
            f"{raw} has the files of {len(found)} languages: it needs those of two, such as "
            "train.en.gz, val.en.gz and test_2016_flickr.en.gz, of task 1 of the multi30k dataset."
        )
    return found


def learn(captions: Sequence[str], words: int, codes: Sequence[str], folder: Path) -> int:
    """Learn NLLB's tokenizer, BPE on words that begin with a block, and save it in ``folder``.

    Returns the number of its words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import NllbTokenizer

    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(
        captions, trainers.BpeTrainer(vocab_size=words, special_tokens=SPECIAL, show_progress=False)
    )
    model = json.loads(learned.to_str())["model"]
    merges: Any = [tuple(merge) for merge in model["merges"]]
    tokenizer = NllbTokenizer(vocab=model["vocab"], merges=merges, extra_special_tokens=[*codes])
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_model(size: dict[str, int], words: int, folder: Path, seed: int) -> None:
    """Write an M2M100 model, NLLB's class, with random weights.

    Their deviation is that of fairseq's embeddings. With that of transformers, 0.02, the words of a
    narrow model are far smaller than the positions that are added to them.
    """
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(seed)
    sides: Any = {
        f"{side}_{name}": size[key]
        for side in ("encoder", "decoder")
        for name, key in (("layers", "layers"), ("ffn_dim", "ffn"), ("attention_heads", "heads"))
    }
    config = M2M100Config(
        d_model=size["width"], vocab_size=max(words, size["rows"]), max_position_embeddings=1024,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, init_std=size["width"] ** -0.5, **sides,
    )  # fmt: skip
    M2M100ForConditionalGeneration(config).save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the model and the text; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    for name in ("raw", "folder", "text"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--size", choices=SIZES, default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    captions = read(args.raw)
    size = SIZES[args.size]
    args.folder.mkdir(parents=True)
    args.text.mkdir(parents=True)
    training = [line for splits in captions.values() for line in splits["train"]]
    words = learn(training, size["words"], list(captions), args.folder)
    write_model(size, words, args.folder, args.seed)
    for code, splits in captions.items():
        for split, lines in splits.items():
            text = "".join(f"{line}\n" for line in lines)
            (args.text / f"{split}.{code}").write_text(text, encoding="utf-8")
    print(f"{', '.join(captions)}: {words} words")


if __name__ == "__main__":
    main()
