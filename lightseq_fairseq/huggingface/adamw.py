"""AdamW over flat buffers: one kernel updates all parameters of a group.

Shapes: N = elements of a parameter buffer, including alignment gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import FlatBuffer, give_own_storages
from lightseq_fairseq.step.flat_adam import FlatAdam

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6
# Settings of torch.optim.AdamW that a saved state has and that change no result here.
_OF_TORCH = {"foreach": None, "maximize": False, "capturable": False, "differentiable": False,
             "fused": None, "decoupled_weight_decay": True}  # fmt: skip


class LightseqAdamW(FlatAdam):
    """``torch.optim.AdamW``: the same update, arguments and saved state, one pass over memory.

    Parameters are moved side by side; each keeps a storage of its own.

    Args:
        params: parameters or torch's parameter groups.
        lr: learning rate.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment, after bias correction.
        weight_decay: decay per unit of learning rate, decoupled from the gradient.

    Raises:
        UserError: a loaded state is not that of AdamW, or was made with amsgrad.

    Source: ``torch.optim.AdamW``; Loshchilov and Hutter 2019.
    """

    eps_after_correction = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        self._given: tuple[FlatBuffer, Tensor, Tensor | None] | None = None
        super().__init__(params, lr, betas, eps, weight_decay)
        for group in self.param_groups:
            group.update({name: group.get(name, value) for name, value in _OF_TORCH.items()})

    def _states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [
            (parameter, {**state, "step": torch.tensor(float(state["step"]))})
            for parameter, state in super()._states()
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of ``torch.optim.AdamW``."""
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in self.param_groups]
        if sizes != own or any("betas" not in group for group in groups):
            raise UserError(
                f"The saved optimizer has groups of {sizes} parameters, but this model has {own}: "
                "load the state of an AdamW of the same model, or start with a new optimizer."
            )
        if any(group.get("amsgrad") for group in groups):
            raise UserError(
                "The saved optimizer was made with amsgrad, which LightseqAdamW lacks: use "
                "torch.optim.AdamW."
            )
        super().load_state_dict(state_dict)

    def _lay_out(self) -> None:
        super()._lay_out()
        for flat in self._flats:
            give_own_storages(flat.buffer)

    def lay_out(self) -> None:
        """Read anew where the parameters lie, which have been moved; the state stays."""
        self._lay_out()

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Let updates by a given gradient skip these parameters, on which it never depends."""
        unused = list(parameters)
        for flat in self._flats:
            flat.leave_out(unused)

    def give(self, whole: FlatBuffer, gradient: Tensor, low: Tensor | None) -> None:
        """Let the next update read this gradient instead of ``.grad``.

        whole: has the parameters of all groups. gradient: [N], laid out like it. low: 16-bit
        copies of the parameters, which the update writes, too.
        """
        self._given = whole, gradient, low

    def clip_given(self, max_norm: float) -> Tensor:
        """The norm of the given gradient; the next update clips it to ``max_norm``, 0: it does not.

        No host waits.
        """
        assert self._given is not None
        self._norm, self._max_norm = ops.adam_norm(self._given[1]), float(max_norm)
        return self._norm

    def update_all(self) -> None:
        """Update by the given gradient, if there is one; otherwise every parameter that has one."""
        if self._given is None:
            super().update_all()
            return
        whole, gradient, low = self._given
        one = torch.ones((), dtype=torch.float64, device=gradient.device)
        norm = self._norm
        if not isinstance(norm, Tensor):
            norm = one
        start = whole.data.data_ptr()
        for flat in self._flats:
            first = (flat.buffer.data.data_ptr() - start) // whole.data.element_size()
            part = slice(first, first + len(flat.buffer.data))
            lr = torch.full((), flat.group["lr"], dtype=torch.float64, device=gradient.device)
            flat.update(
                gradient[part], None if low is None else low[part], lr, one, norm, self._max_norm,
                _CLIP_EPS,
            )  # fmt: skip
        self._given = None
        self._reset_factors()
