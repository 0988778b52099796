"""Packed batches hold the same sentences as those of fairseq's collater."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

from fairseq.data import (  # noqa: E402
    ConcatDataset,
    Dictionary,
    EpochBatchIterator,
    LanguagePairDataset,
    ListDataset,
    MonolingualDataset,
    TokenBlockDataset,
    TransformEosDataset,
    TruncatedDictionary,
    indexed_dataset,
)

from lightseq_fairseq.memory.packing import (  # noqa: E402
    SENTENCE_PAIRS,
    Bucket,
    Granularity,
    Layout,
    Packed,
    PackedBatch,
    Segments,
    Stream,
    block_size,
    open_block,
)
from lightseq_fairseq.training.batch import covers, packing  # noqa: E402
from lightseq_fairseq.training.batch.pairs import PackingPairs  # noqa: E402

VOCABULARY = 50
PAD, EOS = 1, 2
PAIRS = 40
DICTIONARY = Dictionary()
for word in range(VOCABULARY - 4):
    DICTIONARY.add_symbol(f"w{word}")

# Indices of a batch, unsorted, with one pair twice.
BATCH = np.array([7, 3, 30, 12, 3, 0, 39])


def sentences(seed: int, count: int = PAIRS, longest: int = 9) -> list[Tensor]:
    """Random sentences of 1 to ``longest`` tokens; all but every third end in eos."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        sentence = torch.randint(4, VOCABULARY, (length,), generator=generator)
        if i % 3:
            sentence[-1] = EOS
        found.append(sentence)
    return found


