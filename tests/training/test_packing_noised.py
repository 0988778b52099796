"""Packed batches of text to noise hold what fairseq's tasks make, with the same noise."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

from fairseq.data import Dictionary, EpochBatchIterator, indexed_dataset  # noqa: E402
from fairseq.tasks.denoising import DenoisingTask  # noqa: E402
from fairseq.tasks.multilingual_denoising import MultilingualDenoisingTask  # noqa: E402

from lightseq_fairseq.memory.packing import Granularity, PackedBatch, Segments  # noqa: E402
from lightseq_fairseq.training.batch import covers, nested, packing  # noqa: E402

WORDS = 60
NOISE = (
    "--mask 0.3 --mask-length span-poisson --poisson-lambda 3 --replace-length 1 --rotate 0.3 "
    "--mask-random 0.3 --permute-sentences 1 --insert 0.1 --tokens-per-sample 24"
)


def write(folder: Path, count: int = 120, seed: int = 1, pads: bool = False) -> Path:
    """Binarised sentences of 1 to 29 tokens, with an empty line between documents."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    dictionary = Dictionary()
    for word in range(WORDS):
        dictionary.add_symbol("13" if word == 0 else f"w{word}")
    dictionary.save(str(folder / "dict.txt"))
    for split in ("train", "valid"):
        builder = indexed_dataset.make_builder(f"{folder}/{split}.bin", "mmap", vocab_size=WORDS)
        for i in range(count):
            words = rng.integers(4, WORDS + 4, 0 if i % 19 == 18 else rng.integers(1, 30))
            words[rng.random(len(words)) < 0.2] = 1 if pads else 4
            builder.add_item(torch.tensor([*words, 2]))
        builder.finalize(f"{folder}/{split}.idx")
    return folder


def loaded(task: Any, folder: Path, split: str = "train", words: str = "", **others: Any) -> Any:
    """What a task loads."""
    parser = argparse.ArgumentParser()
    task.add_args(parser)
    args = parser.parse_args([str(folder), *NOISE.split(), *words.split()])
    settings = {"seed": 3, "dataset_impl": None, "bpe": None, "train_subset": "train",
                "valid_subset": "valid", **others}  # fmt: skip
    found = task.setup_task(argparse.Namespace(**{**vars(args), **settings}))
    found.load_dataset(split, epoch=1)
    assert found.args.valid_subset == "valid"
    return found.datasets[split]


def same(batch: PackedBatch, sample: dict[str, Any], pad: int = 1) -> None:
    """Asserts that a packed batch has the sentences of a batch of fairseq's, which are sorted."""
    streams, order = batch.open(), sample["sort_order"].argsort()
    tokens, previous, labels = (
        x[order]
        for x in (sample["net_input"]["src_tokens"], sample["net_input"]["prev_output_tokens"],
                  sample["target"])
    )  # fmt: skip
    for stream, mask, columns in (
        ("source", tokens.ne(pad), {"tokens": tokens}),
        ("target", previous.ne(pad), {"previous": previous, "labels": labels}),
    ):
        rows, segments = streams[stream], Segments.from_mask(mask)
        count = len(segments.positions)
        assert batch.count(stream) == count
        assert torch.equal(rows.segments.positions[:count], segments.positions)
        for name, padded in columns.items():
            assert torch.equal(rows[name][:count], segments.pack(padded))
            assert rows[name][count:].eq(pad).all()
        assert torch.equal(rows.segments.cu_seqlens[: len(tokens) + 1], segments.cu_seqlens)
    assert (batch.nsentences, batch.ntokens) == (sample["nsentences"], int(sample["ntokens"]))


def check(data: Any, batches: int = 6) -> None:
    assert covers(data) is None
    packed = packing(data, Granularity(16))
    for epoch in (1, 2):
        packed.set_epoch(epoch)
        for indices in np.array_split(data.ordered_indices(), batches):
            same(packed.__getitems__(indices), data.collater([data[i] for i in indices]))


