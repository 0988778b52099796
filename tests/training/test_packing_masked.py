"""Packed batches of text with masked tokens hold what fairseq's task makes."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

from fairseq.data import Dictionary, EpochBatchIterator, LRUCacheDataset, indexed_dataset  # noqa: E402
from fairseq.data.encoders import register_bpe  # noqa: E402
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask  # noqa: E402
from fairseq.tasks.multilingual_masked_lm import MultiLingualMaskedLMTask  # noqa: E402

from lightseq_fairseq.base.errors import UserError  # noqa: E402
from lightseq_fairseq.memory.packing import Granularity, PackedBatch, Segments  # noqa: E402
from lightseq_fairseq.training.batch import covers, nested, packing  # noqa: E402

WORDS = 60
BLOCK = 24
BATCH = [3, 0, 7, 22]


@register_bpe("marked")
class Marked:
    """Subwords whose words begin with w."""

    def __init__(self, _: Any) -> None:
        pass

    def is_beginning_of_word(self, token: str) -> bool:
        return token.startswith("w")


def dictionary() -> Dictionary:
    """Words that differ in frequency; every third continues the word before it."""
    found = Dictionary()
    for word in range(WORDS):
        found.add_symbol(("+" if word % 3 == 0 else "w") + str(word), n=1 + word * word)
    return found


def write(path: Path, count: int = 150, seed: int = 1, pads: bool = False) -> Path:
    """Binarised sentences of 1 to 29 tokens, with an empty line between documents."""
    path.parent.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", vocab_size=WORDS + 4)
    for i in range(count):
        words = rng.integers(4, WORDS + 4, 0 if i % 19 == 18 else rng.integers(1, 30))
        if pads:
            words[rng.random(len(words)) < 0.2] = 1
        builder.add_item(torch.tensor([*words, 2]))
    builder.finalize(f"{path}.idx")
    dictionary().save(str(path.parent / "dict.txt"))
    return path


def dataset(folder: Path, split: str = "train", epoch: int = 1, **options: Any) -> Any:
    """What fairseq's task ``masked_lm`` loads."""
    config = OmegaConf.create({"bpe": {"_name": "marked"}})
    settings = MaskedLMConfig(data=str(folder), tokens_per_sample=BLOCK, **{"seed": 1, **options})
    config.task = OmegaConf.structured(settings)
    task = MaskedLMTask.setup_task(config.task)
    task.load_dataset(split, epoch=epoch, combine=True)
    return task.datasets[split]


