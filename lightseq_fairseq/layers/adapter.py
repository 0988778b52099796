"""Low-rank adapters (LoRA) of linear layers: y += scale * dropout(x) A^T B^T.

Shapes: T = packed tokens, K = inputs, N = outputs of the linear layer, R = rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.memory.gradients import Gradients
from lightseq_fairseq.ops import Dropout

# Of the first adapter's dropout; those of the layers are smaller, see `sites`.
FIRST_SITE = 1 << 19


class Adapter(nn.Module):
    """The adapter of a linear layer, whose attribute ``lora`` it is; at first it adds nothing.

    Args:
        linear: its layer.
        rank: R.
        alpha: R times the scale.
        dropout: rate for x, in training mode.
        site: of this dropout.

    Attributes:
        A, B: [R, K] and [N, R].
        scale: alpha / R; the state dict has it, float64.

    Source: Hu et al. 2021; initial values as in ``peft``.
    """

    def __init__(
        self, linear: nn.Linear, rank: int, alpha: float, dropout: float, site: int
    ) -> None:
        super().__init__()
        like = linear.weight.detach()
        self.A = nn.Parameter(like.new_empty(rank, linear.in_features))
        self.B = nn.Parameter(like.new_zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale, self.dropout, self.site = alpha / rank, dropout, site

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the layer's result, without dropout: [..., K] -> [..., N]."""
        return self.scale * (x @ self.A.t() @ self.B.t())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale, dtype=torch.float64)

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any
    ) -> None:
        if (scale := state_dict.pop(f"{prefix}scale", None)) is not None:
            self.scale = float(scale)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class Added(NamedTuple):
    """An adapter of a part of a product.

    Attributes:
        columns: of the product's result.
        rng: of the dropout; None: there is none.
    """

    adapter: Adapter
    columns: slice
    rng: Tensor | None

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.adapter.A, self.adapter.B

    @property
    def _dropout(self) -> Dropout | None:
        adapter = self.adapter
        if self.rng is None or not adapter.training or adapter.dropout == 0:
            return None
        return Dropout(adapter.dropout, self.rng, adapter.site)

    def _dropped(self, x: Tensor) -> Tensor:
        dropout = self._dropout
        if dropout is None:
            return x
        return ops.bias_activation_dropout_fwd(x, None, "identity", dropout)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add to the product's result y; returns what backward needs besides x: [T, R]."""
        h = ops.linear_fwd(self._dropped(x), self.adapter.A, None).mul_(self.adapter.scale)
        y[:, self.columns].add_(ops.linear_fwd(h, self.adapter.B, None))
        return h

    def backward(self, dy: Tensor, x: Tensor, h: Tensor, to: Gradients, dx: Tensor | None) -> None:
        """Add to the gradient dx of x, if it is needed; h: from `add`."""
        adapter, dy, dropout = self.adapter, dy[:, self.columns], self._dropout
        with to.of([adapter.B]) as ((of_b,), accumulate):
            dh = ops.linear_bwd(dy, h, adapter.B, of_b, None, None, accumulate, True)
        dh.mul_(adapter.scale)
        with to.of([adapter.A]) as ((of_a,), accumulate):
            onto = dx if dropout is None else None
            need_dx = dropout is not None and dx is not None
            of_x = ops.linear_bwd(
                dh, self._dropped(x), adapter.A, of_a, None, onto, accumulate, need_dx
            )
        if need_dx and dx is not None and dropout is not None:
            dx.add_(
                ops.bias_activation_dropout_bwd(of_x, x, None, "identity", dropout, None, False)
            )


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict whose adapters are added to the weights of their layers, in float32."""
    if not any(".lora." in name for name in state):
        return state
    plain = {name: value for name, value in state.items() if ".lora." not in name}
    for name in state:
        if name.endswith(".lora.scale"):
            layer = name.removesuffix(".lora.scale")
            a, b = (state[f"{layer}.lora.{each}"].float() for each in "AB")
            weight = plain[f"{layer}.weight"]
            plain[f"{layer}.weight"] = weight.float().addmm(b, a, alpha=float(state[name]))
    return plain


def adapter_of(linear: Any) -> Adapter | None:
    """The adapter of a layer, if it has one."""
    found: Adapter | None = getattr(linear, "lora", None)
    return found


def adapters_of(module: nn.Module) -> dict[str, Adapter]:
    """The adapters within a module, by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, Adapter)}
