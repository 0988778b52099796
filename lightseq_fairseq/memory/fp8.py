"""Products in fp8: the scales of all operands of a model, and its weights in E4M3.

A product is one matrix multiplication of a linear layer, or of several linear layers whose weights
are one matrix (``parameters.as_one``). It has three operands that are cast: the input, the weight
and the gradient of the output. Their scales are delayed (`ops.fp8_scales`): a cast uses the scale
that followed from earlier updates, and notes the largest number for later ones.

`Fp8State` owns scales and weights. Within a pass (`passes.Pass`), layers find the operands of a
product by the address of its weight; elsewhere, in validation for example, they find none and
compute in the model's precision. Without --fp8 the state is `OFF`.

Shapes: M = products, N = outputs and K = inputs of a product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import FlatBuffer, as_one
from lightseq_fairseq.ops import Cast, Quantised, WeightCast
from lightseq_fairseq.ops.casting import ALIGNMENT, E4M3
from lightseq_fairseq.ops.fp8_scales import HISTORY
from lightseq_fairseq.ops.fp8_weights import Matrix, fp8_tiles

# Rows of the table: the operands of a product.
_INPUT, _WEIGHT, _GRADIENT = range(3)
# Scale of gradients that are not known yet. Too small rather than too large: saturated numbers keep
# their sign, but numbers that are too small for a scale become zero.
_FIRST_SCALE = 2.0**-12
# Passes of the first batch after which scales fit: in each, the numbers that saturated before are
# larger, and so are those that follow from them.
_FIRST_PASSES = 4


@dataclass(frozen=True)
class Operands:
    """What a product in fp8 reads and writes besides its input and gradient.

    Attributes:
        input, gradient: their casts.
        weight: the cast of its weight; matrix: the result, [N, K].
        count: called with the number of values of each cast.
    """

    input: Cast
    weight: Cast
    gradient: Cast
    matrix: Quantised
    count: Callable[[int], None]


class NoFp8:
    """The state of a model without products in fp8: it does nothing.

    Attributes:
        is_on: whether there are such products.
        amax: float32 [3, M], the largest numbers that were cast since `update`.
        passes_due: passes of a batch that are needed before scales are known, see `after_pass`.
    """

    is_on = False
    passes_due = 0

    def __init__(self) -> None:
        self.amax = torch.zeros(3, 0)

    def operands(self, weights: Sequence[Tensor]) -> Operands | None:
        """The operands of the product that reads these weights as one, if it is in fp8."""
        return None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the numbers that a forward and backward pass casts."""
        yield

    def prepare(self, overwritten: bool) -> None:
        """Before an update. overwritten: the ``memory`` that holds the weights was written."""

    def after_pass(self) -> None:
        """Compute scales from the last pass alone. Call it ``passes_due`` times, each time after a
        forward and backward pass without an update, whose amaxes are those of all ranks."""

    def report(self, counts: Tensor) -> None:
        """Write how many numbers were cast since `update`, and how many of them saturated, [2]."""

    def update(self, skipped: Tensor) -> None:
        """Compute the scales of the next update; afterwards cast the weights.

        skipped: float64 0-dim; if not 0, the update was skipped, and scales do not change.
        """

    def weight_cast(self) -> WeightCast | None:
        """Count one cast of the weights; returns how an op is to do it, None if all are frozen."""
        return None

    def cast_weights(self) -> None:
        """Cast the weights; needed whenever they have changed."""

    def state(self) -> dict[str, Tensor]:
        """Name of a product's first weight -> float32 [3, 17]: of input, weight and gradient the
        scale and 16 amaxes, the newest first. In host memory; empty while ``passes_due``."""
        return {}


OFF = NoFp8()


def why_no_fp8(device: torch.device) -> str | None:
    """What a device lacks for products in fp8, a clause; None: nothing."""
    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) >= (8, 9):
        return None
    return (
        "needs a GPU of compute capability 8.9 or later, but this one has "
        f"{'.'.join(map(str, found))}"
    )


