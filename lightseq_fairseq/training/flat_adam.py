"""Adam over flat buffers: one kernel updates all parameters; results and files are fairseq's.

Shapes: N = elements of a parameter buffer, including alignment gaps; S = elements of the parts of
it that one rank updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.parameters import ALIGNMENT, FlatBuffer, flat_buffers
from lightseq_fairseq.training.exchange import Exchange

_CLIP_EPS = 1e-6  # fairseq.utils.clip_grad_norm_ divides by norm + 1e-6
_HALF = (torch.float16, torch.bfloat16)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = 1 << 20  # parameters that one kernel splits or joins


@dataclass
class _Span:
    """Neighbouring parameters ``first`` to ``last`` (inclusive) with the same step count."""

    first: int
    last: int
    # int64, the count once for each part of the buffer, since each part's update increments one.
    # The count of a part that has no element of the span stays behind.
    steps: Tensor


class _Whole(NamedTuple):
    """The state of a sharded buffer in host memory: moments [N] and counts of the parameters."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: list[int]


class _Flat:
    """A buffer, its Adam state, and the step count of each of its parameters.

    Attributes:
        parts: the elements of the buffer whose state this process has.
        exp_avg, exp_avg_sq: moments of the parts, [N], or [S] if they are sharded.
        masters: if they are sharded and no model owns them, the parts of the parameters, [S].
    """

    def __init__(self, buffer: FlatBuffer, group: dict[str, Any], expert: bool) -> None:
        self.buffer = buffer
        self.group = group
        self.expert = expert
        dtype = torch.float32 if buffer.data.dtype in _HALF else buffer.data.dtype
        self.exp_avg, self.exp_avg_sq = buffer.zeros(dtype), buffer.zeros(dtype)
        self.parts = [slice(0, len(buffer.data))]
        self._starts = [0]  # of the parts in the state
        self.masters: Tensor | None = None
        self._exchange: Exchange | None = None  # that of a sharded state
        self._whole: _Whole | None = None
        # Kept, because parameters that are split have no elements.
        self._ends = [
            offset + p.numel() for offset, p in zip(buffer.offsets, buffer.parameters, strict=True)
        ]
        self.set_steps([0] * len(buffer.parameters))

    @property
    def is_sharded(self) -> bool:
        """See `FlatAdam.is_sharded`."""
        return self._exchange is not None

    def moments(self) -> list[tuple[Tensor, ...]]:
        """Views of both moments of each parameter."""
        whole = (self.exp_avg, self.exp_avg_sq) if self._exchange is None else self._gathered()[:2]
        return list(zip(*(self.buffer.views(x) for x in whole), strict=True))

    def steps(self) -> list[int]:
        """Step count of each parameter; reads the device once per span."""
        if self._exchange is not None:
            return self._gathered().steps
        return self._own_steps()

    def _own_steps(self) -> list[int]:
        counts: list[int] = []
        for span in self.spans:
            counts += [int(span.steps.max())] * (span.last - span.first + 1)
        return counts

    def _gathered(self) -> _Whole:
        if self._whole is None:
            raise RuntimeError("the state of a sharded optimizer is read before gather()")
        return self._whole

    def shard(self, exchange: Exchange, has_masters: bool) -> None:
        """Keep the state of the parts that this rank updates, and free the rest."""
        counts = self.steps()
        self._exchange = exchange
        self.parts = [exchange.ranks.own(piece) for piece in exchange.pieces]
        self._starts, end = [], 0
        for part in self.parts:
            self._starts.append(end)
            end += -(-(part.stop - part.start) // ALIGNMENT) * ALIGNMENT

        def kept(x: Tensor) -> Tensor:
            mine = x.new_zeros(end)
            for part, own in zip(self.parts, self._split(mine), strict=True):
                own.copy_(x[part])
            return mine

        self.exp_avg, self.exp_avg_sq = kept(self.exp_avg), kept(self.exp_avg_sq)
        if has_masters:
            self.masters = kept(self.buffer.lend())
        self.set_steps(counts)

    def _split(self, state: Tensor) -> list[Tensor]:
        """The parts of a vector [S]."""
        return [
            state[start : start + part.stop - part.start]
            for start, part in zip(self._starts, self.parts, strict=True)
        ]

    def gather(self) -> None:
        """See `FlatAdam.gather`."""
        assert self._exchange is not None
        steps = torch.tensor(self._own_steps(), device=self.exp_avg.device)
        counts = self._exchange.ranks.largest(steps).tolist()
        first, second, masters = (
            None if x is None else self._exchange.whole(self._split(x))
            for x in (self.exp_avg, self.exp_avg_sq, self.masters)
        )
        if first is not None and second is not None:
            self._whole = _Whole(first, second, counts)
        if masters is not None:
            self.buffer.take_back(masters)

    def release(self) -> None:
        """See `FlatAdam.release`."""
        if self._whole is not None and self.masters is not None:
            self.buffer.lend()
        self._whole = None

    def set_steps(self, counts: list[int]) -> None:
        """Set the step count of each parameter."""
        self.spans: list[_Span] = []
        for place, count in enumerate(counts):
            if place and counts[place - 1] == count:
                self.spans[-1].last = place
            else:
                steps = torch.full((len(self.parts),), count, device=self.exp_avg.device)
                self.spans.append(_Span(place, place, steps))

    def due(self, used: list[bool]) -> list[_Span]:
        """The spans of used parameters; a partly used span is split permanently."""
        if not all(used):
            self.spans = [piece for span in self.spans for piece in _cut(span, used)]
        return [span for span in self.spans if used[span.first]]

    def part(self, span: _Span) -> slice:
        """The elements of a span in the buffer, with the gaps between its parameters."""
        return slice(self.buffer.offsets[span.first], self._ends[span.last])

    def common(self, span: _Span, place: int) -> tuple[slice, slice]:
        """What a span and a part of the buffer have in common: in the buffer and in the state."""
        whole, part = self.part(span), self.parts[place]
        start = max(whole.start, part.start)
        stop = max(min(whole.stop, part.stop), start)
        shift = self._starts[place] - part.start
        return slice(start, stop), slice(start + shift, stop + shift)

    def update(
        self, gradient: Tensor, used: list[bool], multiplier: Any, norm: Any, max_norm: float
    ) -> None:
        """Update the parameters that are ``used`` with ``gradient`` [N]."""
        buffer, group = self.buffer, self.group
        beta1, beta2 = group["betas"]
        device = buffer.data.device
        lr, factor, norm = (_scalar(x, device) for x in (group["lr"], multiplier, norm))
        for span in self.due(used):
            part = self.part(span)
            low = buffer.data[part]
            half = low.dtype in _HALF
            ops.adam_step(
                low.float() if half else low, self.exp_avg[part], self.exp_avg_sq[part],
                gradient[part], low if half else None, span.steps[0],
                lr=lr, multiplier=factor, norm=norm, max_norm=max_norm, clip_eps=_CLIP_EPS,
                beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
            )  # fmt: skip


class _Split:
    """Stores float32 parameters as 16-bit remainders over their bfloat16 copies.

    The remainders overwrite the memory of the float32 parameters, which the buffer lends.
    Meanwhile the float32 parameters cannot be read.

    Args:
        low: bfloat16 [N], laid out like ``buffer``.

    Attributes:
        rest: int16 [N], the remainders, see ``ops.split_floats``.
    """

    def __init__(self, buffer: FlatBuffer, low: Tensor) -> None:
        self._buffer = buffer
        self._memory = buffer.lend()
        self.rest = self._memory.view(torch.int16)[: len(low)]
        parts = (x.split(_BLOCK) for x in (self._memory, low, self.rest))
        self._blocks = list(zip(*parts, strict=True))
        self._done = 0  # the first so many blocks are split

    def split(self) -> None:
        """Split the remaining blocks, first to last.

        The remainder of a block overwrites only blocks that have been read already.
        """
        while self._done < len(self._blocks):
            of_whole, of_low, of_rest = self._blocks[self._done]
            of_rest.copy_(ops.split_floats(of_whole, of_low))
            self._done += 1

    def join(self) -> None:
        """Restore the blocks, last to first, and then the buffer's parameters."""
        while self._done > 0:
            of_whole, of_low, of_rest = self._blocks[self._done - 1]
            of_whole.copy_(ops.join_floats(of_low, of_rest))
            self._done -= 1
        self._buffer.take_back(self._memory)


class FlatAdam(torch.optim.Optimizer):
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

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # fairseq's Adam reads "amsgrad" of the groups that it loads.
        self._flats: list[_Flat] = []
        self._split: _Split | None = None
        self._left_out: set[int] = set()  # id of each parameter that `fused_step` does not update
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
                self._flats += [_Flat(b, group, expert) for b in flat_buffers(members)]
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

    def _gather(self) -> list[tuple[_Flat, Tensor, list[bool]]]:
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
        """L2 norm of all gradients before clipping; the next update clips it to ``max_norm``.

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

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; update nothing if the norm is not finite."""
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
    def buffer(self) -> FlatBuffer:
        """The buffer of a fused optimizer: one whose parameters all lie in one buffer."""
        return self._flats[0].buffer

    @property
    def dtype(self) -> torch.dtype:
        """That of the moments of a fused optimizer."""
        return self._flats[0].exp_avg.dtype

    @property
    def is_sharded(self) -> bool:
        """Whether this process has the state of only a part of the parameters."""
        return any(flat.is_sharded for flat in self._flats)

    @torch.no_grad()
    def shard(self, exchange: Exchange, has_masters: bool) -> None:
        """Keep only the state that this rank needs, for good; for a fused optimizer.

        Afterwards use only `fused_step`, and `gather` before the state is read.

        has_masters: the parameters are float32 copies of a model's. Those are freed as well, and
            until `gather` the parameters are empty tensors.
        """
        self.join()
        self._flats[0].shard(exchange, has_masters)

    @torch.no_grad()
    def gather(self) -> None:
        """Gather the sharded state in the host memory of rank 0; all ranks must call it.

        There `state_dict` and the float32 parameters can be read until `release`.
        """
        self._flats[0].gather()

    def release(self) -> None:
        """Free what `gather` has gathered."""
        self._flats[0].release()
        self.state.clear()

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Let `fused_step` skip these parameters, which have no gradient: no decay, no step."""
        self._left_out = {id(p) for p in parameters}
        for flat in self._flats:  # now, because a graph's capture cannot create new step counts
            flat.due(self._used(flat))

    def _used(self, flat: _Flat) -> list[bool]:
        return [id(p) not in self._left_out for p in flat.buffer.parameters]

    @torch.no_grad()
    def split(self, low: Tensor) -> None:
        """Store each fp32 parameter as its 16-bit remainder over the bf16 copy ``low``.

        Only for a fused optimizer. An update then moves 2 bytes per parameter less. Until `join`
        the fp32 parameters cannot be read. Sharded parameters are not split.
        low: bfloat16 [N], laid out like `buffer`.

        `split` and `join` work block by block. If an error ends one of them (such as out of
        memory), nothing is lost: the next call of either one continues from that block.
        """
        if self.is_sharded:
            return
        if self._split is None:
            self._split = _Split(self.buffer, low)
        self._split.split()

    @torch.no_grad()
    def join(self) -> None:
        """Undo `split`: restore the float32 parameters. Call this before reading them."""
        if self._split is not None:
            self._split.join()
            self._split = None

    @torch.no_grad()
    def fused_step(
        self, gradient: Tensor, low: Tensor | None, lr: Tensor, multiplier: Tensor, norm: Tensor,
        max_norm: float, clip_eps: float, updated: Callable[[int], None] = lambda place: None,
    ) -> None:  # fmt: skip
        """Update the parameters of a fused optimizer with scalars on the device; for CUDA graphs.

        One launch updates neighbours that have been updated equally often. Those of `leave_out`
        are not updated. If the state is sharded, only this rank's parts are updated.
        gradient: [N], laid out like `buffer`. low: 16-bit copies of the parameters, which are
        updated too, or None. updated: called with the index of each piece after its part. The other
        arguments are those of ``ops.adam_step``. The factors of `multiply_grads` are ignored.
        """
        (flat,) = self._flats
        group = flat.group
        beta1, beta2 = group["betas"]
        spans = flat.due(self._used(flat))
        for place in range(len(flat.parts)):
            for span in spans:
                part, mine = flat.common(span, place)
                if part.start == part.stop:
                    continue
                if flat.masters is not None:
                    param = flat.masters[mine]
                else:
                    param = (flat.buffer.data if self._split is None else self._split.rest)[part]
                ops.adam_step(
                    param, flat.exp_avg[mine], flat.exp_avg_sq[mine], gradient[part],
                    None if low is None else low[part], span.steps[place],
                    lr=lr, multiplier=multiplier, norm=norm, max_norm=max_norm, clip_eps=clip_eps,
                    beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
                )  # fmt: skip
            updated(place)

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


def _cut(span: _Span, used: list[bool]) -> list[_Span]:
    """Cut the span into pieces, each entirely used or entirely unused."""
    edges = [p for p in range(span.first + 1, span.last + 1) if used[p] != used[p - 1]]
    if not edges:
        return [span]
    firsts, lasts = [span.first, *edges], [*(p - 1 for p in edges), span.last]
    # Step counts are tensors; each piece needs its own, since the pieces are updated separately.
    return [_Span(f, e, span.steps.clone()) for f, e in zip(firsts, lasts, strict=True)]


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """0-dim tensor on the device; float64 for a number, which is filled in without a host copy."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.full((), value, dtype=torch.float64, device=device)


def _clip_factor(max_norm: float, total: Tensor) -> Tensor:
    return (max_norm / (total + _CLIP_EPS)).clamp(max=1)
