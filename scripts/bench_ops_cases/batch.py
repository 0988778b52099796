"""The batch: sentence lengths as in WMT or BERT's data, and words that follow Zipf's law."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightseq_fairseq.memory.packing import Segments

from .case import PAD


def sentence_lengths(tokens: int) -> tuple[Tensor, Tensor]:
    """Return WMT-like sentence lengths: targets, `tokens` in total, and their sources.

    Target lengths are lognormal with mean 28 and sigma 0.55, limited to 2 ... 200; the last one is
    cut to fit. The ratio of target to source length is normal with mean 1.03 and standard deviation
    0.15.
    """
    generator = torch.Generator().manual_seed(1)
    mu, sigma = math.log(28) - 0.55**2 / 2, 0.55
    draws = torch.randn(tokens, generator=generator).mul_(sigma).add_(mu).exp_()
    lengths = draws.round_().clamp_(2, 200).long()
    count = int((lengths.cumsum(0) < tokens).sum()) + 1
    target = lengths[:count]
    target[-1] -= target.sum() - tokens
    ratio = torch.randn(count, generator=generator).mul_(0.15).add_(1.03).clamp_(min=0.5)
    return target, (target / ratio).round_().clamp_(1, 200).long()


def bert_lengths(tokens: int) -> Tensor:
    """Return lengths like those of BERT's pre-training: 20 to 512, mean 250, `tokens` in total.

    They are uniform within 20 ... 459, and 512 for every sixteenth sentence, where a text was cut.
    """
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(20, 460, (tokens // 20,), generator=generator)
    lengths[::16] = 512
    lengths = lengths[: int((lengths.cumsum(0) < tokens - 20).sum()) + 1]
    lengths[-1] -= lengths.sum() - tokens
    return lengths


def segments(tokens: int, device: str) -> tuple[Segments, Segments]:
    """Return the target and source sentences of a batch."""
    target, source = (Segments.from_lengths(x.to(device)) for x in sentence_lengths(tokens))
    return target, source


def zipf_tokens(count: int, vocabulary: int, device: str) -> Tensor:
    """Return token ids [count] whose frequencies follow Zipf's law, without pads."""
    frequencies = 1.0 / torch.arange(3.0, vocabulary + 3.0)
    frequencies[PAD] = 0
    generator = torch.Generator().manual_seed(2)
    return torch.multinomial(frequencies, count, replacement=True, generator=generator).to(device)
