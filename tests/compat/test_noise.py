"""The noise of BART's pre-training has the distribution of fairseq's, and repeats."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

from fairseq.data import DenoisingDataset, Dictionary  # noqa: E402

ITEMS = 600
WORDS = 600  # of the dictionary; the text has the first 44 of them, each once, and full stops
BOS, EOS, FIRST = 0, 2, 4
PLAIN: dict[str, Any] = {
    "mask": 0.0, "mask_random": 0.0, "insert": 0.0, "rotate": 0.0, "permute_sentences": 0.0,
    "replace_length": 1, "mask_length": "span-poisson", "poisson_lambda": 3.5, "bpe": None,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "spans": {"mask": 0.3},
    "spans of bart": {"mask": 0.3, "mask_random": 0.1, "permute_sentences": 1.0, "bpe": "gpt2"},
    "spans of mbart": {"mask": 0.35, "mask_random": 0.1},
    "short spans": {"mask": 0.5, "poisson_lambda": 1.0, "mask_random": 0.4},
    "deleted spans": {"mask": 0.3, "replace_length": 0},
    "kept spans": {"mask": 0.4, "replace_length": -1, "mask_random": 0.3},
    "whole words": {"mask": 0.3, "words": True, "mask_random": 0.2},
    "kept whole words": {"mask": 0.5, "words": True, "replace_length": -1, "mask_random": 0.5},
    "words": {"mask": 0.3, "mask_length": "word", "words": True},
    "deleted words": {"mask": 0.3, "mask_length": "word", "words": True, "replace_length": 0},
    "subwords": {"mask": 0.15, "mask_length": "subword", "mask_random": 0.5},
    "all": {"mask": 1.0},
    "inserted": {"insert": 0.2, "mask_random": 0.3},
    "rotated": {"rotate": 0.6},
    "permuted": {"permute_sentences": 0.7, "bpe": "gpt2"},
    "not permuted": {"permute_sentences": 1.0},  # without gpt2, a sentence ends with </s>
    "everything": {"mask": 0.2, "insert": 0.1, "rotate": 0.5, "permute_sentences": 0.5,
                   "bpe": "gpt2", "mask_random": 0.1},
}  # fmt: skip


def vocabulary() -> Dictionary:
    words = Dictionary()
    for word in range(WORDS):
        words.add_symbol("13" if word == 0 else f"w{word}")  # 13 is the full stop of GPT-2
    words.add_symbol("<mask>")
    return words


def text() -> torch.Tensor:
    """<s>, 44 words in five sentences, </s>; one sentence ends with two full stops."""
    words = torch.arange(FIRST + 1, FIRST + 45)
    for stop in (6, 17, 18, 30):
        words[stop] = FIRST
    return torch.cat([torch.tensor([BOS]), words, torch.tensor([EOS])])


class Copies:
    """A text for each item; fairseq's method overwrites it."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __getitem__(self, _: int) -> torch.Tensor:
        return self.tokens.clone()


def short(length: int) -> Copies:
    return Copies(torch.cat([text()[: length - 1], torch.tensor([EOS])]))


def dataset(seed: int = 1, words: bool = False, **settings: Any) -> Any:
    """Items with the same text."""
    vocab = vocabulary()
    begins = torch.tensor([i < FIRST or i % 3 != 0 for i in range(len(vocab))]).byte()
    return DenoisingDataset(
        Copies(text()), np.full(ITEMS, len(text())), vocab, vocab.index("<mask>"),
        begins if words else None, False, seed, Namespace(**{**PLAIN, **settings}),
    )  # fmt: skip


def statistics(source: np.ndarray, mask: int) -> np.ndarray:
    """Numbers that a change of the noise changes: how often each token of the text is there, what
    is at each place, and how many tokens are lost and inserted between two tokens of the text."""
    length = len(text())
    old = (source > FIRST) & (source < FIRST + 45)
    there = np.bincount(source[old], minlength=FIRST + 45)
    kinds = np.zeros((4, 12))  # mask, random, text and order, at the first places and the last ones
    ends = np.r_[source[:6], source[-6:]]
    kinds[0], kinds[1], kinds[2] = ends == mask, (ends >= FIRST + 45) & (ends != mask), ends / 50
    places = np.flatnonzero(old)
    lost, added = np.diff(source[places]) - 1, np.diff(places) - 1
    gaps = np.zeros((10, 4))
    np.add.at(gaps, (np.clip(lost, -1, 8), np.clip(added, 0, 3)), 1)
    rest = [
        len(source) / length, (source == mask).sum(), (source == FIRST).sum(), old.sum(),
        (lost < 0).sum(), len(np.unique(source)),
        ((source[1:] == mask) & (source[:-1] == mask)).sum(), (source < FIRST).sum(),
    ]  # fmt: skip
    return np.concatenate([there, kinds.ravel(), gaps.ravel(), rest])