@pytest.mark.parametrize("breaks", ["none", "complete", "complete_doc", "eos"])
@pytest.mark.parametrize("pads", [True, False])
def test_batches_are_fairseqs(tmp_path: Path, breaks: str, pads: bool) -> None:
    data = loaded(DenoisingTask, write(tmp_path, pads=pads), words=f"--sample-break-mode {breaks}")
    check(data)


@pytest.mark.parametrize("method", ["truncate", "random_crop"])
def test_shortened_sentences(tmp_path: Path, method: str) -> None:
    check(loaded(DenoisingTask, write(tmp_path), words=f"--shorten-method {method}"))


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_several_languages(tmp_path: Path, split: str, tokens: bool) -> None:
    """The languages are sampled anew in each epoch; a batch has several of them."""
    for language, count in (("aa", 120), ("bb", 30)):
        write(tmp_path / language, count, seed=count)
    write(tmp_path, 1)
    words = "--multilang-sampling-alpha 0.3" + " --add-lang-token" * tokens
    data = loaded(MultilingualDenoisingTask, tmp_path, split, words)
    assert set(nested.places(data, np.arange(len(data))).corpus) == {0, 1}
    check(data)
    firsts = {int(each["target"][-1]) for each in map(data.__getitem__, range(len(data)))}
    assert firsts == ({WORDS + 4, WORDS + 5} if tokens else {2})


def test_a_text_that_is_drawn_twice_has_other_noise(tmp_path: Path) -> None:
    """As have the texts of two languages with the same number."""
    for language, count in (("aa", 90), ("bb", 10)):
        write(tmp_path / language, count, seed=1)
    write(tmp_path, 1)
    words = "--multilang-sampling-alpha 0.1 --mask-random 0 --insert 0 --rotate 0"
    data = loaded(MultilingualDenoisingTask, tmp_path, words=words)
    places = nested.places(data, np.arange(len(data)))
    twice = [
        [data[i]["source"] for i in np.flatnonzero((places.corpus == 1) & (places.item == item))]
        for item in range(5)
    ]
    assert max(map(len, twice)) > 1
    for sources in twice:
        assert len({tuple(source.tolist()) for source in sources}) == len(sources)
    parts = nested.corpora(data)
    assert not np.array_equal(*(part.noise.of_item(np.arange(4, 44), 1, 5) for part in parts))


def test_items_and_files_give_the_same_block(tmp_path: Path) -> None:
    data = loaded(DenoisingTask, write(tmp_path))
    packed = packing(data, Granularity(16))
    batch = [3, 0, 7, 22]
    expected = packed.__getitems__(batch)
    assert torch.equal(packed.collater([data[i] for i in batch]).block, expected.block)
    assert packed.collater(expected) is expected
    copied = pickle.loads(pickle.dumps(packed))
    assert torch.equal(copied.__getitems__(batch).block, expected.block)
    assert len(packed.__getitems__([])) == 0


def test_noise_is_the_same_with_any_number_of_workers(tmp_path: Path) -> None:
    """And other noise in each epoch."""
    data = loaded(DenoisingTask, write(tmp_path))
    batches = np.array_split(data.ordered_indices(), 4)
    found = []
    for workers in (0, 1, 4):
        iterator = EpochBatchIterator(data, data.collater, batches, num_workers=workers)
        iterator.dataset = packing(data)
        iterator.collate_fn = iterator.dataset.collater
        epochs = [list(iterator.next_epoch_itr(shuffle=False)) for _ in range(2)]
        found.append([batch.block.tolist() for epoch in epochs for batch in epoch])
    assert found[0] == found[1] == found[2]
    assert all(one != two for one, two in zip(found[0][:4], found[0][4:], strict=True))


def test_what_is_not_covered(tmp_path: Path) -> None:
    data = loaded(DenoisingTask, write(tmp_path))
    data.item_transform_func = lambda source, target: (source, target)
    assert covers(data) == "a function transforms the items"