def with_pads(found: list[Tensor]) -> list[Tensor]:
    """The same sentences; some have pads at the start, inside and at the end."""
    for index, place in ((7, 0), (3, len(found[3]) // 2), (30, -1), (39, 0), (39, -1)):
        found[index][place] = PAD
    return found


def mapped(folder: Path, name: str, found: Sequence[Tensor]) -> Any:
    """The sentences in fairseq's memory-mapped file format."""
    path = str(folder / name)
    builder = indexed_dataset.make_builder(f"{path}.bin", "mmap", vocab_size=VOCABULARY)
    for sentence in found:
        builder.add_item(sentence)
    builder.finalize(f"{path}.idx")
    return indexed_dataset.make_dataset(path, "mmap")


def pairs(
    source: list[Tensor], target: list[Tensor] | None, folder: Path | None = None, **options: Any
) -> Any:
    """fairseq's dataset of these pairs, from files in ``folder`` or, if it is None, from lists."""
    sides = []
    for name, found in (("src", source), ("tgt", target)):
        sizes = None if found is None else np.array([len(sentence) for sentence in found])
        side = None
        if found is not None:
            side = mapped(folder, name, found) if folder else ListDataset(found, sizes)
        sides += [side, sizes, DICTIONARY]
    return LanguagePairDataset(*sides, **options)


def opened(batch: PackedBatch) -> Packed:
    return batch.open()


def ours(batch: PackedBatch) -> list[tuple[list[int], ...]]:
    """Source, its positions, decoder input, its positions and labels of each real sentence."""
    source, target = opened(batch).values()
    columns = []
    for segments, rows in (
        (source.segments, (source["tokens"], source.segments.positions)),
        (target.segments, (target["previous"], target.segments.positions, target["labels"])),
    ):
        bounds = segments.cu_seqlens.tolist()[: len(batch) + 1]
        for row in rows:
            columns.append([row[a:b].tolist() for a, b in pairwise(bounds)])
    return list(zip(*columns, strict=True))


def fairseqs(dataset: Any, indices: Any) -> list[tuple[list[int], ...]]:
    """The same from fairseq's collater, packed by ``Segments.from_mask``, in the order of the
    indices."""
    sample = dataset.collater([dataset[i] for i in indices])
    source, previous = (sample["net_input"][k] for k in ("src_tokens", "prev_output_tokens"))
    columns = []
    for padded, others in ((source, ()), (previous, (sample["target"],))):
        segments = Segments.from_mask(padded.ne(PAD))
        bounds = segments.cu_seqlens.tolist()
        for row in (segments.pack(padded), segments.positions, *map(segments.pack, others)):
            columns.append([row[a:b].tolist() for a, b in pairwise(bounds)])
    by_id = dict(zip(sample["id"].tolist(), zip(*columns, strict=True)))
    return [by_id[i] for i in indices]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left": {"left_pad_source": False, "left_pad_target": True},
    "append_eos": {"append_eos_to_target": True},
    "append_bos": {"append_bos": True},
    "remove_eos": {"remove_eos_from_source": True},
    "eos": {"eos": 17},
    "multiple": {"pad_to_multiple": 8},
}


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_sentences_are_fairseqs(
    tmp_path: Path, options: dict[str, Any], pads: bool, in_file: bool
) -> None:
    source, target = sentences(1), sentences(2)
    if pads:
        source, target = with_pads(source), with_pads(target)
    if options.get("remove_eos_from_source"):
        # fairseq cannot pad a batch that contains an empty sentence.
        source = [torch.cat([torch.tensor([5]), sentence]) for sentence in source]
    dataset = pairs(source, target, tmp_path if in_file else None, **options)
    assert covers(dataset) is None
    batch = PackingPairs(dataset).__getitems__(BATCH)

    expected = fairseqs(dataset, BATCH)
    assert ours(batch) == expected
    native = dataset.collater([dataset[i] for i in BATCH])
    assert (batch.nsentences, batch.ntokens) == (native["nsentences"], native["ntokens"])
    assert batch.longest == tuple(max(len(sentence[i]) for sentence in expected) for i in (0, 2))
    rows = tuple(sum(len(sentence[side]) for sentence in expected) for side in (0, 2))
    assert batch.bucket == Bucket(rows, len(BATCH))


def test_file_and_items_give_the_same_block(tmp_path: Path) -> None:
    packing = PackingPairs(pairs(sentences(1), sentences(2), tmp_path), Granularity(16))
    from_file, from_items = (
        packing.__getitems__(BATCH),
        packing.collater([packing[i] for i in BATCH]),
    )
    assert torch.equal(from_file.block, from_items.block)
    assert from_file.bucket == from_items.bucket
    assert packing.collater(from_file) is from_file


def test_rows_past_the_tokens_belong_to_no_sentence() -> None:
    dataset = pairs(sentences(1), sentences(2))
    exact, rounded = (PackingPairs(dataset, Granularity(g)).__getitems__(BATCH) for g in (1, 64))
    assert ours(rounded) == ours(exact)
    assert (rounded.nsentences, rounded.ntokens) == (exact.nsentences, exact.ntokens)
    assert rounded.bucket == Bucket((64, 64), 256)
    n = len(BATCH)
    for real, rows in zip(exact.bucket.rows, opened(rounded).values(), strict=True):
        assert 0 < real < 64
        pads = torch.full((64 - real,), PAD)
        assert all(torch.equal(column[real:], pads) for column in rows.columns.values())
        segments = rows.segments
        assert not segments.positions[real:].any()
        assert segments.cu_seqlens[n:].tolist() == [real] * (257 - n)


@pytest.mark.parametrize(
    ("count", "room"), [(1, 256), (256, 256), (257, 1024), (1025, 4096), (4097, 16384)]
)
def test_room_for_sentences_comes_in_classes(count: int, room: int) -> None:
    dataset = pairs(sentences(1), sentences(2))
    indices = np.arange(count) % PAIRS
    for granularity in (8, 64):
        batch = PackingPairs(dataset, Granularity(granularity)).__getitems__(indices)
        assert batch.bucket.sentences == room
        assert batch.bucket.rows[0] % granularity == 0
        assert ours(batch) == ours(PackingPairs(dataset).__getitems__(indices))
    assert PackingPairs(dataset).__getitems__(indices).bucket.sentences == count


def test_rare_numbers_of_rows_are_rounded_further() -> None:
    granularity = Granularity(128, 3072)
    rows = {1: 512, 512: 512, 513: 1024, 3072: 3072, 3073: 3200, 4001: 4096}
    assert {given: granularity.rounded(given) for given in rows} == rows
    dataset = pairs(sentences(1), sentences(2))
    found = []
    for usual, step in ((0, 8), (500, 32)):
        batch = PackingPairs(dataset, Granularity(8, usual)).__getitems__(BATCH)
        assert batch.bucket.rows[1] == -(-batch.ntokens // step) * step
        found.append(ours(batch))
    assert found[0] == found[1]


def test_a_bucket_bounds_the_lengths_of_all_its_batches() -> None:
    """Graphs are captured with one batch and replayed with others of its bucket."""
    found = {}
    for longest in (1000, 600, 512):
        source = [torch.full((length,), 5) for length in (longest, 1024 - longest)]
        batch = PackingPairs(pairs(source, source), Granularity(64)).__getitems__([0, 1])
        assert batch.longest == (longest, longest) and batch.bucket.longest >= longest
        bounds = {rows.segments.graph_len for rows in opened(batch).values()}
        assert bounds == {batch.bucket.longest}
        found[longest] = batch.bucket
    assert found[1000] == found[600] != found[512]
    assert found[1000].rows == found[512].rows
    short = PackingPairs(pairs(sentences(1), sentences(2))).__getitems__(BATCH)
    assert short.bucket.longest == 128


ONE_SIDED = (Stream("target", ("previous", "labels")), Stream("masked", ("places",)))


@pytest.mark.parametrize("layout", [SENTENCE_PAIRS, ONE_SIDED, SENTENCE_PAIRS[:1]])
@pytest.mark.parametrize(("rows", "sentences"), [((5, 7), 3), ((64, 32), 256), ((0, 0), 0)])
def test_parts_are_views_on_16_byte_boundaries(
    layout: Layout, rows: tuple[int, ...], sentences: int
) -> None:
    bucket, longest = Bucket(rows[: len(layout)], sentences), (4, 6)[: len(layout)]
    block = torch.empty(block_size(layout, bucket), dtype=torch.int64)
    packed = open_block(block, layout, bucket, longest)
    assert list(packed) == [stream.name for stream in layout]
    end = 0
    for stream, count, most in zip(layout, bucket.rows, longest, strict=True):
        found = packed[stream.name]
        assert tuple(found.columns) == stream.columns
        segments = found.segments
        parts = [*found.columns.values(), segments.positions]
        assert [len(part) for part in parts] == [count] * len(parts)
        for part in (*parts, segments.cu_seqlens):
            offset = part.storage_offset() * part.element_size()
            assert offset % 16 == 0 and offset >= end
            assert part.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
            end = offset + part.nbytes
        assert segments.cu_seqlens.dtype == torch.int32
        assert segments.cu_seqlens.shape == (sentences + 1,)
        assert (segments.max_len, segments.shape) == (most, (sentences, most))
        assert segments.index.numel() == 0
    assert end <= block.nbytes < end + 16
    # On the meta device there are no values to read: opening a block must not need any.
    open_block(block.to("meta"), layout, bucket, longest)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("granularity", [1, 64])
def test_no_sentences(tmp_path: Path, in_file: bool, granularity: int) -> None:
    dataset = pairs(sentences(1), sentences(2), tmp_path if in_file else None)
    batch = PackingPairs(dataset, Granularity(granularity)).__getitems__([])
    assert len(batch) == batch.ntokens == sum(batch.longest) == sum(batch.bucket.rows) == 0
    assert ours(batch) == []


def test_sentence_of_pads_alone() -> None:
    source, target = ([torch.tensor([5, EOS]), torch.tensor([PAD])] for _ in range(2))
    dataset = pairs(source, target)
    batch = PackingPairs(dataset).__getitems__([1, 0, 1])
    assert ours(batch) == fairseqs(dataset, [1, 0, 1])
    assert batch.ntokens == 2 and batch.bucket == Bucket((2, 4), 3)


def test_pin_memory_pins_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PackingPairs(pairs(sentences(1), sentences(2))).__getitems__(BATCH)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    pinned = pin_memory(batch)
    assert pinned.block.data_ptr() != batch.block.data_ptr()
    assert ours(pinned) == ours(batch) and pinned.ntokens == batch.ntokens


def test_workers_send_what_was_packed(tmp_path: Path) -> None:
    packing = PackingPairs(pairs(sentences(1), sentences(2), tmp_path), Granularity(16))
    batches = [BATCH, [], BATCH[:2].tolist(), BATCH[::-1]]
    loader = DataLoader(packing, batch_sampler=batches, collate_fn=packing.collater, num_workers=2)
    received = list(loader)
    for batch, indices in zip(received, batches, strict=True):
        expected = packing.__getitems__(indices)
        assert torch.equal(batch.block, expected.block)
        assert vars(batch) | {"block": None} == vars(expected) | {"block": None}


def test_fairseqs_iterator(tmp_path: Path) -> None:
    dataset = pairs(sentences(1), sentences(2), tmp_path)
    batches = np.array_split(dataset.ordered_indices(), 5)
    native, packed = (
        EpochBatchIterator(dataset, dataset.collater, batches, num_shards=2, shard_id=1)
        for _ in range(2)
    )
    packed.dataset = PackingPairs(dataset)
    packed.collate_fn = packed.dataset.collater
    assert ours(packed.first_batch) == fairseqs(dataset, batches[0])
    for _ in range(2):
        samples, found = (list(iterator.next_epoch_itr()) for iterator in (native, packed))
        # Five batches on two shards: fairseq adds an empty batch.
        assert [len(sample) == 0 for sample in found] == [len(s) == 0 for s in samples]
        assert sum(len(sample) == 0 for sample in found) == 1
        for sample, batch in zip(samples, found, strict=True):
            if len(batch):
                assert sorted(s[0] for s in ours(batch)) == sorted(
                    row[row.ne(PAD)].tolist() for row in sample["net_input"]["src_tokens"]
                )


def test_pickled_without_the_corpus(tmp_path: Path) -> None:
    long = sentences(1, longest=4000)
    packing = PackingPairs(pairs(long, long, tmp_path), Granularity(16))
    expected = packing.__getitems__(BATCH)
    pickled = pickle.dumps(packing)
    assert len(pickled) < sum(len(sentence) for sentence in long)
    assert torch.equal(pickle.loads(pickled).__getitems__(BATCH).block, expected.block)


def test_everything_else_is_the_datasets() -> None:
    dataset = pairs(sentences(1), sentences(2))
    packing = PackingPairs(dataset)
    assert len(packing) == PAIRS
    assert packing[3]["source"] is dataset[3]["source"]
    assert packing.sizes is dataset.sizes and packing.supports_fetch_outside_dataloader
    assert not hasattr(packing, "no_such_thing")


class Extended(LanguagePairDataset):
    pass


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"align_dataset": ListDataset([], [])}, "the data have alignments"),
        ({"constraints": []}, "the data have constraints"),
        ({"src_lang_id": 3}, "the data have language ids"),
        ({"tgt_lang_id": 3}, "the data have language ids"),
        ({"input_feeding": False}, "the data have no decoder input (input_feeding)"),
        ({"num_buckets": 2}, "sentences are padded to length buckets"),
    ],
)
def test_covers_no_other_batches(options: dict[str, Any], reason: str) -> None:
    assert covers(pairs(sentences(1), sentences(2), **options)) == reason


