"""Packed batches of sentences with classes or numbers hold what fairseq's task makes."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

from fairseq.data import Dictionary, indexed_dataset  # noqa: E402
from fairseq.tasks.sentence_prediction import (  # noqa: E402
    SentencePredictionConfig,
    SentencePredictionTask,
)
from fairseq.tasks.sentence_ranking import SentenceRankingTask  # noqa: E402

from lightseq_fairseq.memory.packing import Granularity, PackedBatch, Segments  # noqa: E402
from lightseq_fairseq.training.batch import covers, packing  # noqa: E402

PAD, EOS = 1, 2
WORDS, LABELS, COUNT = 40, 3, 50
BATCH = [7, 3, 30, 12, 3, 0, 49]


def write(folder: Path, name: str, sentences: list[list[int]]) -> None:
    """The sentences as the split train of ``name``, with a dictionary."""
    (folder / name).mkdir(parents=True)
    builder = indexed_dataset.make_builder(f"{folder / name}/train.bin", "mmap", vocab_size=99)
    for words in sentences:
        builder.add_item(torch.tensor(words))
    builder.finalize(f"{folder / name}/train.idx")
    dictionary = Dictionary()
    for word in range(LABELS if name == "label" else WORDS):
        dictionary.add_symbol(f"w{word}")
    dictionary.save(str(folder / name / "dict.txt"))


def corpus(folder: Path, inputs: int = 2, pads: bool = False, numbers: int = 0) -> Path:
    """Sentences of 1 to 14 words, and a class or so many numbers for each."""
    rng = np.random.default_rng(3)
    for name in (f"input{i}" for i in range(inputs)):
        sentences = [rng.integers(4, WORDS + 4, rng.integers(1, 15)) for _ in range(COUNT)]
        if pads:
            for words in sentences:
                words[1:][rng.random(len(words) - 1) < 0.3] = PAD
        write(folder, name, [[*words, EOS] for words in sentences])
    if numbers:
        lines = (" ".join(map(repr, x)) for x in rng.normal(size=(COUNT, numbers)).tolist())
        (folder / "label").mkdir()
        (folder / "label" / "train.label").write_text("\n".join(lines) + "\n")
    else:
        write(folder, "label", [[4 + int(c), EOS] for c in rng.integers(0, LABELS, COUNT)])
    return folder


def dataset(folder: Path, **options: Any) -> Any:
    """What fairseq's task ``sentence_prediction`` loads."""
    given = {"num_classes": LABELS, "regression_target": False, "seed": 1, **options}
    config = SentencePredictionConfig(
        data=str(folder), classification_head_name="sentence_classification_head", **given
    )
    task = SentencePredictionTask.setup_task(OmegaConf.structured(config))
    return task.load_dataset("train", combine=True)


def same(batch: PackedBatch, sample: dict[str, Any]) -> None:
    """Asserts that a packed batch has the sentences and labels of a batch of fairseq's."""
    tokens, target = sample["net_input"]["src_tokens"], sample["target"]
    segments = Segments.from_mask(tokens.ne(PAD))
    source, labels = batch.open().values()
    rows, sentences = len(segments.positions), len(tokens)
    assert batch.count("source") == rows and batch.count("target") == target.numel()
    assert torch.equal(source["tokens"][:rows], segments.pack(tokens))
    assert torch.equal(source.segments.positions[:rows], segments.positions)
    assert torch.equal(source.segments.cu_seqlens[: sentences + 1], segments.cu_seqlens)
    each = target.numel() // sentences
    assert labels.segments.cu_seqlens.tolist()[: sentences + 1] == [
        each * i for i in range(sentences + 1)
    ]
    found, count = labels["labels"], target.numel()
    if target.dtype == torch.float32:
        assert torch.equal(found.view(torch.float64)[:count], target.flatten().double())
    else:
        assert torch.equal(found[:count], target.flatten())
        assert found[count:].eq(-100).all()
    assert (batch.nsentences, batch.ntokens) == (sample["nsentences"], int(sample["ntokens"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "previous tokens": {"add_prev_output_tokens": True},
    "first token": {"init_token": 0},
    "separator": {"init_token": 0, "separator_token": 2},
    "unshuffled": {"no_shuffle": True},
    "truncated": {"init_token": 0, "shorten_method": "truncate", "max_positions": 9},
    "cropped": {"shorten_method": "random_crop", "max_positions": 9},
}


@pytest.mark.parametrize("numbers", [0, 1, 3])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sentences_and_labels_are_fairseqs(
    tmp_path: Path, options: dict[str, Any], inputs: int, pads: bool, numbers: int
) -> None:
    if numbers:
        options = {**options, "regression_target": True, "num_classes": numbers}
    data = dataset(corpus(tmp_path / "data", inputs, pads, numbers), **options)
    assert covers(data) is None
    sample = data.collater([data[i] for i in BATCH])
    for granularity in (None, Granularity(16)):
        packed = packing(data, granularity)
        batch = packed.__getitems__(BATCH)
        same(batch, sample)
        assert torch.equal(packed.collater([data[i] for i in BATCH]).block, batch.block)
        assert packed.collater(batch) is batch
        assert torch.equal(
            pickle.loads(pickle.dumps(packed)).__getitems__(BATCH).block, batch.block
        )
        assert len(packed.__getitems__([])) == 0
    assert batch.bucket.rows[1] == (len(BATCH) * max(numbers, 1) + 15) // 16 * 16


def test_what_is_not_covered(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "data")
    data = dataset(folder)
    data.dataset.defn["net_input.other"] = data.dataset.defn["target"]
    assert covers(data) == "batches also have net_input.other"
    for file in (folder / "label").glob("train.*"):
        file.unlink()
    assert covers(dataset(folder)) == "the data have no labels"


def test_rankings_are_not_covered(tmp_path: Path) -> None:
    folder = corpus(tmp_path / "data", inputs=3)
    (folder / "label" / "train.label").write_text("0\n1\n" * (COUNT // 2))
    settings = Namespace(
        criterion="sentence_ranking", data=str(folder), dataset_impl=None, num_classes=2,
        init_token=0, separator_token=None, no_shuffle=False, shorten_method="none",
        shorten_data_split_list="", max_option_length=None, max_positions=512, seed=1,
    )  # fmt: skip
    data = SentenceRankingTask.setup_task(settings).load_dataset("train")
    assert covers(data) == "items have several inputs"
