"""Argument checks of the public functions.

For tensors on a GPU most checks read only shapes, dtypes, devices and strides: reading a value
makes the host wait for the GPU. `check_range` and `check_power_of_two` read values on a CPU, and on
a GPU only with LIGHTSEQ_CHECK_INDICES=1. `check_boundaries` reads the values of a GPU tensor once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import Dropout

Shape = Sequence[int | str]  # a str stands for any size
Dtypes = Sequence[torch.dtype]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)
_TRUSTED = "_lightseq_boundaries"  # attribute of tensors: (_version, rows, longest)


def check_tensor(
    op: str, name: str, x: Tensor, shape: Shape, dtypes: Dtypes, like: Tensor | None = None
) -> None:
    """Raise ValueError unless x has this shape, one of the dtypes and the device of `like`."""
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


def check_rows(
    op: str, name: str, x: Tensor, shape: Shape, dtypes: Dtypes, like: Tensor | None = None
) -> None:
    """As `check_tensor`; the last dimension of x must also be contiguous.

    Kernels read rows 16 bytes at a time.
    """
    check_tensor(op, name, x, shape, dtypes, like)
    if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel():
        raise ValueError(
            f"{op}: {name} must be contiguous in its last dimension, its strides are {x.stride()}"
        )


def check_contiguous(
    op: str, name: str, x: Tensor, shape: Shape, dtypes: Dtypes, like: Tensor | None = None
) -> None:
    """As `check_tensor`; x must also be contiguous."""
    check_tensor(op, name, x, shape, dtypes, like)
    if not x.is_contiguous():
        found = f"stride is {x.stride(0)}" if x.dim() == 1 else f"strides are {x.stride()}"
        raise ValueError(f"{op}: {name} must be contiguous, its {found}")


def check_vectors(op: str, like: Tensor, dtypes: Dtypes, **vectors: Tensor | None) -> None:
    """Raise ValueError unless each vector that is given is [C], for rows `like` [T, C]."""
    for name, vector in vectors.items():
        if vector is not None:
            check_tensor(op, name, vector, like.shape[1:], dtypes, like)


def check_dropout(op: str, dropout: Dropout, like: Tensor) -> None:
    """Raise ValueError unless p is in [0, 1) and rng is int64 [2] = (seed, micro-batch number)."""
    p, rng, _ = dropout
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p must be at least 0 and below 1, got {p}")
    check_contiguous(op, "rng", rng, (2,), (torch.int64,), like)


def _has_values(x: Tensor) -> bool:
    """False on the meta device, for torch's fake tensors (a subclass) and in torch.compile."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and not x.is_meta


def _may_wait(x: Tensor) -> bool:
    """Whether a check may read values on every call: on a CPU, or with LIGHTSEQ_CHECK_INDICES=1."""
    return x.device.type == "cpu" or os.environ.get("LIGHTSEQ_CHECK_INDICES") == "1"


def check_range(op: str, name: str, indices: Tensor, size: int, letter: str) -> None:
    """Raise ValueError on indices outside [0, size); on a GPU only with LIGHTSEQ_CHECK_INDICES=1.

    Without that variable a CUDA kernel that reads such an index fails with a device-side assertion,
    and the process cannot use the GPU any more.
    letter: name of the size in messages.
    """
    if not _has_values(indices) or not _may_wait(indices) or indices.numel() == 0:
        return
    least, most = (int(x) for x in indices.aminmax())
    if least < 0 or most >= size:
        worst = least if least < 0 else most
        raise ValueError(f"{op}: {name} must be in [0, {letter}) = [0, {size}), got {worst}")


def check_power_of_two(op: str, name: str, x: Tensor, most: int) -> None:
    """Raise ValueError unless every number of x is 2^n with -most <= n <= most; read only as in
    `check_range`."""
    if not _has_values(x) or not _may_wait(x):
        return
    for value in x.detach().flatten().tolist():
        mantissa, exponent = math.frexp(value)
        if mantissa != 0.5 or abs(exponent - 1) > most:
            raise ValueError(
                f"{op}: {name} must be {'powers' if x.dim() else 'a power'} of two from 2^-{most} "
                f"to 2^{most}, got {value}"
            )


def check_boundaries(
    op: str, name: str, boundaries: Tensor, rows: int, longest: tuple[str, int] | None = None,
    used: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ValueError unless cu_seqlens begin with 0, never descend and stay in [0, rows].

    longest: name and value of the argument that limits the length of a sentence.
    used: the numbers of some sentences: those of others may have any boundaries.
    On a GPU the values are read (the host waits) when this tensor is first checked, and again after
    a write to it. The result is cached on the tensor, see `trust_boundaries`. During capture
    nothing can be read; invalid boundaries then fail in a device-side assertion of the kernel.
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
    if used is None and values[:1] != [0]:
        first = values[0] if values else "nothing"
        raise ValueError(f"{op}: {name} must begin with 0, begins with {first}")
    sentences = range(len(values) - 1)
    for place in sentences if used is None else [n for n in used.tolist() if n in sentences]:
        start, end = values[place : place + 2]
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
    # Inference tensors have no version counter to detect writes.
    if used is None and not boundaries.is_inference():
        trust_boundaries(boundaries, end, most)


def trust_boundaries(boundaries: Tensor, rows: int, longest: int) -> Tensor:
    """Return the boundaries, marked as valid: `check_boundaries` does not read them on a GPU.

    The caller knows that they are cumulative lengths that begin with 0 and end at `rows` or below,
    and that no sentence is longer than `longest`. A write to the tensor makes the mark invalid; a
    write to an inference tensor is not detected.
    """
    if _has_values(boundaries):
        setattr(boundaries, _TRUSTED, (_version(boundaries), rows, longest))
    return boundaries


def _version(x: Tensor) -> int:
    """torch's version counter, which counts writes; 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version