def test_covers_language_pairs_alone() -> None:
    dataset = pairs(sentences(1), sentences(2))
    assert covers(pairs(sentences(1), None)) == "the data have no target sentences"
    assert covers(TransformEosDataset(dataset, EOS)) == "the dataset is of type TransformEosDataset"
    sides = dataset.src, dataset.src_sizes, DICTIONARY
    assert covers(Extended(*sides, *sides)) == "the dataset is of type Extended"


def text(breaks: str, pads: bool = False, files: Path | None = None, **options: Any) -> Any:
    """fairseq's dataset of running text, with or without pads in the text.

    files: a folder for the text as two memory-mapped files; otherwise it is a list.
    """
    found = with_pads(sentences(3)) if pads else sentences(3)
    found[5] = found[20] = torch.tensor([EOS])  # between documents
    sizes = np.array([len(sentence) for sentence in found])
    stored: Any = ListDataset(found, sizes)
    if files is not None:
        parts = [mapped(files, "train", found[:17]), mapped(files, "train1", found[17:])]
        stored = ConcatDataset(parts)
    blocks = TokenBlockDataset(stored, sizes, 11, PAD, EOS, breaks, include_targets=True)
    options = {"targets": ["future"], "add_eos_for_other_targets": breaks != "none", **options}
    return MonolingualDataset(blocks, blocks.sizes, DICTIONARY, **options)


TEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pads": {"pads": True},
    "bos": {"add_bos_token": True},
    "fixed": {"fixed_pad_length": 30},
    "few words": {"tgt_vocab": TruncatedDictionary(DICTIONARY, 20)},
    "bos and few words": {"tgt_vocab": TruncatedDictionary(DICTIONARY, 20), "add_bos_token": True},
}


@pytest.mark.parametrize("breaks", ["none", "complete", "complete_doc", "eos"])
@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("options", TEXTS.values(), ids=TEXTS)
def test_text_is_fairseqs(
    tmp_path: Path, breaks: str, options: dict[str, Any], in_files: bool
) -> None:
    dataset = text(breaks, files=tmp_path if in_files else None, **options)
    assert covers(dataset) is None
    order = np.random.default_rng(1).permutation(len(dataset))
    indices = [3, 0, 7, 3, len(dataset) - 1, *order]
    sample = dataset.collater([dataset[i] for i in indices])
    previous, labels = sample["net_input"]["src_tokens"], sample["target"]
    segments = Segments.from_mask(previous.ne(PAD))
    batch = packing(dataset).__getitems__(indices)
    found = batch.open()["target"]
    assert torch.equal(found["previous"], segments.pack(previous))
    assert torch.equal(found["labels"], segments.pack(labels))
    assert torch.equal(found.segments.positions, segments.positions)
    assert torch.equal(found.segments.cu_seqlens, segments.cu_seqlens)
    assert (batch.nsentences, batch.ntokens) == (sample["nsentences"], sample["ntokens"])
    assert ("pads" in options) == (batch.ntokens > len(segments.positions))
    assert batch.longest == (int(segments.cu_seqlens.diff().max()),)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"targets": ["past"]}, "the targets are not the next tokens"),
        ({"targets": ["self", "future"]}, "the targets are not the next tokens"),
        ({"targets": None}, "the targets are not the next tokens"),
        ({"pad_to_bsz": 8}, "batches are filled up with blocks (pad_to_bsz)"),
    ],
)
def test_text_that_is_not_covered(options: dict[str, Any], reason: str) -> None:
    assert covers(text("complete", **options)) == reason


def test_text_with_empty_sentences_is_not_covered() -> None:
    found = [torch.tensor([5, EOS]), torch.tensor([], dtype=torch.int64), torch.tensor([6, EOS])]
    sizes = np.array([2, 0, 2])
    blocks = TokenBlockDataset(
        ListDataset(found, sizes), sizes, 11, PAD, EOS, "eos", include_targets=True
    )
    dataset = MonolingualDataset(blocks, blocks.sizes, DICTIONARY, targets=["future"])
    assert covers(dataset) == "the text has empty sentences"


def test_text_files_are_read_without_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packing(text("complete", files=tmp_path), Granularity(8))
    expected = packed.collater([packed[index] for index in (2, 0, 1)])
    monkeypatch.setattr(TokenBlockDataset, "__getitem__", None)
    monkeypatch.setattr(indexed_dataset.MMapIndexedDataset, "__getitem__", None)
    assert torch.equal(packed.__getitems__([2, 0, 1]).block, expected.block)
