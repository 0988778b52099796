"""Adam over flat buffers: one kernel for all parameters, fairseq's numbers and file format.

Letters: N elements of a buffer of parameters, alignment gaps included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.parameters import FlatBuffer, flat_buffers

_CLIP_EPS = 1e-6  # fairseq.utils.clip_grad_norm_ divides by norm + 1e-6
_HALF = (torch.float16, torch.bfloat16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 1 << 20  # parameters that are split or joined at a time


@dataclass
class _Span:
    """Neighbouring parameters ``first`` to ``last`` which have taken equally many steps."""

    first: int
    last: int
    step: Tensor  # int64, 0-dim


class _Flat:
    """A buffer, its Adam state, and how often each of its parameters has been updated."""

    def __init__(self, buffer: FlatBuffer, group: dict[str, Any], expert: bool) -> None:
        self.buffer = buffer
        self.group = group
        self.expert = expert
        dtype = torch.float32 if buffer.data.dtype in _HALF else buffer.data.dtype
        self.exp_avg, self.exp_avg_sq = buffer.zeros(dtype), buffer.zeros(dtype)
        self.moments = list(
            zip(buffer.views(self.exp_avg), buffer.views(self.exp_avg_sq), strict=True)
        )
        self.set_steps([0] * len(buffer.parameters))

    def steps(self) -> list[int]:
        """Updates taken by each parameter; reads the device once a span."""
        counts: list[int] = []
        for span in self.spans:
            counts += [int(span.step)] * (span.last - span.first + 1)
        return counts

    def set_steps(self, counts: list[int]) -> None:
        """``counts`` holds the updates taken by each parameter."""
        self.spans: list[_Span] = []
        for place, count in enumerate(counts):
            if place and counts[place - 1] == count:
                self.spans[-1].last = place
            else:
                step = torch.full((), count, device=self.buffer.data.device)
                self.spans.append(_Span(place, place, step))

    def due(self, used: list[bool]) -> list[_Span]:
        """The spans of used parameters; a span that is used in part is cut for good."""
        if not all(used):
            self.spans = [piece for span in self.spans for piece in _cut(span, used)]
        return [span for span in self.spans if used[span.first]]

    def update(
        self, gradient: Tensor, used: list[bool], multiplier: Any, norm: Any, max_norm: float
    ) -> None:
        """One step with ``gradient`` [N] on the parameters that are ``used``."""
        buffer, group = self.buffer, self.group
        beta1, beta2 = group["betas"]
        device = buffer.data.device
        lr, factor, norm = (_scalar(x, device) for x in (group["lr"], multiplier, norm))
        for span in self.due(used):
            start = buffer.offsets[span.first]
            stop = buffer.offsets[span.last] + buffer.parameters[span.last].numel()
            low = buffer.data[start:stop]
            half = low.dtype in _HALF
            ops.adam_step(
                low.float() if half else low, self.exp_avg[start:stop], self.exp_avg_sq[start:stop],
                gradient[start:stop], low if half else None, span.step,
                lr=lr, multiplier=factor, norm=norm, max_norm=max_norm, clip_eps=_CLIP_EPS,
                beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            )  # fmt: skip


class _Split:
    """A buffer's float32 parameters while only what bfloat16 ones leave of them is kept.

    The rest lies in the parameters' own memory, which the buffer lends: they cannot be read.

    Args:
        low: bfloat16 [N], laid out like ``buffer``.

    Attributes:
        rest: int16 [N], see ``ops.split_floats``.
    """

    def __init__(self, buffer: FlatBuffer, low: Tensor) -> None:
        self._buffer = buffer
        self._memory = buffer.lend()
        self.rest = self._memory.view(torch.int16)[: len(low)]
        parts = (x.split(_BLOCK) for x in (self._memory, low, self.rest))
        self._blocks = list(zip(*parts, strict=True))
        self._done = 0  # blocks, from the first one on

    def split(self) -> None:
        """Go on, block by block, forward: what is overwritten has been read."""
        while self._done < len(self._blocks):
            of_whole, of_low, of_rest = self._blocks[self._done]
            of_rest.copy_(ops.split_floats(of_whole, of_low))
            self._done += 1

    def join(self) -> None:
        """The way back; the buffer has its parameters again at its end."""
        while self._done > 0:
            of_whole, of_low, of_rest = self._blocks[self._done - 1]
            of_whole.copy_(ops.join_floats(of_low, of_rest))
            self._done -= 1
        self._buffer.take_back(self._memory)


class FlatAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay whose state is flat in memory and native in files.

    Parameters become views of flat buffers unless the model has laid them out so already; the
    moments lie in equally flat ones, float32 (float64 for float64 parameters). 16-bit parameters,
    which fairseq passes with ``--memory-efficient-fp16``, are updated in float32 and rounded once;
    the float32 copy lives as long as the update does, because that flag asks for its memory.

    A parameter without a gradient is left alone as in fairseq: no decay, no step, and from then on
    a step count of its own. Gradients are gathered by ``clip_grad_norm`` or ``step`` and scaled
    inside the update only, so that ``.grad`` shows them as backward has left them.

    Args:
        params: parameters or torch's parameter groups.
        lr, betas, eps, weight_decay: defaults of the groups, as in ``torch.optim.AdamW``.

    Source: ``fairseq.optim.adam.Adam``; Loshchilov and Hutter 2019.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    # fairseq's hack would put its own tensors in the place of our views after loading.
    disable_mem_eff_fp16_loading_hack = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # fairseq's Adam reads amsgrad in the groups that it loads.
        self._flats: list[_Flat] = []
        self._split: _Split | None = None
        super().__init__(params, {**defaults, "amsgrad": False})
        self._lay_out()
        self._reset_factors()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        if self._flats:  # not yet while the parent's __init__ adds the first ones
            self._lay_out()

    def _reset_factors(self) -> None:
        self._multiplier: float | Tensor = 1.0
        self._norm: float | Tensor = 1.0  # of the gradients as they are, before the multiplier
        self._max_norm = 0.0

    def _lay_out(self) -> None:
        """Build the buffers, or build them anew around the state there is."""
        states = {id(p): state for p, state in self._states()}
        self._flats = []
        for group in self.param_groups:
            for expert in (False, True):  # fairseq leaves experts out of the norm
                members = [p for p in group["params"] if hasattr(p, "expert") == expert]
                self._flats += [_Flat(b, group, expert) for b in flat_buffers(members)]
        if states:
            self._set_states(states)

    def _states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """(parameter, native state) of all parameters that have been updated."""
        return [
            (parameter, {"step": step, **dict(zip(_MOMENTS, views, strict=True))})
            for flat in self._flats
            for parameter, step, views in zip(
                flat.buffer.parameters, flat.steps(), flat.moments, strict=True
            )
            if step
        ]

    def _set_states(self, states: dict[int, dict[str, Any]]) -> None:
        """Inverse of ``_states``, by ``id(parameter)``; who is missing has not been updated."""
        for flat in self._flats:
            found = [states.get(id(p)) for p in flat.buffer.parameters]
            for state, views in zip(found, flat.moments, strict=True):
                for name, view in zip(_MOMENTS, views, strict=True):
                    if state is None:
                        view.zero_()
                    else:
                        view.copy_(state[name].reshape(view.shape))
            flat.set_steps([int(state["step"]) if state else 0 for state in found])

    def _gather(self) -> list[tuple[_Flat, Tensor, list[bool]]]:
        if not all(flat.buffer.intact() for flat in self._flats):
            self._lay_out()
        return [(flat, *flat.buffer.gather_gradients()) for flat in self._flats]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, whatever ``set_to_none`` says, and forget their factor."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._reset_factors()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients by ``c`` (number or 0-dim tensor) in the coming update."""
        self._fold_clip()
        if isinstance(c, Tensor):
            c = c.to(self._device)
        self._multiplier = self._multiplier * c

    @property
    def _device(self) -> torch.device:
        return self.param_groups[0]["params"][0].device

    def _fold_clip(self) -> None:
        # The op clips last of all: what is asked for after a clip has to find it done.
        if self._max_norm > 0:
            total = torch.as_tensor(self._norm * self._multiplier)
            self._multiplier = self._multiplier * _clip_factor(self._max_norm, total)
            self._max_norm = 0.0

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """L2 norm of all gradients before clipping; the coming update clips it to ``max_norm``.

        Args:
            max_norm: 0 only measures.
            aggregate_norm_fn: maps the norm of this rank's gradients to that of all, as fairseq's
                sharded training asks.

        Returns:
            0-dim float32 tensor (float64 for float64 gradients), all factors included.
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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; none where the norm is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.join()
        for flat, gradient, used in self._gather():
            flat.update(gradient, used, self._multiplier, self._norm, self._max_norm)
        self._reset_factors()
        return loss

    @property
    def is_fused(self) -> bool:
        """Whether all parameters lie in one intact buffer and have been updated equally often."""
        return (
            len(self._flats) == 1
            and len(self._flats[0].spans) == 1
            and not self._flats[0].expert
            and self._flats[0].buffer.intact()
        )

    @property
    def buffer(self) -> FlatBuffer:
        """The buffer of a fused optimizer."""
        return self._flats[0].buffer

    @torch.no_grad()
    def split(self, low: Tensor) -> None:
        """Keep of a fused optimizer's float32 parameters only what ``low`` leaves of them.

        An update moves 2 bytes a parameter less then. Until `join` the parameters cannot be read.
        low: bfloat16 [N], laid out like `buffer`.

        It is done block by block, and so is `join`. Where an error ends one of them (memory may
        run out), nothing is lost: the next call of either goes on from there.
        """
        if self._split is None:
            self._split = _Split(self.buffer, low)
        self._split.split()

    @torch.no_grad()
    def join(self) -> None:
        """Make the parameters float32 again; whoever reads them calls this before."""
        if self._split is not None:
            self._split.join()
            self._split = None

    @torch.no_grad()
    def fused_step(
        self, gradient: Tensor, low: Tensor | None, lr: Tensor, multiplier: Tensor, norm: Tensor,
        max_norm: float, clip_eps: float,
    ) -> None:  # fmt: skip
        """Update all parameters of a fused optimizer by scalars on its device; for CUDA graphs.

        gradient: [N], laid out like `buffer`. low: 16-bit parameters that follow, or None. The
        rest as in ``ops.adam_step``; whatever `multiply_grads` was told does not count.
        """
        (flat,) = self._flats
        group = flat.group
        beta1, beta2 = group["betas"]
        param = flat.buffer.data if self._split is None else self._split.rest
        ops.adam_step(
            param, flat.exp_avg, flat.exp_avg_sq, gradient, low, flat.spans[0].step,
            lr=lr, multiplier=multiplier, norm=norm, max_norm=max_norm, clip_eps=clip_eps,
            beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """fairseq's format: {step, exp_avg, exp_avg_sq} of each parameter updated so far."""
        self.join()
        self.state.clear()
        self.state.update(self._states())
        for group in self.param_groups:
            if "step" in group:  # a state of apex has been loaded, which counts in the group
                steps = [self.state[p]["step"] for p in group["params"] if p in self.state]
                group["step"] = max(steps, default=0)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of fairseq's Adam, with or without apex, or of this one.

        The moments may come as one tensor for each parameter or as one vector of all parameters
        in order (``--fp16`` with flat gradients), whichever way this optimizer is given them.

        Raises:
            UserError: the state belongs to other parameters.
        """
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise UserError(
                f"the checkpoint's optimizer has {len(saved_groups)} parameter groups and this "
                f"run has {len(self.param_groups)}; continue with --reset-optimizer"
            )
        states: dict[int, dict[str, Any]] = {}
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            found = [_read(state_dict["state"].get(i), saved) for i in saved["params"]]
            states.update(_match(group["params"], found))
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._set_states(states)


def _read(state: dict[str, Any] | None, group: dict[str, Any]) -> dict[str, Any] | None:
    """Step and moments of one saved entry, None if it has not been updated."""
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
    """``id(parameter)`` -> state, cutting or joining vectors of several parameters."""
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
            f"the checkpoint's optimizer holds {total:,} numbers in {len(saved)} tensors and this "
            f"model trains {sum(sizes):,} in {len(sizes)}; continue with --reset-optimizer"
        )
    cut = [torch.cat([s[name].flatten() for s in states]).split(sizes) for name in _MOMENTS]
    step = steps.pop()
    return {
        id(p): {"step": step, **dict(zip(_MOMENTS, moments, strict=True))}
        for p, *moments in zip(parameters, *cut, strict=True)
    }


def _cut(span: _Span, used: list[bool]) -> list[_Span]:
    """The span in pieces that are used as a whole or not at all."""
    edges = [p for p in range(span.first + 1, span.last + 1) if used[p] != used[p - 1]]
    if not edges:
        return [span]
    firsts, lasts = [span.first, *edges], [*(p - 1 for p in edges), span.last]
    # Counters are tensors and must not be shared: the pieces go separate ways from here.
    return [_Span(f, e, span.step.clone()) for f, e in zip(firsts, lasts, strict=True)]


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """0-dim tensor on the device, float64 if made of a number; nothing is copied from the host."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.full((), value, dtype=torch.float64, device=device)


def _clip_factor(max_norm: float, total: Tensor) -> Tensor:
    return (max_norm / (total + _CLIP_EPS)).clamp(max=1)
