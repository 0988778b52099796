"""Cases for the attention of a decode step: caches, packed sources, and the check of a result."""

from __future__ import annotations

import pytest
import torch
from helpers.ops_testing import assert_kernel_as_good_as, poison_cache

from lightseq_fairseq import ops

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def largest(number):
    """Marks the largest value of a parameter, which tests no access pattern that the others do
    not."""
    return pytest.param(number, marks=pytest.mark.large)


def randn(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, device="cuda", dtype=dtype)


class Past:
    """A strided key and value cache; values that must not be read are NaN.

    shared: share of the positions at which all hypotheses of a slot have the same ancestor.
    mixed: whether some slots are at earlier steps.
    """

    reference = staticmethod(ops.REFERENCES["decode_self_attention"])
    op = staticmethod(ops.decode_self_attention)

    def __init__(self, count, step, dtype, heads=4, width=64, spare=3, beam=1, shared=0.0,
                 mixed=False):  # fmt: skip
        torch.manual_seed(count + step)
        channels, rows = heads * width, count + spare
        self.count, self.step, self.heads, self.scale = count, step, heads, width**-0.5
        self.beam = beam
        self.qkv = randn(count, 3 * channels, dtype=dtype)
        self.both = poisoned(2, step + 2, rows, 2 * channels, dtype=dtype)
        self.both[:, :step] = randn(2, step, rows, 2 * channels, dtype=dtype)
        slot = torch.arange(count, device="cuda") // beam
        self.steps = torch.full((count,), step, dtype=torch.int32, device="cuda")
        if mixed:
            self.steps[slot % 3 > 0] = 5 * slot[slot % 3 > 0].int() % (step + 1)
        self.keys, self.values = self.cache(self.both)
        self.ancestry = torch.full((step + 2, rows), -9, dtype=torch.int32, device="cuda")
        self.ancestry[:step] = torch.randint(0, rows, (step, rows), device="cuda")
        first = slot * beam
        together = torch.rand(step, 1, device="cuda") < shared
        past = self.ancestry[:step]
        past[:, :count] = torch.where(together, past[:, first], past[:, :count])
        # A row is no one's ancestor at the position that it writes.
        now = torch.arange(step, device="cuda")[:, None] == self.steps
        now = torch.nn.functional.pad(now, (0, spare))
        past.masked_fill_(now.gather(1, past.long()), count)

    def cache(self, both):
        """(keys, values), whose rows are parts of wider rows."""
        return both[..., both.shape[-1] // 2 :].unbind(0)

    def arguments(self, dtype=None):
        """The op's arguments, with copies of the cache, because a call writes to it."""
        dtype = dtype or self.qkv.dtype
        cache = self.cache(self.both.to(dtype, copy=True))
        settings = self.heads, self.scale, self.beam
        return self.qkv.to(dtype), *cache, self.ancestry, self.steps, *settings

    def plain(self):
        """Computed by plain torch in the dtype of the case, with a copy of the history for every
        hypothesis."""
        q, new_k, new_v = (x.unflatten(1, (self.heads, -1)) for x in self.qkv.chunk(3, 1))
        row = self.ancestry[: self.step, : self.count].long()
        place = torch.arange(self.step, device="cuda")[:, None]
        k, v = (
            torch.cat((x[place, row].unflatten(2, (self.heads, -1)), new[None]))
            for x, new in ((self.keys, new_k), (self.values, new_v))
        )
        scores = self.scale * torch.einsum("nhd,knhd->nhk", q, k)
        hidden = torch.arange(self.step + 1, device="cuda") >= self.steps[:, None]
        hidden[:, -1] = False  # the new token
        weights = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1)
        return torch.einsum("nhk,knhd->nhd", weights, v).flatten(1)


class Source:
    """Packed sentences between NaN rows; keys and values are parts of a wider matrix."""

    reference = staticmethod(ops.REFERENCES["decode_cross_attention"])
    op = staticmethod(ops.decode_cross_attention)

    def __init__(self, lengths, sentences, beam, dtype, heads=4, width=64, tail=3):
        torch.manual_seed(len(lengths) + beam)
        channels, used = heads * width, sum(lengths)
        self.beam, self.heads, self.scale = beam, heads, width**-0.5
        self.q = randn(len(sentences) * beam + tail, channels, dtype=dtype)
        both = poisoned(used + 1, 4 * channels, dtype=dtype)
        both[:used] = randn(used, 4 * channels, dtype=dtype)
        self.keys, self.values = both[:, channels : 2 * channels], both[:, 3 * channels :]
        self.cu = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        self.sentences = torch.tensor(sentences, dtype=torch.int32).cuda()

    def arguments(self, dtype=None):
        tensors = self.q, self.keys, self.values
        if dtype is not None:
            tensors = tuple(x.to(dtype) for x in tensors)
        return *tensors, self.cu, self.sentences, self.beam, self.heads, self.scale

    def plain(self):
        out = torch.zeros_like(self.q)
        cu = self.cu.tolist()
        for slot, sentence in enumerate(self.sentences.tolist()):
            if sentence < 0 or cu[sentence] == cu[sentence + 1]:
                continue
            mine = slice(slot * self.beam, (slot + 1) * self.beam)
            k, v = (
                x[cu[sentence] : cu[sentence + 1]].unflatten(1, (self.heads, -1))
                for x in (self.keys, self.values)
            )
            q = self.q[mine].unflatten(1, (self.heads, -1))
            weights = torch.softmax(self.scale * torch.einsum("nhd,khd->nhk", q, k), -1)
            out[mine] = torch.einsum("nhk,khd->nhd", weights, v).flatten(1)
        return out


def check(case):
    exact = case.reference(*case.arguments(torch.float64))
    plain = case.plain()
    poison_cache()
    ours = case.op(*case.arguments())
    assert_kernel_as_good_as(ours, plain, exact, half_roundings=0.5)
    assert torch.equal(ours.eq(0).all(1), exact.eq(0).all(1))


def lengths_of(sentences):
    generator = torch.Generator().manual_seed(sentences)
    return torch.randint(1, 60, (sentences,), generator=generator).tolist()
