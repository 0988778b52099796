"""Adam over flat buffers: one kernel updates all parameters; results and files are fairseq's.

Shapes: N = elements of a parameter buffer, including alignment gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import flat_buffers
from lightseq_fairseq.step.adam_state import AdamState
from lightseq_fairseq.step.flat_optimizer import FlatOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CLIP_EPS = 1e-6  # fairseq.utils.clip_grad_norm_ divides by norm + 1e-6


class FlatAdam(FlatOptimizer):
    """Adam with decoupled weight decay; its state is flat in memory and in fairseq's file format.

    Parameters become views of flat buffers, unless the model has laid them out so already. The
    moments lie in flat buffers of the same layout, float32 (float64 for float64 parameters). 16-bit
    parameters, which fairseq passes with ``--memory-efficient-fp16``, are updated in float32 and
    rounded once. That float32 copy exists only during the update, since the flag asks to save
    memory.

    As in fairseq, a parameter without a gradient is not updated: no decay, no step. From then on it
    has its own step count. ``clip_grad_norm`` or ``step`` gather the gradients. They are scaled
    only inside the update, so ``.grad`` stays as backward has written it.

    Args:
        params: parameters or torch's parameter groups.
        lr: learning rate. This and the next three are defaults of the parameter groups, with the
            same meaning as in ``torch.optim.AdamW``.
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        weight_decay: decay per unit of learning rate, decoupled from the gradient.

    Source: ``fairseq.optim.adam.Adam``; Loshchilov and Hutter 2019.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    # After loading, fairseq's hack would replace our views by its own tensors.
    disable_mem_eff_fp16_loading_hack = True
    eps_after_correction = False  # see ``ops.adam_step``

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._flats: list[AdamState] = []
        # fairseq's Adam reads "amsgrad" of the groups that it loads.
        super().__init__(params, {**defaults, "amsgrad": False})
        self._lay_out()
        self._reset_factors()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        if self._flats:  # empty while the parent's __init__ adds the first groups
            self._lay_out()

    def _reset_factors(self) -> None:
        self._multiplier: float | Tensor = 1.0
        self._norm: float | Tensor = 1.0  # of the gradients before the multiplier
        self._max_norm = 0.0

    def _lay_out(self) -> None:
        """Build the buffers; build them again around an existing state."""
        states = {id(p): state for p, state in self._states()}
        self._flats = []
        for group in self.param_groups:
            for expert in (False, True):  # fairseq leaves experts out of the norm
                members = [p for p in group["params"] if hasattr(p, "expert") == expert]
                self._flats += [
                    AdamState(b, group, expert, self.eps_after_correction)
                    for b in flat_buffers(members)
                ]
        if states:
            self._set_states(states)

    def _states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """(parameter, state in fairseq's format) of all parameters that have been updated."""
        return [
            (parameter, {"step": step, **dict(zip(_MOMENTS, views, strict=True))})
            for flat in self._flats
            for parameter, step, views in zip(
                flat.buffer.parameters, flat.steps(), flat.moments(), strict=True
            )
            if step
        ]

    def _set_states(self, states: dict[int, dict[str, Any]]) -> None:
        """Inverse of ``_states``, keyed by ``id(parameter)``; a missing one was never updated."""
        for flat in self._flats:
            found = [states.get(id(p)) for p in flat.buffer.parameters]
            for state, views in zip(found, flat.moments(), strict=True):
                for name, view in zip(_MOMENTS, views, strict=True):
                    if state is None:
                        view.zero_()
                    else:
                        view.copy_(state[name].reshape(view.shape))
            flat.set_steps([int(state["step"]) if state else 0 for state in found])

    def _gather(self) -> list[tuple[AdamState, Tensor, list[bool]]]:
        if not all(flat.buffer.intact() for flat in self._flats):
            self._lay_out()
        return [(flat, *flat.buffer.gather_gradients()) for flat in self._flats]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever ``set_to_none`` is, and reset their multiplier."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._reset_factors()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients by ``c`` (number or 0-dim tensor) in the next update."""
        self._fold_clip()
        if isinstance(c, Tensor):
            c = c.to(self._device)
        self._multiplier = self._multiplier * c

    @property
    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

    def _fold_clip(self) -> None:
        # The op clips after it multiplies. A request that follows a clip must see its result, so
        # turn the clip into a multiplier.
        if self._max_norm > 0:
            total = torch.as_tensor(self._norm * self._multiplier)
            self._multiplier = self._multiplier * _clip_factor(self._max_norm, total)
            self._max_norm = 0.0

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """L2 norm of all gradients before clipping; the next update clips them to ``max_norm``.

        As in fairseq, the norm leaves out gradients of experts.

        Args:
            max_norm: 0 only computes the norm.
            aggregate_norm_fn: maps the norm of this rank's gradients to the norm over all ranks;
                fairseq's sharded training needs it.

        Returns:
            0-dim float32 tensor (float64 for float64 gradients), including all multipliers.
        """
        self._fold_clip()
        gathered = self._gather()
        norms = [ops.adam_norm(grad).to(self._device) for f, grad, _ in gathered if not f.expert]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        total = norm * self._multiplier
        self._norm = norm
        if aggregate_norm_fn is None:
            self._max_norm = float(max_norm)
        else:
            total = aggregate_norm_fn(total)
            if max_norm > 0:
                self.multiply_grads(_clip_factor(max_norm, total))
        return total

    def update_all(self) -> None:
        """Update every parameter that has a gradient; update nothing if the norm is not finite."""
        self.join()
        for flat, gradient, used in self._gather():
            lr, multiplier, norm = (
                _scalar(x, gradient.device)
                for x in (flat.group["lr"], self._multiplier, self._norm)
            )
            flat.update(gradient, None, lr, multiplier, norm, self._max_norm, _CLIP_EPS, used=used)
        self._reset_factors()

    @property
    def fused(self) -> AdamState:
        """The state, if all parameters lie in one buffer; a captured step updates them by it."""
        (flat,) = self._flats
        return flat

    def join(self) -> None:
        """Restore the float32 parameters, see `AdamState.split`. Call this before reading them."""
        for flat in self._flats:
            flat.join()

    def state_dict(self) -> dict[str, Any]:
        """fairseq's format: {step, exp_avg, exp_avg_sq} of each parameter that was updated."""
        self.join()
        self.state.clear()
        self.state.update(self._states())
        for group in self.param_groups:
            if "step" in group:  # from a loaded apex state, which stores the step in the group
                steps = [self.state[p]["step"] for p in group["params"] if p in self.state]
                group["step"] = max(steps, default=0)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of fairseq's Adam (with or without apex).

        The saved moments may be one tensor per parameter, or one vector of all parameters in order
        (``--fp16`` with flat gradients). Both forms work, however this optimizer holds its
        parameters.

        Raises:
            UserError: the state belongs to other parameters.
        """
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise UserError(
                f"The optimizer state in the checkpoint has {len(saved_groups)} parameter groups, "
                f"but this run has {len(self.param_groups)}: reset the optimizer with "
                "--reset-optimizer."
            )
        states: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            found = [_read(state_dict["state"].get(i), saved) for i in saved["params"]]
            states.update(_match(group["params"], found))
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._set_states(states)


def _read(state: dict[str, Any] | None, group: dict[str, Any]) -> dict[str, Any] | None:
    """Step and moments of one saved entry; None if it has not been updated."""
    if not state:
        return None
    found = {"step": state.get("step", group.get("step", 0))}
    for name in _MOMENTS:
        scale = state.get(f"{name}_scale")  # --fp16-adam-stats
        found[name] = state[name] if scale is None else state[name].float() * scale
    return found


def _match(
    parameters: list[Tensor], saved: list[dict[str, Any] | None]
) -> dict[int, dict[str, Any]]:
    """``id(parameter)`` -> state; splits or joins vectors that hold several parameters."""
    sizes = [p.numel() for p in parameters]
    states = [state for state in saved if state is not None]
    if len(saved) == len(sizes) and all(
        state is None or state["exp_avg"].numel() == size
        for state, size in zip(saved, sizes, strict=True)
    ):
        return {
            id(p): state for p, state in zip(parameters, saved, strict=True) if state is not None
        }
    if not states:
        return {}
    total = sum(state["exp_avg"].numel() for state in states)
    steps = {int(state["step"]) for state in states}
    if len(states) != len(saved) or len(steps) != 1 or total != sum(sizes):
        raise UserError(
            f"The optimizer state in the checkpoint has {total:,} numbers in {len(saved)} tensors, "
            f"but this model trains {sum(sizes):,} in {len(sizes)}: reset the optimizer with "
            f"--reset-optimizer."
        )
    cut = [torch.cat([s[name].flatten() for s in states]).split(sizes) for name in _MOMENTS]
    step = steps.pop()
    return {
        id(p): {"step": step, **dict(zip(_MOMENTS, moments, strict=True))}
        for p, *moments in zip(parameters, *cut, strict=True)
    }


def _clip_factor(max_norm: float, total: Tensor) -> Tensor:
    return (max_norm / (total + _CLIP_EPS)).clamp(max=1)


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """0-dim tensor on the device; a number becomes float64, without a copy from host memory."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.full((), value, dtype=torch.float64, device=device)
