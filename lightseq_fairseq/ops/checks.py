"""Argument checks of the public functions.

Of tensors on a GPU they read shapes, dtypes, devices and strides: a check that reads a value stops
the host until the GPU has caught up. `check_range` reads values on a CPU, and on a GPU where
LIGHTSEQ_CHECK_INDICES asks for it; `check_boundaries` reads those of a GPU once for each tensor.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
_TRUSTED = "_lightseq_boundaries"  # attribute of tensors: (_version, rows, longest)


def check_tensor(
    op: str,
    name: str,
    x: Tensor,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """Refuse x unless it has this shape (a str stands for any size), dtype and device of `like`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    sizes = x.shape
    fits = len(sizes) == len(shape)
    for have, want in zip(sizes, shape):
        if have != want and not isinstance(want, str):
            fits = False
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{op}: {name} must have shape [{wanted}], got {list(x.shape)}")
    if x.dtype not in dtypes:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        got = str(x.dtype).removeprefix("torch.")
        raise ValueError(f"{op}: {name} must be {wanted}, got {got}{_of_autocast(x)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{op}: {name} is on {x.device}, the other tensors are on {like.device}")


def _of_autocast(x: Tensor) -> str:
    if not torch.is_autocast_enabled(x.device.type):
        return ""
    return (
        "; torch.autocast does not convert what these ops are given: convert the layers "
        "(layer.to(torch.bfloat16)), or their inputs to the weights' dtype"
    )


def check_rows(op: str, name: str, x: Tensor) -> None:
    """Refuse x unless its last dimension is contiguous: kernels read rows 16 bytes at a time."""
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
        raise ValueError(
            f"{op}: {name} must be contiguous in its last dimension, its strides are {x.stride()}"
        )


def check_dropout(op: str, p: float, rng: Tensor, like: Tensor) -> None:
    """Refuse a drop probability outside [0, 1) and an rng that is not int64 [2] = (seed, batch)."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p must be at least 0 and below 1, got {p}")
    check_tensor(op, "rng", rng, (2,), (torch.int64,), like)
    if not rng.is_contiguous():
        raise ValueError(f"{op}: rng must be contiguous, its stride is {rng.stride(0)}")


def _has_values(x: Tensor) -> bool:
    """Not so on the device meta, for torch's fake tensors (a subclass) and in torch.compile."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and not x.is_meta


def _may_wait(x: Tensor) -> bool:
    """Whether every value may be read every time: on a CPU, or as LIGHTSEQ_CHECK_INDICES=1 asks."""
    return x.device.type == "cpu" or os.environ.get("LIGHTSEQ_CHECK_INDICES") == "1"


def check_range(op: str, name: str, indices: Tensor, size: int, letter: str) -> None:
    """Refuse indices outside [0, size), on a GPU with LIGHTSEQ_CHECK_INDICES=1 in the environment.

    Without it a CUDA kernel that meets such an index ends in a device-side assertion, after which
    the process cannot use the GPU any more.
    letter: what messages call the size.
    """
    if not _has_values(indices) or not _may_wait(indices) or indices.numel() == 0:
        return
    least, most = (int(x) for x in indices.aminmax())
    if least < 0 or most >= size:
        worst = least if least < 0 else most
        raise ValueError(f"{op}: {name} must be in [0, {letter}) = [0, {size}), got {worst}")


def check_boundaries(
    op: str, name: str, boundaries: Tensor, rows: int, longest: tuple[str, int] | None = None
) -> None:
    """Refuse cu_seqlens that do not begin with 0, descend or leave [0, rows].

    longest: name and value of the argument that no sentence may be longer than.
    On a GPU they are read, and waited for, when this tensor is first seen or has been written to
    since: what was read is kept on the tensor, as `trust_boundaries` does. While a CUDA graph is
    captured nothing can be read; wrong ones then end in a device-side assertion of the kernel.
    """
    if not _has_values(boundaries):
        return
    if not _may_wait(boundaries):
        version, end, most = getattr(boundaries, _TRUSTED, (None, 0, 0))
        fits = end <= rows and (longest is None or most <= longest[1])
        if fits and version == _version(boundaries):
            return
        if torch.cuda.is_current_stream_capturing():
            return
    end = most = 0
    values = boundaries.tolist()
    if values[:1] != [0]:
        first = values[0] if values else "nothing"
        raise ValueError(f"{op}: {name} must begin with 0, begins with {first}")
    for place, (start, end) in enumerate(itertools.pairwise(values)):
        if not 0 <= start <= end <= rows:
            raise ValueError(
                f"{op}: {name} must ascend within [0, {rows}], "
                f"sentence {place} is rows {start} to {end}"
            )
        if longest is not None and end - start > longest[1]:
            raise ValueError(
                f"{op}: {longest[0]} is {longest[1]}, "
                f"but sentence {place} of {name} has {end - start} rows"
            )
        most = max(most, end - start)
    if not boundaries.is_inference():  # of which nobody could tell that they have been written to
        trust_boundaries(boundaries, end, most)


def trust_boundaries(boundaries: Tensor, rows: int, longest: int) -> Tensor:
    """Give back the boundaries, which `check_boundaries` need not read on a GPU.

    They are known to be sums of lengths from 0 on that end at `rows` or before, of sentences of
    `longest` tokens or fewer. Writing to them ends the trust.
    """
    if _has_values(boundaries):
        setattr(boundaries, _TRUSTED, (_version(boundaries), rows, longest))
    return boundaries


def _version(x: Tensor) -> int:
    """torch's count of writes to a tensor, which those of inference mode do not have."""
    return 0 if x.is_inference() else x._version