class Fp8State(NoFp8):
    """Scales and fp8 weights of the products of a model, on its device.

    Args:
        model: its products are the lists of weights that ``model.products()`` returns, and
            ``model.named_parameters()`` names them.
        low: the buffer of its trained parameters. The weights of a product must be adjacent.
            Frozen weights are cast only here.
        saved: a `state` of this model, from which scales continue. A state of other products is
            ignored.
        memory: uint8, holds the trained weights in E4M3. If it is None or too short, they get
            memory of their own.

    Raises:
        UserError: as in `products`.

    Attributes:
        saturated: int64 [3, M], how many numbers beyond the largest of E4M3 were cast since
            the last update.
        cast: float64 0-dim, how many numbers were cast since then.
    """

    is_on = True

    def __init__(
        self, model: Any, low: FlatBuffer, saved: Mapping[str, Tensor],
        memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._low = low
        # The trained ones first.
        weights = dict(sorted(products(model).items(), key=lambda x: not _holds(low, x[1])))
        self._names = list(weights)
        count, device = len(weights), low.data.device
        # 16 bytes apart: cuBLASLt reads a scale only from a 16-byte boundary.
        self._scale = torch.ones(3, count, 4, device=device)[..., 0]
        self._scale[_GRADIENT] = _FIRST_SCALE
        self._history = torch.zeros(HISTORY, 3, count, device=device)
        self.amax = torch.zeros(3, count, device=device)
        self.saturated = torch.zeros(3, count, dtype=torch.int64, device=device)
        self.cast = torch.zeros((), dtype=torch.float64, device=device)
        self._pending = 0  # numbers that the current pass has cast
        matrices, end = [], 0
        for weight in filter(functools.partial(_holds, low), weights.values()):
            start = weight.storage_offset() - low.data.storage_offset()
            matrices.append(Matrix(int(start), end, *weight.shape))
            end += weight.numel()
        self._tiles = fp8_tiles(matrices, len(low.data)).to(device)
        if memory is None or len(memory) < 2 * end:
            memory = torch.empty(2 * end, dtype=torch.uint8, device=device)
        in_e4m3 = memory[: 2 * end].view(E4M3)
        self._values, self._transposes = in_e4m3[:end], in_e4m3[end:]
        self._operands: dict[tuple[int, torch.Size], Operands] = {}
        for place, weight in enumerate(weights.values()):
            input, of_weight, gradient = (
                Cast(*(x[row, place] for x in (self._scale, self.amax, self.saturated)))
                for row in (_INPUT, _WEIGHT, _GRADIENT)
            )
            if place < len(matrices):
                part = slice(matrices[place].place, matrices[place].place + weight.numel())
                values, transpose = self._values[part], self._transposes[part]
                matrix = Quantised(
                    values.view(weight.shape), transpose.view(weight.shape[::-1]), of_weight.scale
                )
            else:
                matrix = _cast_once(weight)
            self._operands[_key(weight)] = Operands(input, of_weight, gradient, matrix, self._count)
        self._lacks_weights = False
        self.passes_due = 0 if self._load(saved) else _FIRST_PASSES
        if self.passes_due:
            self.cast_weights()  # notes the largest numbers
            self._scales(forget=True)
        self.cast_weights()

    def operands(self, weights: Sequence[Tensor]) -> Operands | None:
        return self._operands.get(_key(as_one(weights)))

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._pending = 0
        yield
        self.cast.add_(self._pending)

    def _count(self, numbers: int) -> None:
        # On the host, because the numbers of a pass depend only on its shapes.
        self._pending += numbers

    def after_pass(self) -> None:
        self._scales(forget=True)
        self.cast_weights()
        self.passes_due -= 1

    def report(self, counts: Tensor) -> None:
        counts[0].copy_(self.cast)
        counts[1].copy_(self.saturated.sum())

    def update(self, skipped: Tensor) -> None:
        self._scales(False, skipped)

    def _scales(self, forget: bool, skipped: Tensor | None = None) -> None:
        if skipped is None:
            skipped = torch.zeros_like(self.cast)
        history = self._history.view(HISTORY, -1)
        ops.fp8_scales(self._scale.view(-1), self.amax.view(-1), history, skipped, forget)
        self.saturated.zero_()
        self.cast.zero_()

    def prepare(self, overwritten: bool) -> None:
        self._lacks_weights |= overwritten
        if self._lacks_weights:
            self.restore_weights()
            self._lacks_weights = False  # only now: if it fails, the next update tries again

    def restore_weights(self) -> None:
        """Cast the weights again; needed when the memory that holds them was overwritten.

        It notes nothing, since the cast before has noted the same numbers.
        """
        if not len(self._values):
            return
        amax, saturated = (torch.zeros_like(x[_WEIGHT]) for x in (self.amax, self.saturated))
        cast = self._weight_cast()._replace(amax=amax, saturated=saturated)
        ops.fp8_weights(self._low.data, cast)

    def cast_weights(self) -> None:
        if (cast := self.weight_cast()) is not None:
            ops.fp8_weights(self._low.data, cast)

    def weight_cast(self) -> WeightCast | None:
        if not len(self._values):
            return None
        self.cast.add_(self._values.numel())
        return self._weight_cast()

    def _weight_cast(self) -> WeightCast:
        scale, amax, saturated = (x[_WEIGHT] for x in (self._scale, self.amax, self.saturated))
        return WeightCast(self._tiles, scale, amax, saturated, self._values, self._transposes)

    def state(self) -> dict[str, Tensor]:
        if self.passes_due:
            return {}
        table = torch.cat([self._scale[None], self._history]).permute(2, 1, 0).cpu()
        # Contiguous: fairseq broadcasts them to other ranks, and gloo reads memory in order.
        parts = (part.clone(memory_format=torch.contiguous_format) for part in table)
        return dict(zip(self._names, parts, strict=True))

    def _load(self, saved: Mapping[str, Tensor]) -> bool:
        shape = (3, 1 + HISTORY)
        if saved.keys() != set(self._names) or any(x.shape != shape for x in saved.values()):
            return False
        table = torch.stack([saved[name] for name in self._names]).permute(2, 1, 0)
        self._scale.copy_(table[0])
        self._history.copy_(table[1:])
        return True


def _key(weight: Tensor) -> tuple[int, torch.Size]:
    # The shape too: the first of adjacent weights has the same address as all of them.
    return weight.data_ptr(), weight.shape


def _holds(low: FlatBuffer, weight: Tensor) -> bool:
    start = weight.data_ptr() - low.data.data_ptr()
    return 0 <= start < low.data.numel() * low.data.element_size()


def _cast_once(weight: Tensor) -> Quantised:
    """A frozen weight [N, K] in E4M3, with the scale that follows from its largest number."""
    cast = Cast(
        torch.ones((), device=weight.device), torch.zeros((), device=weight.device),
        torch.zeros((), dtype=torch.int64, device=weight.device),
    )  # fmt: skip
    ops.fp8_quantise(weight, cast)  # notes the largest number
    history = torch.zeros(HISTORY, 1, device=weight.device)
    skipped = torch.zeros((), dtype=torch.float64, device=weight.device)
    ops.fp8_scales(cast.scale.view(1), cast.amax.view(1), history, skipped, True)
    return Quantised(*ops.fp8_quantise(weight, cast), cast.scale)


def products(model: Any) -> dict[str, Tensor]:
    """The model's products in fp8: name of the first weight -> the whole weight [N, K], a view.

    model: its method of this name returns the weights of each product.

    Raises:
        UserError: a width is no multiple of 16, or only a part of a product's weights is frozen.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights: dict[str, Tensor] = {}
    for group in model.products():
        name, weight = names[id(group[0])], as_one(group)
        if len({parameter.requires_grad for parameter in group}) > 1:
            raise UserError(
                f"--fp8 computes one product with {name} and {names[id(group[-1])]}, but --freeze "
                "freezes only a part of its weights: freeze all of them or none, or remove --fp8."
            )
        if any(width % ALIGNMENT for width in weight.shape):
            raise UserError(
                f"--fp8 needs widths that are multiples of {ALIGNMENT}, but {name} has the shape "
                f"{list(group[0].shape)}: change the width, or remove --fp8."
            )
        if weight.data_ptr() != group[0].data_ptr():
            raise RuntimeError(f"lightseq: {name} and the weights after it are not adjacent")
        weights[name] = weight
    return weights
