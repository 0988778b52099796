"""A batch of a Hugging Face collator, packed on the host, in one block for a CUDA graph.

Shapes: B = sentences, L = longest sentence, T = packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface.covered import NotCovered, Reads
from lightseq_fairseq.memory.packing import LEAST_GRANULARITY, Segments, bucket_len
from lightseq_fairseq.ops.checks import trust_boundaries

_ALIGNMENT = 16  # bytes, of each part of a block
_LARGE = 1 << 20  # bytes; such a tensor, or one on a device, is not copied into the host's block


class _Steps(NamedTuple):
    """Sizes are rounded up so that few graphs suffice: to a multiple of ``least``, and of a
    ``parts``-th of the next power of two."""

    least: int
    parts: int

    def up(self, size: int) -> int:
        step = max(self.least, (1 << max(size - 1, 0).bit_length()) // self.parts)
        return size + -size % step


_LENGTHS, _ROWS = _Steps(32, 16), _Steps(LEAST_GRANULARITY, 64)
# Pairs have four sizes, which vary independently. Pads cost little, but those of a target that is
# not packed are multiplied by the vocabulary.
_SOURCES, _TARGETS, _ROWS_OF_PAIRS = _Steps(32, 2), _Steps(8, 16), _Steps(LEAST_GRANULARITY, 16)
_IGNORED = -100  # label of a row that does not count
# What fills up a tensor [B, L].
_FILLING = {
    "input_ids": None, "attention_mask": 0, "token_type_ids": 0, "labels": _IGNORED,
    "decoder_input_ids": None,
}  # fmt: skip


class Part(NamedTuple):
    """A tensor of a block: where it begins, in bytes, and what it is."""

    name: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Host(NamedTuple):
    """What the host must know of a model to pack its batches.

    Attributes:
        pad: fills up ``input_ids``.
        reads: what its head reads.
        most: tokens of a sentence for which it has positions; 0: it is not limited.
        has_target: it has a decoder, whose input follows from the labels.
        shifted: the decoder's input int64 [B, L] for labels [B, L], of a model whose head and loss
            treat each row of the target alone; None: they may not.
        is_masked: so do those of the encoder, and rows whose label is -100 do not count.
        classes: of which the labels are numbers; 0: unknown.
        needs_mask: a batch with pads is wrong without an attention mask.
    """

    pad: int
    reads: Reads
    most: int
    has_target: bool = False
    shifted: Callable[[Tensor], Tensor] | None = None
    is_masked: bool = False
    classes: int = 0
    needs_mask: bool = False


@dataclass(frozen=True)
class Batch:
    """A packed batch.

    Attributes:
        block: uint8, on the CPU: the collator's tensors, the rng, and the boundaries of sentences.
        parts: its tensors.
        size: of the block on the device, in bytes.
        large: tensors that follow the block there, such as images or what is on the device already,
            and where they begin.
        lengths: of each side, such as "source": its longest sentence.
        of_head: the side of which the head gets packed rows [1, rows, C], and the labels [1, rows]:
            only those that count; None: it gets padded ones.
    """

    block: Tensor
    parts: tuple[Part, ...]
    size: int
    large: tuple[tuple[int, Tensor], ...]
    lengths: tuple[tuple[str, int], ...]
    of_head: str | None = None

    @property
    def shapes(self) -> Hashable:
        """Batches with the same ones use the same graph."""
        return self.parts, self.lengths, self.of_head

    def send(self, block: Tensor) -> None:
        """Copy it to ``block``, uint8 [size] on a device, without waiting."""
        block[: len(self.block)].copy_(self.block, non_blocking=True)
        for start, tensor in self.large:
            view = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor, non_blocking=True)

    def with_tensor(self, name: str, tensor: Tensor) -> Batch:
        """With another tensor of this name and shape, which may be on the device."""
        (start,) = (part.start for part in self.parts if part.name == name)
        return replace(self, large=(*self.large, (start, tensor)))

    def given(self, name: str) -> Tensor | None:
        """The large tensor of which `send` copies this part, if it is one."""
        starts = {part.start for part in self.parts if part.name == name}
        return next((tensor for start, tensor in self.large if start in starts), None)

    def open(self, block: Tensor) -> tuple[dict[str, Tensor], dict[str, Segments], Tensor]:
        """The tensors, the segments of each side and the rng of the pass, as views of ``block``:
        its own, or a copy of it."""
        views = {
            name: block[start : start + _size(dtype, shape)].view(dtype).view(shape)
            for name, start, dtype, shape in self.parts
        }
        segments = {}
        for side, length in self.lengths:
            cu_seqlens, index = views.pop(f"/{side}"), views.pop(f"/{side} rows")
            trust_boundaries(cu_seqlens, len(index), length)
            shape = len(cu_seqlens) - 1, length
            segments[side] = Segments(
                cu_seqlens, length, index % length, index, shape, bucket_len(length), has_more=True
            )
        return views, segments, views.pop("/rng")


def packed(inputs: Mapping[str, Any], host: Host, rng: tuple[int, int]) -> Batch:
    """The batch.

    inputs: the collator's tensors on the CPU; ``input_ids`` and ``attention_mask`` are int64
        [..., L], and ``labels`` of a decoder [B, L]. rng: see ``layers.draw_rng``.

    Raises:
        NotCovered: it has no packed form.
        UserError: a label is no class, or there are pads without an attention mask.
    """
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            raise NotCovered(f"{name} is not a tensor on the CPU")
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if "pixel_values" in inputs and ids is None:
        return _joined({**inputs, "/rng": torch.tensor(rng, dtype=torch.int64)}, {})
    if ids is None or ids.dim() < 2 or ids.numel() == 0:
        raise NotCovered("there are no input_ids [B, L]")
    if mask is not None and mask.shape != ids.shape:
        raise NotCovered("the attention mask has another shape than input_ids")
    labels = inputs.get("labels")
    if host.has_target and (labels is None or labels.dim() != 2 or len(labels) != len(ids)):
        raise NotCovered("there are no labels [B, L]")
    if mask is None and host.needs_mask and bool((ids[..., -1] == host.pad).any()):
        raise UserError(
            f"input_ids have pads ({host.pad}), but the collator returns no attention_mask: let it "
            "return one, such as DataCollatorWithPadding's."
        )
    if labels is not None and host.classes and not labels.is_floating_point():
        wrong = labels[(labels != _IGNORED) & ((labels < 0) | (labels >= host.classes))]
        if len(wrong):
            raise UserError(
                f"A label is {int(wrong[0])}, but the model has {host.classes} classes: labels are "
                f"from 0 to {host.classes - 1}, or {_IGNORED} where there is none."
            )
    tensors = dict(inputs)
    if not host.reads.pads and mask is not None:
        lengths = _SOURCES if host.has_target else _LENGTHS
        of_target = {"labels", "decoder_input_ids"} if host.has_target else set()
        _fill_up(tensors, set(tensors) - of_target, ids.shape[-1], lengths, host)
        if labels is not None and host.has_target:
            steps = _TARGETS if host.shifted is None else _SOURCES
            _fill_up(tensors, of_target & set(tensors), labels.shape[-1], steps, host)
    length = tensors["input_ids"].shape[-1]
    is_real = np.ones((ids.numel() // ids.shape[-1], length), bool)
    if mask is not None:
        is_real = tensors["attention_mask"].reshape(-1, length).numpy() != 0
    host.reads.check_mask(is_real)
    sides = {"source": is_real}
    if host.has_target:
        # The rows up to the last one whose label counts; no other row changes the loss.
        counts = tensors["labels"].numpy() != _IGNORED
        sides["target"] = counts[:, ::-1].cumsum(1)[:, ::-1] > 0
    tensors["/rng"] = torch.tensor(rng, dtype=torch.int64)
    of_head = _pack_labels(tensors, sides, host)
    return replace(_joined(tensors, sides), of_head=of_head)


def _pack_labels(
    tensors: dict[str, Tensor], sides: Mapping[str, np.ndarray], host: Host
) -> str | None:
    """Let the labels be those of packed rows, if the model allows it; returns ``Batch.of_head``.

    Then its head, which has the width of the vocabulary, computes no rows of pads.
    """
    labels = tensors.get("labels")
    if labels is None:
        return None
    if host.shifted is not None:
        if "decoder_input_ids" not in tensors:
            tensors["decoder_input_ids"] = host.shifted(labels)
        elif tensors["decoder_input_ids"].shape != labels.shape:
            raise NotCovered("decoder_input_ids have another shape than labels")
        _, index = _rows(sides["target"], _ROWS_OF_PAIRS)
        tensors["labels"] = _taken(labels, index)
        return "target"
    if not host.is_masked or labels.shape != tensors["input_ids"].shape:
        return None
    _, index = _rows(sides["source"], _ROWS)
    of_rows = _taken(labels, index)
    picked = (of_rows[0] != _IGNORED).nonzero()[:, 0]
    if len(picked) != int((labels != _IGNORED).sum()):
        raise NotCovered("a pad has a label")
    more = _ROWS.up(max(len(picked), 1)) - len(picked)
    tensors["/picked"] = torch.nn.functional.pad(picked, (0, more))
    taken = of_rows[:, picked]
    tensors["labels"] = torch.nn.functional.pad(taken, (0, more), value=_IGNORED)
    return "source"


def _taken(labels: Tensor, index: np.ndarray) -> Tensor:
    """The labels [1, rows] of places in the padded batch; behind it there is none."""
    return torch.nn.functional.pad(labels.flatten(), (0, 1), value=_IGNORED)[index][None]


def packed_call(
    tensors: Mapping[str, Tensor],
    sides: Mapping[str, tuple[Tensor | None, tuple[int, int], int]],
    reads: Reads,
) -> Batch:
    """The batch of a module's call, whose rng is 0; the host waits for the masks.

    sides: mask [B, L], not 0 at real tokens, or None: all are; (B, L); and the length to which its
        sentences are filled up. reads: see `Reads`, of the first side.

    Raises:
        NotCovered: a mask has another shape, or the head reads rows of pads.
    """
    real = {}
    for number, (side, (mask, shape, length)) in enumerate(sides.items()):
        is_real = np.zeros((shape[0], length), bool)
        is_real[:, : shape[1]] = True
        if mask is not None:
            if tuple(mask.shape) != shape:
                raise NotCovered("the attention mask is not of the shape [sentences, tokens]")
            is_real[:, : shape[1]] = mask.cpu().numpy() != 0
        if number == 0:
            reads.check_mask(is_real[:, : shape[1]])
        real[side] = is_real
    return _joined({**tensors, "/rng": torch.zeros(2, dtype=torch.int64)}, real)


def filled_length(longest: int, most: int) -> int:
    """The length to which sentences are filled up, so that few graphs suffice.

    most: tokens of a sentence for which there are positions; 0: it is not limited.
    """
    length = _LENGTHS.up(longest)
    return max(min(length, most), longest) if most else length


def _rows(is_real: np.ndarray, steps: _Steps) -> tuple[np.ndarray, np.ndarray]:
    """Boundaries, and the places of the real tokens, bool [B, L]; at least one row."""
    places = is_real.ravel().nonzero()[0]
    index = np.full(steps.up(max(len(places), 1)), is_real.size, np.int64)
    index[: len(places)] = places
    cu_seqlens = np.zeros(len(is_real) + 1, np.int32)
    is_real.sum(1, dtype=np.int32).cumsum(out=cu_seqlens[1:])
    return cu_seqlens, index


def _fill_up(
    tensors: dict[str, Tensor], names: Iterable[str], longest: int, steps: _Steps, host: Host
) -> None:
    """Fill up sentences to a length that many batches have, if all tensors can be filled up."""
    length = steps.up(longest)
    more = (min(length, host.most) if host.most else length) - longest
    of_tokens = [n for n in names if tensors[n].dim() > 1 and tensors[n].shape[-1] == longest]
    known = all(n in _FILLING and not tensors[n].is_floating_point() for n in of_tokens)
    if more <= 0 or not known:
        return
    for name in of_tokens:
        filling = _FILLING[name]
        value = host.pad if filling is None else filling
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, more), value=value)


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _joined(given: Mapping[str, Tensor], sides: Mapping[str, np.ndarray]) -> Batch:
    """sides: bool [B, L], true at real tokens."""
    tensors = dict(given)
    for side, is_real in sides.items():
        cu_seqlens, index = _rows(is_real, _ROWS if len(sides) == 1 else _ROWS_OF_PAIRS)
        tensors[f"/{side}"] = torch.from_numpy(cu_seqlens)
        tensors[f"/{side} rows"] = torch.from_numpy(index)

    def is_large(x: Tensor) -> bool:
        return x.nbytes >= _LARGE or x.device.type != "cpu" or x.requires_grad

    ordered = sorted(tensors.items(), key=lambda item: is_large(item[1]))
    parts, large, end, small = [], [], 0, 0
    for name, tensor in ordered:
        parts.append(Part(name, end, tensor.dtype, tuple(tensor.shape)))
        if is_large(tensor):
            large.append((end, tensor.contiguous()))
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        small = small if large else end
    block = torch.empty(small, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    for part, (_, tensor) in zip(parts[: len(parts) - len(large)], ordered, strict=False):
        view = block[part.start : part.start + tensor.nbytes].view(tensor.dtype).view(part.shape)
        view.copy_(tensor)
    lengths = tuple((side, is_real.shape[1]) for side, is_real in sides.items())
    return Batch(block, tuple(parts), end, tuple(large), lengths)
