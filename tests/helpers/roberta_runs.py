"""RoBERTa by the launchers, on a text of letters and on pairs of sentences with labels.

Words are letters, so that the subwords of ``--bpe characters``, which needs no files, are words.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from helpers.cli_runs import succeed

# isort: split
from fairseq.criterions.sentence_prediction import SentencePredictionCriterion

LETTERS = "abcdefghijklmnop"
HEAD = "sentence_classification_head"
# Without dropout, because the masks of ours and of fairseq differ.
SIZE = shlex.split(
    "--encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 "
    "--encoder-attention-heads 2 --max-positions 32 --dropout 0 --attention-dropout 0 "
    "--no-epoch-checkpoints --cpu"
)
MASKED = shlex.split(
    "--task masked_lm --arch ls_roberta_base --tokens-per-sample 24 --max-tokens 96 --lr 5e-3 "
    "--warmup-updates 1 --max-update 3"
)
# As in fairseq's examples/roberta/README.glue.md; it says what to reset.
TUNED = shlex.split(
    "--task sentence_prediction --arch ls_roberta_base --init-token 0 --separator-token 2 "
    "--reset-optimizer --reset-dataloader --reset-meters --lr 5e-3 --warmup-updates 1 "
    "--batch-size 8 --max-epoch 2"
)
BY_ACCURACY = shlex.split(
    "--num-classes 2 --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric"
)
BY_NUMBERS = shlex.split("--num-classes 1 --regression-target")


class Data(NamedTuple):
    """Data folders: running text, pairs of two classes, pairs with a number each."""

    text: Path
    classes: Path
    numbers: Path


def binarise(folder: Path) -> Data:
    rng = random.Random(1)
    folder.mkdir(exist_ok=True)
    data = Data(*(folder / name for name in Data._fields))
    counts = {"train": 40, "valid": 12}
    text = {
        split: [" ".join(rng.choices(LETTERS, k=rng.randint(1, 9))) for _ in range(2 * count)]
        for split, count in counts.items()
    }
    text["train"].append(" ".join(LETTERS))
    _preprocess(data.text, folder / "words", text)
    dictionary = ("--srcdict", data.text / "dict.txt")
    firsts, seconds = (
        {
            split: [" ".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(count)]
            for split, count in counts.items()
        }
        for _ in range(2)
    )
    labels = {s: ["yes" if "a" in x or "b" in x else "no" for x in xs] for s, xs in firsts.items()}
    for place in (data.classes, data.numbers):
        _preprocess(place / "input0", folder / "first", firsts, *dictionary)
        _preprocess(place / "input1", folder / "second", seconds, *dictionary)
    _preprocess(data.classes / "label", folder / "label", labels)
    (data.numbers / "label").mkdir()
    for split, count in counts.items():
        values = "".join(f"{rng.uniform(-1, 1)}\n" for _ in range(count))
        (data.numbers / "label" / f"{split}.label").write_text(values)
    return data


def _preprocess(place: Path, stem: Path, lines: dict[str, list[str]], *words: str | Path) -> None:
    prefixes: list[str | Path] = []
    for split, of_split in lines.items():
        stem.with_suffix(f".{split}").write_text("\n".join(of_split) + "\n")
        prefixes += [f"--{split}pref", stem.with_suffix(f".{split}")]
    succeed("preprocess", "--only-source", "--destdir", place, *prefixes, *words)


@contextmanager
def logged() -> Iterator[list[dict[str, float]]]:
    """What the criterion of classes logs of each update and of each batch of a validation."""
    found: list[dict[str, float]] = []
    original = SentencePredictionCriterion.reduce_metrics

    def reduce_metrics(outputs: list[dict[str, Any]]) -> None:
        found.append({name: float(sum(o[name] for o in outputs)) for name in outputs[0]})
        original(outputs)

    method = staticmethod(reduce_metrics)
    with mock.patch.object(SentencePredictionCriterion, "reduce_metrics", method):
        yield found


def pretrain(data: Data, folder: Path, *words: str) -> Path:
    succeed("train", data.text, *MASKED, *SIZE, "--save-dir", folder, *words)
    return folder / "checkpoint_last.pt"


def tune(data: Path, pretrained: Path, folder: Path, *words: str) -> list[dict[str, float]]:
    """Fine-tunes, and returns what was logged of all updates and validations."""
    start = ("--restore-file", pretrained, "--save-dir", folder)
    with logged() as found:
        succeed("train", data, *TUNED, *SIZE, *start, *words)
    return found


def in_old_form(checkpoint: dict[str, Any], **args: Any) -> dict[str, Any]:
    """A checkpoint as fairseq 0.9 wrote CamemBERT and XLM-R: ``args``, and other names.

    The names: a "decoder", a joined projection of the attention, and a norm of the embedding.
    """
    old: dict[str, Any] = {}
    model = checkpoint["model"]
    for name, value in model.items():
        renamed = name.replace("encoder.", "decoder.", 1).replace(
            ".layernorm_embedding.", ".emb_layer_norm."
        )
        if name.endswith(".version") or ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            renamed = renamed.replace(".q_proj.", ".in_proj_")
            value = torch.cat([model[name.replace("q_proj", f"{p}_proj")] for p in "qkv"])
        old[renamed] = value
    options = vars(checkpoint["cfg"]["model"])
    # What fairseq 0.9 did not know yet.
    new = ("layernorm_embedding", "encoder_normalize_before", "encoder_learned_pos", "_name",
           "no_scale_embedding", "untie_weights_roberta", "spectral_norm_classification_head",
           "max_source_positions", "quant_noise_pq", "quant_noise_scalar")  # fmt: skip
    kept = {name: value for name, value in options.items() if name not in new}
    history = [{**checkpoint["optimizer_history"][-1]}]
    return {
        "args": type(checkpoint["cfg"]["model"])(**{**kept, **args}),
        "model": old,
        "optimizer_history": history,
        "last_optimizer_state": None,
        "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": 1.0},
    }
