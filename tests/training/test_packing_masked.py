"""Packed batches of text with masked tokens hold what fairseq's task makes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

from fairseq.data import Dictionary, EpochBatchIterator, indexed_dataset  # noqa: E402
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask  # noqa: E402

from lightseq_fairseq.errors import UserError  # noqa: E402
from lightseq_fairseq.packing import Granularity, PackedBatch, Segments  # noqa: E402
from lightseq_fairseq.training.batch import PackingMasked, covers, packing  # noqa: E402

WORDS = 60
BLOCK = 24


def dictionary() -> Dictionary:
    """Words that differ in frequency; every third continues the word before it."""
    found = Dictionary()
    for word in range(WORDS):
        found.add_symbol(f"w{word}" + "@@" * (word % 3 == 0), n=1 + word * word)
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
    words = options.pop("mask_whole_words", False)
    config = MaskedLMConfig(data=str(folder), tokens_per_sample=BLOCK, **{"seed": 1, **options})
    config.mask_whole_words = words
    task = MaskedLMTask.setup_task(config)
    if words:
        from argparse import Namespace

        task.args = Namespace(bpe="subword_nmt", bpe_codes="-", bpe_separator="@@")
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
    from_file, from_items = (
        packed.__getitems__([3, 0, 7]),
        packed.collater([data[3], data[0], data[7]]),
    )
    assert torch.equal(from_file.block, from_items.block)
    assert packed.collater(from_file) is from_file
    assert len(packed.__getitems__([])) == 0
    assert torch.equal(
        pickle.loads(pickle.dumps(packed)).__getitems__([3, 0, 7]).block, from_file.block
    )