def same(batch: PackedBatch, sample: dict[str, Any], pad: int = 1) -> None:
    """Asserts that a packed batch has the tokens and labels of a batch of fairseq's."""
    tokens, labels = sample["net_input"]["src_tokens"], sample["target"]
    segments = Segments.from_mask(tokens.ne(pad))
    streams = batch.open()
    source, masked = streams["source"], streams["masked"]
    count = len(segments.positions)
    assert batch.count("source") == count and batch.count("masked") == int(labels.ne(pad).sum())
    assert torch.equal(source["tokens"][:count], segments.pack(tokens))
    assert torch.equal(source.segments.positions[:count], segments.positions)
    sentences = len(tokens) + 1
    assert torch.equal(source.segments.cu_seqlens[:sentences], segments.cu_seqlens)
    packed_labels = segments.pack(labels)
    rows = packed_labels.ne(pad).nonzero().squeeze(1)
    count = len(rows)
    assert torch.equal(masked["rows"][:count], rows)
    assert torch.equal(masked["labels"][:count], packed_labels[rows])
    assert not masked["rows"][count:].any() and masked["labels"][count:].eq(pad).all()
    counts = labels.ne(pad).sum(1).tolist()
    assert masked.segments.cu_seqlens.diff().tolist()[: len(counts)] == counts
    assert (batch.nsentences, batch.ntokens) == (sample["nsentences"], int(sample["ntokens"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "target tokens": {"include_target_tokens": True},
    "seed": {"seed": 12345},
    "half": {"mask_prob": 0.5},
    "no random": {"random_token_prob": 0.0},
    "no unmasked": {"leave_unmasked_prob": 0.0},
    "mask alone": {"random_token_prob": 0.0, "leave_unmasked_prob": 0.0},
    "all random": {"random_token_prob": 1.0, "leave_unmasked_prob": 0.0},
    "frequencies": {"freq_weighted_replacement": True, "random_token_prob": 0.6},
    "words": {"mask_whole_words": True},
    "random words": {
        "mask_whole_words": True, "random_token_prob": 0.5, "leave_unmasked_prob": 0.3,
        "freq_weighted_replacement": True, "mask_prob": 0.4,
    },
    "spans": {"mask_multiple_length": 3},
    "ragged spans": {"mask_multiple_length": 3, "mask_stdev": 2.0, "mask_prob": 0.4},
    "word spans": {"mask_multiple_length": 2, "mask_stdev": 1.0, "mask_whole_words": True},
    "truncated": {"shorten_method": "truncate", "sample_break_mode": "eos"},
    "cropped": {"shorten_method": "random_crop", "sample_break_mode": "eos"},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_masks_are_fairseqs(tmp_path: Path, options: dict[str, Any]) -> None:
    data = dataset(write(tmp_path / "data" / "train").parent, **options)
    assert covers(data) is None
    packed = packing(data, Granularity(16))
    order = data.ordered_indices()
    for epoch in (1, 2, 17):
        packed.set_epoch(epoch)
        for indices in np.array_split(order, 5):
            same(packed.__getitems__(indices), data.collater([data[i] for i in indices]))


@pytest.mark.parametrize("breaks", ["none", "complete", "complete_doc", "eos"])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_are_fairseqs(tmp_path: Path, breaks: str, pads: bool, parts: int) -> None:
    folder = tmp_path / "data"
    for part in range(parts):
        write(folder / f"train{part or ''}", 40 + part, seed=part, pads=pads)
    data = dataset(folder, sample_break_mode=breaks)
    indices = np.random.RandomState(3).permutation(len(data))
    assert covers(data) is None
    same(packing(data).__getitems__(indices), data.collater([data[i] for i in indices]))


def test_items_and_files_give_the_same_block(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "data" / "train").parent)
    packed = packing(data, Granularity(16))
    expected = packed.__getitems__(BATCH)
    assert torch.equal(packed.collater([data[i] for i in BATCH]).block, expected.block)
    assert packed.collater(expected) is expected
    copied = pickle.loads(pickle.dumps(packed))
    assert torch.equal(copied.__getitems__(BATCH).block, expected.block)
    assert len(packed.__getitems__([])) == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_other_masks(tmp_path: Path, workers: int) -> None:
    data = dataset(write(tmp_path / "data" / "train").parent)
    batches = np.array_split(data.ordered_indices(), 4)
    iterator = EpochBatchIterator(data, data.collater, batches, num_workers=workers)
    iterator.dataset = packing(data)
    iterator.collate_fn = iterator.dataset.collater
    seen = []
    for epoch in (1, 2):
        found = list(iterator.next_epoch_itr(shuffle=False))
        assert iterator.epoch == epoch and len(found) == 4
        for batch, indices in zip(found, batches, strict=True):
            data.set_epoch(epoch)
            assert torch.equal(batch.block, packing(data).__getitems__(indices).block)
        seen.append(found[0])
    first, second = (batch.open()["source"]["tokens"] for batch in seen)
    assert len(first) == len(second) and not torch.equal(first, second)


def test_an_item_that_fairseq_has_cached_is_masked_again_in_the_next_epoch(tmp_path: Path) -> None:
    folder = write(tmp_path / "data" / "train").parent
    data, fresh = dataset(folder), dataset(folder)
    first, second, expected = (
        (each.set_epoch(epoch), each[5]["net_input.src_tokens"])[1]
        for each, epoch in ((data, 1), (data, 2), (fresh, 2))
    )
    assert torch.equal(second, expected) and not torch.equal(second, first)


def test_randomness_of_others_stays(tmp_path: Path) -> None:
    packed = packing(dataset(write(tmp_path / "data" / "train").parent))
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    packed.__getitems__(BATCH)
    assert np.random.rand() == expected


def test_batch_without_masked_tokens(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "data" / "train").parent, mask_prob=1e-9)
    for rows, packed in ((1, packing(data)), (8, packing(data, Granularity(8)))):
        batch = packed.__getitems__(BATCH)
        same(batch, data.collater([data[i] for i in BATCH]))
        assert batch.count("masked") == 0 and batch.bucket.rows[1] == rows


def test_rows_of_masked_tokens_are_rounded_by_their_share(tmp_path: Path) -> None:
    fine, coarse = Granularity(64, 1024), Granularity(1024, 24576)
    assert fine.of_part(0.15) == Granularity(64, 153)
    assert coarse.of_part(0.15) == Granularity(192, 3686)
    assert Granularity().of_part(0.15) == Granularity()
    data = dataset(write(tmp_path / "data" / "train").parent)
    batch = packing(data, Granularity(128)).__getitems__(range(20))
    assert batch.bucket.rows == (512, 128) and 64 < batch.count("masked") < 128
    same(batch, data.collater([data[i] for i in range(20)]))


def test_mask_in_the_data_is_refused(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "data" / "train").parent)
    packed = packing(data)
    packed.__getitems__(BATCH)
    text = data.dataset.defn["target"].dataset.dataset
    for noise in (text, data.dataset.defn["net_input.src_tokens"].dataset.dataset):
        noise.mask_idx = 7
    with pytest.raises(UserError, match="contain the token <mask>"):
        packed.__getitems__(BATCH)


