"""Packed batches of several language pairs have the sentences of fairseq's collater."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import helpers.languages as languages
import helpers.parity as parity
import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.data import StripTokenDataset

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.filling import Sentences
from lightseq_fairseq.training.batch import covers, packing
from lightseq_fairseq.training.batch.reading import reader

EOS, PAD = 2, 1
CASES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "virtual epochs": {"virtual_epoch_size": 40},
    "all": {"sampling_method": "concat"},
    "truncated": {"truncate_source": True, "max_source_positions": 5},
    "replaced ends": {"lang_tok_replacing_bos_eos": True},
    "replaced source": {"lang_tok_replacing_bos_eos": True, "decoder_langtok": None},
    "reversed pairs": {"enable_reservsed_directions_shared_datasets": True},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return languages.write(tmp_path_factory.mktemp("data"))


def load(data: Path, **flags: Any) -> Any:
    """fairseq's training set."""
    cfg = parity.parse(parity.command_line(data, **{**languages.TASK, **flags}))
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    return task.datasets["train"]


def rows(batch: Any) -> list[tuple[list[int], ...]]:
    """Source, decoder input and labels of each pair."""
    source, target = batch.open().values()
    columns = []
    for side, names in ((source, ("tokens",)), (target, ("previous", "labels"))):
        bounds = side.segments.cu_seqlens.tolist()[: len(batch) + 1]
        columns += [[side[name][a:b].tolist() for a, b in pairwise(bounds)] for name in names]
    return list(zip(*columns, strict=True))


def fairseqs(dataset: Any, index: int) -> tuple[list[int], ...]:
    """The same of one pair, without pads."""
    sample = dataset.collater([dataset[index]])
    inputs = sample["net_input"]
    found = (inputs["src_tokens"], inputs["prev_output_tokens"], sample["target"])
    return tuple([x for x in tokens[0].tolist() if x != PAD] for tokens in found)


@pytest.mark.parametrize("case", CASES)
def test_pairs_are_fairseqs_in_each_epoch(data: Path, case: str) -> None:
    dataset = load(data, **CASES[case])
    assert covers(dataset) is None
    packs = packing(dataset)
    seen = []
    for epoch in (1, 2, 3):
        packs.set_epoch(epoch)
        indices = np.random.RandomState(epoch).permutation(len(dataset))[:17]
        batch = packs.__getitems__(indices)
        assert rows(batch) == [fairseqs(dataset, index) for index in indices]
        whole = dataset.collater([dataset[index] for index in indices])
        assert (batch.nsentences, batch.ntokens) == (whole["nsentences"], whole["ntokens"])
        items = packs.collater([packs[index] for index in indices])
        assert torch.equal(items.block, batch.block)
        seen.append(sorted(rows(packs.__getitems__(np.arange(len(dataset))))))
    assert (seen[0] == seen[1]) == (case == "all")
    assert len(packs.__getitems__(np.arange(0))) == 0 and packs.collater([]).ntokens == 0


def test_language_ids_are_not_covered(data: Path) -> None:
    assert covers(load(data, enable_lang_ids=True)) == "the data have language ids"


def test_a_source_without_its_end_is_not_replaced(data: Path) -> None:
    dataset = load(data, lang_tok_replacing_bos_eos=True)
    for part in dataset.datasets:
        part.src_eos = 17
    with pytest.raises(UserError, match="does not end with </s>"):
        packing(dataset).__getitems__(np.arange(3))


def test_stripped_tokens(data: Path) -> None:
    """Only those at the ends of a sentence."""
    whole = load(data).datasets[0].src.dataset
    for token in (EOS, int(whole[3][0]), int(whole[3][1])):
        dataset = StripTokenDataset(StripTokenDataset(whole, EOS), token)
        found = reader(dataset)(np.array([3, 0, 3, 5]))
        items = [dataset[i].tolist() for i in (3, 0, 3, 5)]
        assert found.tokens.tolist() == [x for item in items for x in item]
        assert found.lengths.tolist() == [len(item) for item in items]


def test_tokens_of_languages_may_be_larger_than_those_in_the_file() -> None:
    text = Sentences(np.array([4, 5, 6], np.uint16), np.array([1, 2]))
    assert text.prepended(70_000).tokens.tolist() == [70_000, 4, 70_000, 5, 6]
    assert text.appended(70_000).tokens.tolist() == [4, 70_000, 5, 6, 70_000]
