"""A batch of a Hugging Face collator, packed on the host, in one block for a CUDA graph.

Shapes: B = sentences, L = longest sentence, T = packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.huggingface.covered import NotCovered, Reads
from lightseq_fairseq.memory.packing import LEAST_GRANULARITY, Segments, bucket_len
from lightseq_fairseq.ops.checks import trust_boundaries

_ALIGNMENT = 16  # bytes, of each part of a block
_LENGTHS = 32  # sentences are padded to a multiple of this, so that few graphs suffice
# What fills up a tensor [B, L].
_FILLING = {"input_ids": None, "attention_mask": 0, "token_type_ids": 0, "labels": -100}


class Part(NamedTuple):
    """A tensor of a block: where it begins, in bytes, and what it is."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """A packed batch.

    Attributes:
        block: uint8, on the CPU: the collator's tensors, the rng, and the boundaries of sentences.
        parts: its tensors; batches with the same parts use the same graph.
    """

    block: Tensor
    parts: tuple[Part, ...]

    def open(self, block: Tensor) -> tuple[dict[str, Tensor], Segments, Tensor]:
        """The collator's tensors, the segments and the rng of the pass, as views of ``block``: its
        own, or a copy of it."""
        views = {
            name: block[start : start + _size(dtype, shape)].view(dtype).view(shape)
            for name, start, dtype, shape in self.parts
        }
        cu_seqlens, index, rng = (views.pop(name) for name in ("/cu_seqlens", "/index", "/rng"))
        length = views["input_ids"].shape[-1]
        shape = len(cu_seqlens) - 1, length
        trust_boundaries(cu_seqlens, len(index), length)
        segments = Segments(
            cu_seqlens, length, index % length, index, shape, bucket_len(length), has_more=True
        )
        return views, segments, rng


def packed(
    inputs: Mapping[str, Any], pad: int, rng: tuple[int, int], reads: Reads, most: int
) -> Batch:
    """The batch.

    inputs: the collator's tensors on the CPU; ``input_ids`` and ``attention_mask`` are int64
        [..., L]. pad: fills up ``input_ids``. rng: see ``layers.draw_rng``. reads: what the model's
        head reads. most: tokens of a sentence that the model has positions for.

    Raises:
        NotCovered: it has no packed form.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            raise NotCovered(f"{name} is not a tensor on the CPU")
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or ids.dim() < 2 or ids.numel() == 0:
        raise NotCovered("there are no input_ids [B, L]")
    if mask is not None and mask.shape != ids.shape:
        raise NotCovered("the attention mask has another shape than input_ids")
    tensors = dict(inputs) if reads.pads else _filled_up(inputs, ids.shape[-1], pad, most)
    length = tensors["input_ids"].shape[-1]
    flat = tensors["input_ids"].reshape(-1, length)
    if mask is None:
        is_real = np.zeros(flat.shape, bool)
        is_real[:, : ids.shape[-1]] = True
    else:
        is_real = tensors["attention_mask"].reshape(-1, length).numpy() != 0
    reads.check(bool(is_real.all()), bool(is_real[:, 0].all()))
    places = is_real.ravel().nonzero()[0]
    # From 2048 rows on, at most a thirty-second of the rows is unused.
    step = max(LEAST_GRANULARITY, 1 << max(len(places) - 1, 0).bit_length() >> 6)
    index = np.full(-(-max(len(places), 1) // step) * step, is_real.size, np.int64)
    index[: len(places)] = places
    cu_seqlens = np.zeros(len(flat) + 1, np.int32)
    is_real.sum(1, dtype=np.int32).cumsum(out=cu_seqlens[1:])
    tensors["/cu_seqlens"], tensors["/index"] = (
        torch.from_numpy(cu_seqlens),
        torch.from_numpy(index),
    )
    tensors["/rng"] = torch.tensor(rng, dtype=torch.int64)
    return _joined(tensors)


def _filled_up(
    inputs: Mapping[str, Tensor], longest: int, pad: int, most: int
) -> dict[str, Tensor]:
    """The tensors, with sentences of a length that many batches have, if all can be filled up."""
    more = min(longest + -longest % _LENGTHS, most) - longest
    whole = dict(inputs)
    of_tokens = [name for name, x in inputs.items() if x.dim() > 1 and x.shape[-1] == longest]
    known = all(name in _FILLING and not inputs[name].is_floating_point() for name in of_tokens)
    if more <= 0 or "attention_mask" not in inputs or not known:
        return whole
    for name in of_tokens:
        filling = _FILLING[name]
        whole[name] = torch.nn.functional.pad(
            inputs[name], (0, more), value=pad if filling is None else filling
        )
    return whole


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _joined(tensors: Mapping[str, Tensor]) -> Batch:
    parts, end = [], 0
    for name, tensor in tensors.items():
        parts.append(Part(name, end, tensor.dtype, tuple(tensor.shape)))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    for part, tensor in zip(parts, tensors.values(), strict=True):
        view = block[part.start : part.start + tensor.nbytes].view(tensor.dtype).view(part.shape)
        view.copy_(tensor)
    return Batch(block, tuple(parts))
