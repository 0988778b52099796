"""What a step computes and moves: a record of its ops, from torch's dispatcher."""

from __future__ import annotations

import bisect
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightseq_fairseq.cli.profiling.timeline import class_of

# Ops that only describe memory, or allocate it.
_FREE = re.compile(
    r"aten::(view|_unsafe_view|as_strided|detach|t|transpose|permute|slice|select|split\w*|unbind|"
    r"unsqueeze|squeeze|expand|alias|empty\w*|new_empty\w*|_local_scalar_dense|reshape|lift_fresh|"
    r"record_stream|set_|resize_|is_pinned|_pin_memory|unsafe_split\w*)$"
)
_PROJECTION = re.compile(r"\.(q_proj|k_proj|v_proj)$")


class Call(NamedTuple):
    """An op of a step.

    Attributes:
        name: such as lightseq::linear_fwd.
        kind: its class, see `timeline.CLASSES`.
        place: the module of the parameter that it reads; of another op of ours that of the one
            before; else "".
        flop: multiplications and additions of its products.
        bytes: of all tensors that it reads or writes, each once.
        fp8: whether its products are of E4M3, which have a rate of their own.
        seconds: its time on a CPU; on a GPU that of the launch.
    """

    name: str
    kind: str
    place: str
    flop: float
    bytes: float
    fp8: bool
    seconds: float


@contextmanager
def recorded(parameters: Iterable[tuple[str, Tensor]], gpu: bool) -> Iterator[list[Call]]:
    """The ops that run within the block; on a GPU their seconds are those of their kernels."""
    recorder = Recorder(parameters)
    if not gpu:
        with recorder:
            yield recorder.calls
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with recorder:
            yield recorder.calls
        torch.cuda.synchronize()
    # The profiler has the same ops, and those within them, in the order of their begins.
    left = iter(sorted(profile.events(), key=lambda event: event.time_range.start))
    for place, call in enumerate(recorder.calls):
        event = next((event for event in left if event.name == call.name), None)
        if event is None:
            break
        recorder.calls[place] = call._replace(seconds=event.device_time_total / 1e6)


class Recorder(TorchDispatchMode):
    """Records the ops that run within the block.

    Args:
        parameters: the names of parameters, and of other tensors as large, such as gradients.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        found = sorted((x.data_ptr(), x.nbytes, name) for name, x in parameters if x.nbytes)
        self._starts = [start for start, _, _ in found]
        self._ends = [(start + size, name) for start, size, name in found]
        self._is_inside, self._last = False, ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = f"{func.namespace}::{func.overloadpacket.__name__}"
        if self._is_inside or _FREE.match(name):
            return func(*args, **kwargs)
        self._is_inside = True  # a reference consists of ops
        try:
            began = time.perf_counter()
            result = func(*args, **kwargs)
            seconds = time.perf_counter() - began
            given = {a.name: x for a, x in zip(func._schema.arguments, args)} | kwargs
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            kind = class_of(name)
            flop = _flop(func, name, args, kwargs, given, result)
            size = sum({(x.data_ptr(), x.nbytes): x.nbytes for x in tensors}.values())
            fp8 = any(given.get(f"{x}_scale") is not None for x in ("x", "dy"))
            place = self._place(kind, name, tensors)
            self.calls.append(Call(name, kind, place, flop, size, fp8, seconds))
        finally:
            self._is_inside = False
        return result

    def _place(self, kind: str, name: str, tensors: Sequence[Tensor]) -> str:
        if kind == "optimizer":
            return ""
        for tensor in tensors:
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            at = bisect.bisect_right(self._starts, tensor.data_ptr()) - 1
            if at >= 0 and tensor.data_ptr() < self._ends[at][0]:
                self._last = _PROJECTION.sub("", self._ends[at][1].rpartition(".")[0])
                return self._last
        return self._last if name.startswith("lightseq::") else ""


def _flop(
    func: Any, name: str, args: Any, kwargs: Any, given: Mapping[str, Any], out: Any
) -> float:
    if name in _OURS:
        return _OURS[name](given)
    formula = flop_registry.get(func.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def _products(count: Callable[[Mapping[str, Any]], int]) -> Callable[[Mapping[str, Any]], float]:
    """2 T K N for each product: T rows, and a weight of K N numbers."""

    def flop(given: Mapping[str, Any]) -> float:
        name = "dy" if "dy" in given or "dy_values" in given else "x"
        return 2.0 * count(given) * _rows(given, name) * _one_of(given, "weight").numel()

    return flop


def _one_of(given: Mapping[str, Any], name: str) -> Tensor:
    """The tensor of an operand: itself, or in fp8 its values or its transpose."""
    names = (name, f"{name}_values", f"{name}_transpose")
    return next(x for each in names if (x := given.get(each)) is not None)


def _rows(given: Mapping[str, Any], name: str) -> int:
    x = _one_of(given, name)
    return x.shape[1] if x is given.get(f"{name}_transpose") else len(x)


def _pairs(products: int) -> Callable[[Mapping[str, Any]], float]:
    """2 H D for each product and each pair of a query and a key that it sees."""

    def flop(given: Mapping[str, Any]) -> float:
        queries, keys = (given[name].diff().tolist() for name in ("cu_q", "cu_k"))
        seen = sum(q * (q + 1) / 2 if given["causal"] else q * k for q, k in zip(queries, keys))
        return 2.0 * products * seen * given["q"][0].numel() if len(given["q"]) else 0.0

    return flop


_OURS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "lightseq::linear_fwd": _products(lambda given: 1),
    "lightseq::linear_activation_fwd": _products(lambda given: 1),
    "lightseq::linear_bwd": _products(
        lambda given: (
            (given["dweight"] is not None) + (given["need_dx"] or given["onto"] is not None)
        )
    ),
    "lightseq::activation_linear_bwd": _products(lambda given: 1 + (given["dweight"] is not None)),
    "lightseq::attention_fwd": _pairs(2),
    "lightseq::attention_bwd": _pairs(5),
}
