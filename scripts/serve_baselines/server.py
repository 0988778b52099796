"""Serves a model by another engine.

    python -m scripts.serve_baselines.server ctranslate2 FOLDER --beam 4 --dtype bfloat16
    python -m scripts.serve_baselines.server transformers FOLDER --dtype bfloat16

FOLDER is one of CTranslate2, or of transformers, whose encoder gives embeddings. The front end is
that of ``lightseq-serve``; the model's name is ``model``.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn

from lightseq_fairseq.cli.serving.app import application
from lightseq_fairseq.cli.serving.connections import Connection
from lightseq_fairseq.cli.serving.messages import Answer, Bounds, Encoded, Languages, Model
from lightseq_fairseq.generation.texts import Hypothesis

from .batches import Batch, BatchedEngines


def translator(folder: Path, beam: int, dtype: str, device: str) -> Batch:
    """Translations of words with spaces between them, by CTranslate2."""
    import ctranslate2

    model = ctranslate2.Translator(str(folder), device=device, compute_type=dtype)

    def translate(texts: Sequence[str]) -> list[Answer]:
        words = [text.split() for text in texts]
        found = model.translate_batch(words, beam_size=beam, max_decoding_length=200)
        return [
            Answer(
                (Hypothesis(" ".join(each.hypotheses[0]), 0.0, "", (), (), ()),),
                (False,),
                (len(source), len(each.hypotheses[0])),
            )
            for source, each in zip(words, found, strict=True)
        ]

    return translate


def encoder(folder: Path, beam: int, dtype: str, device: str) -> Batch:
    """Means of the features of texts, by transformers, with its fastest attention."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.to(device).eval()

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> list[Encoded]:
        batch = tokenizer([*texts], padding=True, return_tensors="pt")
        mask = batch["attention_mask"]
        features = model(**batch.to(device)).last_hidden_state.float()
        on = batch["attention_mask"][..., None]
        means = ((features * on).sum(1) / on.sum(1)).cpu().numpy()
        lengths = mask.sum(1).tolist()
        return [Encoded(row.tobytes(), (n, 0)) for row, n in zip(means, lengths, strict=True)]

    return encode


_LOADERS = {"ctranslate2": translator, "transformers": encoder}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=_LOADERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    device = "cpu" if given.cpu else "cuda"
    load = functools.partial(_LOADERS[given.engine], given.folder, given.beam, given.dtype, device)
    does, languages = "encodes", None
    if given.engine == "ctranslate2":
        does, languages = "translates", Languages((), (), ("source", "target"))
    served = Model("model", does, languages, False, str(given.folder))
    bounds = Bounds(128, 100_000, 1 << 20, 64, 60.0, 4096, None)
    engines: Any = BatchedEngines(served, load)
    uvicorn.run(
        application(engines, bounds), port=given.port, http=Connection, loop="uvloop",
        log_config=None, access_log=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