def means(sources: list[np.ndarray], mask: int) -> tuple[np.ndarray, np.ndarray]:
    found = np.stack([statistics(source, mask) for source in sources])
    return found.mean(0), found.var(0) / len(found)


def largest_difference(ours: list[np.ndarray], theirs: list[np.ndarray], mask: int) -> float:
    """Of the statistics, in standard deviations."""
    (mean, error), (other, others) = means(ours, mask), means(theirs, mask)
    deviation = np.sqrt(error + others + 1 / ITEMS**2)
    return float((np.abs(mean - other) / deviation).max())


def ours(data: Any, epoch: int = 1) -> list[np.ndarray]:
    data.set_epoch(epoch)
    return [data[i]["source"].numpy() for i in range(ITEMS)]


def theirs(data: Any) -> list[np.ndarray]:
    """The items by fairseq's own method."""
    torch.manual_seed(3)
    data.set_epoch(1)
    method = DenoisingDataset.__getitem__.__wrapped__
    return [method(data, i)["source"].numpy() for i in range(ITEMS)]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_distribution_is_fairseqs(settings: dict[str, Any]) -> None:
    data = dataset(**settings)
    native, found = theirs(data), ours(data)
    assert largest_difference(found, native, data.mask_idx) < 4.5
    assert all(source[0] == BOS and source[-1] == EOS for source in found)
    assert torch.equal(data[0]["target"], text())
    name = next((x for x in ("mask", "insert", "rotate") if settings.get(x)), None)
    if name is not None:  # the test finds a setting that is wrong
        other = ours(dataset(**{**settings, name: 0.6 * settings[name]}))
        assert largest_difference(other, native, data.mask_idx) > 6


def test_the_longest_mean_is_the_one_that_the_command_allows() -> None:
    """Beyond it, fairseq draws spans of length 0 for ever."""
    from lightseq_fairseq.cli.checks import noise

    for mean, lengths in ((noise._LONGEST_MEAN, range(20, 128)), (noise._LONGEST_MEAN + 1, [1])):
        data = dataset(mask=0.3, poisson_lambda=mean)
        assert len(data.mask_span_distribution.probs) in lengths


def test_budgets_are_fairseqs() -> None:
    """The number of words to mask is rounded as fairseq rounds it, for items of each length."""
    for share in (0.1, 0.3, 0.35, 0.7):
        data = dataset(mask=share, mask_length="subword")
        for length in range(2, 47):
            data.dataset = short(length)
            native = DenoisingDataset.__getitem__.__wrapped__(data, 0)["source"]
            counts = [int((x == data.mask_idx).sum()) for x in (native, data[0]["source"])]
            assert counts[0] == counts[1], (share, length)


def test_noise_is_a_function_of_seed_epoch_and_item() -> None:
    settings = SETTINGS["everything"]
    first = ours(dataset(**settings))
    backwards = dataset(**settings)
    backwards.set_epoch(1)
    torch.manual_seed(99)
    again = [backwards[i]["source"].numpy() for i in reversed(range(ITEMS))][::-1]
    assert all(map(np.array_equal, first, again))
    others = [ours(dataset(**settings), epoch=2), ours(dataset(seed=2, **settings)),
              [*first[1:], first[0]]]  # fmt: skip
    for other in others:
        assert sum(map(np.array_equal, first, other)) < ITEMS / 100


def test_noise_draws_from_no_global_generator() -> None:
    data = dataset(**SETTINGS["everything"])
    for seed, draw in ((torch.manual_seed, torch.rand), (np.random.seed, np.random.rand)):
        seed(5)
        expected = draw(3)
        seed(5)
        assert data[7] is not None
        assert bool((draw(3) == expected).all())


@pytest.mark.parametrize("length", [2, 3, 4])
def test_short_items(length: int) -> None:
    """A block of empty lines is <s> </s>."""
    for settings in SETTINGS.values():
        data = dataset(**settings)
        data.dataset = short(length)
        for i in range(40):
            source = data[i]["source"]
            assert source[0] == BOS and source[-1] == EOS
