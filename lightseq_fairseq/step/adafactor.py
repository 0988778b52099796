"""fairseq's Adafactor in the captured step: the host reads nothing, and files are fairseq's.

Matrices are updated one after the other, so temporary memory is that of the largest one. All
vectors are updated together.

Shapes: N = elements of the parameter buffer, M = parameters, V = elements of all vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import FlatBuffer, flat_buffers
from lightseq_fairseq.step.flat_optimizer import FlatOptimizer


class _Matrix(NamedTuple):
    """The state of a matrix [R, C], or of several: place among the parameters, averages of squares
    [R] and [C], first moment or None."""

    place: int
    row: Tensor
    column: Tensor
    moment: Tensor | None


class _Vectors(NamedTuple):
    """The state of all vectors, one after the other: their places among the parameters, their
    sizes, the place of each element's parameter, averages of squares, first moments or None; [V]
    each."""

    places: list[int]
    sizes: list[int]
    owners: Tensor
    squares: Tensor
    moments: Tensor | None


class Adafactor(FlatOptimizer):
    """Adafactor for one parameter group; takes the options of fairseq's class.

    With ``scale_parameter``, fairseq 0.12.2 multiplies the learning rate by the RMS of each
    parameter in turn, so a rate includes the RMS of all parameters before; so does this class.

    Args:
        params: float32 or float64, of one device; with 16-bit parameters their master weights.
        eps: added to squares of gradients; least RMS of a parameter.
        clip_threshold: largest RMS of an update, in units of the learning rate.
        decay_rate: exponent of the number of updates in the decay of squares.
        beta1: decay of the first moment; None: there is none.
        weight_decay: decay per unit of learning rate, decoupled from the gradient.

    Source: ``fairseq.optim.adafactor.Adafactor``; Shazeer and Stern 2018.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = False

    def __init__(
        self, params: Iterable[Any], lr: float, eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0, decay_rate: float = -0.8, beta1: float | None = None,
        weight_decay: float = 0.0, scale_parameter: bool = False, relative_step: bool = False,
        warmup_init: bool = False,
    ) -> None:  # fmt: skip
        for flag, is_set in (("--relative-step", relative_step), ("--warmup-init", warmup_init)):
            if is_set:
                raise UserError(
                    f"--optimizer adafactor refuses {flag}, in fairseq too, because a run always "
                    f"has a learning rate: remove {flag}."
                )
        options = {
            "lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate,
            "beta1": beta1, "weight_decay": weight_decay, "scale_parameter": scale_parameter,
        }  # fmt: skip
        super().__init__(params, {**options, "relative_step": False, "warmup_init": False})
        (self._group,) = self.param_groups
        self._parameters: list[Tensor] = self._group["params"]
        self.buffer = self._buffer()
        sizes = [parameter.numel() for parameter in self._parameters]
        self._roots = torch.tensor(sizes, dtype=torch.float64).sqrt().to(self.buffer.data.device)
        self._make_state()
        self.leave_out(())

    def _make_state(self) -> None:
        """The state before the first update, with the group's options."""
        like, has_moment = self.buffer.data, self._group["beta1"] is not None
        places = [x for x, parameter in enumerate(self._parameters) if parameter.dim() < 2]
        self._matrices = [
            _Matrix(
                place,
                like.new_zeros(p.shape[:-1]),
                like.new_zeros(p.shape[:-2] + p.shape[-1:]),
                like.new_zeros(p.shape) if has_moment else None,
            )
            for place, p in enumerate(self._parameters)
            if p.dim() >= 2
        ]
        sizes = [self._parameters[place].numel() for place in places]
        of_vectors, counts = torch.tensor([places, sizes], dtype=torch.int64)
        owners = of_vectors.repeat_interleave(counts)
        self._vectors = _Vectors(
            places,
            sizes,
            owners.to(like.device),
            like.new_zeros(sum(sizes)),
            like.new_zeros(sum(sizes)) if has_moment else None,
        )
        count = len(self._parameters)
        self._steps = torch.zeros(count, dtype=torch.float64, device=like.device)
        self._rms = like.new_zeros(count)
        self._places = of_vectors.to(like.device)

    def _buffer(self) -> FlatBuffer:
        (buffer,) = flat_buffers(self._group["params"])
        return buffer

    def _in_order(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat`` [N], in the order of the group; the buffer may have another order."""
        views = dict(zip(map(id, self.buffer.parameters), self.buffer.views(flat), strict=True))
        return [views[id(parameter)] for parameter in self._parameters]

    # --- What the captured step calls; `FlatAdam` and `AdamState` have the same methods ----------

    @property
    def fused(self) -> Adafactor:
        """See ``FlatAdam.fused``."""
        return self

    def split(self, low: Tensor) -> None:
        """The float32 parameters stay as they are."""

    def join(self) -> None:
        """See `split`."""

    def gather(self) -> None:
        """The state is not sharded."""

    def release(self) -> None:
        """See `gather`."""

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Let `update` skip these parameters, which have no gradient."""
        unused = {id(p) for p in parameters}
        used = [id(p) not in unused for p in self._parameters]
        self._used = torch.tensor(used, device=self._steps.device)
        self._is_used = used

    @torch.no_grad()
    def update(
        self, gradient: Tensor, low: Tensor | None, lr: Tensor, multiplier: Tensor, norm: Tensor,
        max_norm: float, clip_eps: float, updated: Callable[[int], None] = lambda place: None,
        cast: ops.WeightCast | None = None,
    ) -> None:  # fmt: skip
        """Update the parameters with scalars on the device; see ``AdamState.update``.

        If norm * multiplier is not finite, nothing changes. ``gradient`` is overwritten then.
        """
        group, dtype = self._group, self.buffer.data.dtype
        total = norm.double() * multiplier
        is_finite = total.isfinite()
        gradient.masked_fill_(~is_finite, 0.0)
        factor = multiplier.double()
        if max_norm > 0:
            factor = factor * (max_norm / (total + clip_eps)).clamp(max=1.0)
        factor = factor.masked_fill(~is_finite, 0.0).to(dtype)
        values, gradients = self._in_order(self.buffer.data), self._in_order(gradient)
        acts = self._used & is_finite  # [M]
        self._steps += acts
        decays = (1.0 - self._steps ** group["decay_rate"]).masked_fill_(~acts, 1.0).to(dtype)
        rms = torch.stack(torch._foreach_norm(values)).double() / self._roots
        self._rms.copy_(torch.where(acts, rms.to(dtype), self._rms))
        rates = lr.double().expand(len(values))
        if group["scale_parameter"]:
            scales = rms.clamp_min(group["eps"][1])
            rates = rates * scales.masked_fill(~acts, 1.0).cumprod(0)
        rates = rates.masked_fill(~acts, 0.0)
        self._update_vectors(values, gradients, factor, decays, rates, acts)
        for matrix in self._matrices:
            x = matrix.place
            if self._is_used[x]:
                g = gradients[x].to(dtype, copy=True).mul_(factor)
                self._normalise(matrix, g, decays[x], acts[x])
                scale = self._scale(torch.linalg.vector_norm(g).double() / self._roots[x])
                self._change(values[x], g, matrix.moment, scale * rates[x], rates[x], acts[x])
        if low is not None:
            low.copy_(self.buffer.data)
            if cast is not None:
                ops.fp8_weights(low, cast)
        updated(0)

    def _normalise(self, matrix: _Matrix, g: Tensor, decay: Tensor, act: Tensor) -> None:
        """Update the averages of squares of g, and divide g by their root."""
        square = g.square().add_(self._group["eps"][0])
        for average, dim in ((matrix.row, -1), (matrix.column, -2)):
            average.mul_(decay).add_(square.mean(dim).mul_(1.0 - decay))
        row = (matrix.row / matrix.row.mean(-1, keepdim=True)).rsqrt_()
        # A skipped update may be the first, with averages of 0.
        g.mul_(row.masked_fill_(~act, 0.0).unsqueeze(-1))
        g.mul_(matrix.column.rsqrt().masked_fill_(~act, 0.0).unsqueeze(-2))

    def _scale(self, rms: Tensor) -> Tensor:
        """Factors of updates with these RMS, so that none exceeds the threshold."""
        return 1.0 / (rms / self._group["clip_threshold"]).clamp_min(1.0)

    def _update_vectors(
        self, values: list[Tensor], gradients: list[Tensor], factor: Tensor, decays: Tensor,
        rates: Tensor, acts: Tensor,
    ) -> None:  # fmt: skip
        places, sizes, owners, squares, moment = self._vectors
        if not places:
            return
        value, g = (torch.cat([x[p].flatten() for p in places]) for x in (values, gradients))
        g = g.to(value.dtype).mul_(factor)
        decay, act = decays[owners], acts[owners]
        squares.mul_(decay).add_(g.square().add_(self._group["eps"][0]).mul_(1.0 - decay))
        g.mul_(squares.rsqrt().masked_fill_(~act, 0.0))
        scale = torch.ones_like(rates)
        norms = torch.stack(torch._foreach_norm(list(g.split(sizes)))).double()
        scale = scale.index_copy(0, self._places, self._scale(norms / self._roots[self._places]))
        self._change(value, g, moment, (scale * rates)[owners], rates[owners], act)
        flat = [values[place].view(-1) for place in places]
        torch._foreach_copy_(flat, list(value.split(sizes)))

    def _change(
        self, value: Tensor, g: Tensor, moment: Tensor | None, scale: Tensor, rate: Tensor,
        act: Tensor,
    ) -> None:  # fmt: skip
        """Subtract scale * g from value, in place, or if there is one its moment. scale, rate, act:
        of the shape of value, or 0-dim."""
        group, dtype = self._group, value.dtype
        g.mul_(scale.to(dtype))
        if moment is not None:
            beta1 = 1.0 - act.to(dtype) * (1.0 - group["beta1"])
            moment.mul_(beta1).add_(g.mul_(1.0 - beta1))
            g = moment * act
        if group["weight_decay"] != 0:
            value.mul_((1.0 - group["weight_decay"] * rate).to(dtype))
        value.sub_(g)

    # --- torch's methods -------------------------------------------------------------------------

    def update_all(self) -> None:
        """Update every parameter that has a gradient, as it is."""
        if not self.buffer.intact():
            self.buffer = self._buffer()
        gradient, used = self.buffer.gather_gradients()
        pairs = zip(self.buffer.parameters, used, strict=True)
        self.leave_out(parameter for parameter, is_used in pairs if not is_used)
        one = torch.ones((), dtype=torch.float64, device=gradient.device)
        self.update(gradient, None, one * self._group["lr"], one, one, 0.0, 0.0)

    def _states(self) -> dict[Tensor, dict[str, Any]]:
        """fairseq's state of each parameter, but for the number of its updates."""
        states: dict[int, dict[str, Any]] = {}
        for place, row, column, moment in self._matrices:
            states[place] = {"exp_avg_sq_row": row, "exp_avg_sq_col": column, "exp_avg": moment}
        places, sizes, _, squares, moments = self._vectors
        parts = moments.split(sizes) if moments is not None else [None] * len(places)
        for place, square, part in zip(places, squares.split(sizes), parts, strict=True):
            states[place] = {"exp_avg_sq": square, "exp_avg": part}
        return {
            parameter: {
                "step": 0,
                **{name: x for name, x in states[place].items() if x is not None},
                "RMS": self._rms[place],
            }
            for place, parameter in enumerate(self._parameters)
        }

    def state_dict(self) -> dict[str, Any]:
        """fairseq's format."""
        self.state.clear()
        counts = self._steps.tolist()
        for count, (parameter, state) in zip(counts, self._states().items(), strict=True):
            if count:
                self.state[parameter] = {**state, "step": int(count)}
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of fairseq's.

        Raises:
            UserError: the state belongs to other parameters.
        """
        saved = state_dict["param_groups"]
        if len(saved) != 1 or len(saved[0]["params"]) != len(self._parameters):
            raise _OTHER
        self._group.update({key: value for key, value in saved[0].items() if key != "params"})
        self._make_state()  # the file decides whether there is a first moment, as in fairseq
        states = zip(saved[0]["params"], self._states().values(), strict=True)
        for place, (index, state) in enumerate(states):
            found = state_dict["state"].get(index)
            if found is None:
                continue
            self._steps[place] = found["step"]
            for name, tensor in state.items():
                if name == "step":
                    continue
                if name not in found or torch.as_tensor(found[name]).shape != tensor.shape:
                    raise _OTHER
                tensor.copy_(torch.as_tensor(found[name]))


_OTHER = UserError(
    "The optimizer state in the checkpoint is not that of Adafactor with this model's parameters "
    "and flags: reset the optimizer with --reset-optimizer."
)