def test_what_is_not_covered(tmp_path: Path) -> None:
    folder = write(tmp_path / "data" / "train").parent
    data = dataset(folder)
    data.dataset.defn["net_input.other"] = data.dataset.defn["target"]
    assert covers(data) == "batches also have net_input.other"
    data = dataset(folder)
    data.dataset.defn["target"].dataset.dataset.seed = 300
    assert covers(data) == "the labels are not the masked tokens"
    assert covers(data.dataset.defn["target"]) == "the dataset is of type RightPadDataset"
    data = dataset(folder, mask_whole_words=True)
    noises = [data.dataset.defn[x].dataset.dataset for x in ("net_input.src_tokens", "target")]
    blocks = LRUCacheDataset(noises[0].dataset.dataset.dataset)
    for noise in noises:
        noise.dataset = blocks
    assert covers(data) == "no token is set before the blocks"


def test_no_bpe_masks_tokens(tmp_path: Path) -> None:
    """As fairseq's tasks do that have args: without --bpe there are no whole words."""
    folder = write(tmp_path / "data" / "train").parent
    config = OmegaConf.create({"bpe": None})
    settings = MaskedLMConfig(data=str(folder), mask_whole_words=True, seed=1)
    config.task = OmegaConf.structured(settings)
    task = MaskedLMTask.setup_task(config.task)
    task.load_dataset("train")
    noise = task.datasets["train"].dataset.defn["target"].dataset.dataset
    assert noise.mask_whole_words is None


def several(folder: Path, split: str = "train") -> Any:
    """What fairseq's task ``multilingual_masked_lm`` loads of two languages."""
    parser = argparse.ArgumentParser()
    MultiLingualMaskedLMTask.add_args(parser)
    words = [str(folder), "--tokens-per-sample", str(BLOCK), "--multilang-sampling-alpha", "0.5"]
    args = parser.parse_args(words)
    for name, value in (
        ("seed", 3), ("dataset_impl", None), ("train_subset", "train"), ("valid_subset", "valid")
    ):  # fmt: skip
        setattr(args, name, value)
    task = MultiLingualMaskedLMTask.setup_task(args)
    task.load_dataset(split)
    return task.datasets[split]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_several_corpora(tmp_path: Path, split: str) -> None:
    for language, count in (("aa", 150), ("bb", 40)):
        write(tmp_path / language / split, count, seed=count)
    dictionary().save(str(tmp_path / "dict.txt"))
    data = several(tmp_path, split)
    assert covers(data) is None
    packed = packing(data, Granularity(16))
    indices = [set(nested.places(data, np.arange(len(data)))[0])]
    assert indices == [{0, 1}]
    for epoch in (1, 2):
        data.set_epoch(epoch)
        for batch in np.array_split(data.ordered_indices(), 5):
            same(packed.__getitems__(batch), data.collater([data[i] for i in batch]))
