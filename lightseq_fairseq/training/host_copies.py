"""Copy a training state to host memory without waiting for the GPU."""

from __future__ import annotations

import contextlib
import copy
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from fairseq import utils
from torch import Tensor

from lightseq_fairseq.memory.graphs import wait_for

_HALF = (torch.float16, torch.bfloat16)
_LINE = 64  # bytes; the alignment of each tensor


class HostCopies:
    """Host memory for one copy of a state; it is reused for the next copy.

    With a GPU it is pinned memory, so that copies are asynchronous. On a CPU, or if pinning fails,
    copies are synchronous.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._unlock: weakref.finalize[..., Any] | None = None

    def reserve(self, size: int, device: torch.device) -> None:
        """Ensure ``size`` bytes for states on ``device``; allocation invalidates old copies."""
        if self._memory is not None and len(self._memory) >= size:
            return
        self.release()
        # A shared mapping: after a fork (data loading), copy-on-write moves none of its pages.
        self._memory = mmap.mmap(-1, max(size, 1))
        torch.frombuffer(self._memory, dtype=torch.uint8).zero_()  # makes the system commit pages
        if device.type != "cuda":
            return
        # In a separate thread: if pinning fails, the next kernel launch of its thread fails too.
        locking = threading.Thread(target=self._lock, args=(self._memory, device))
        locking.start()
        locking.join()

    def _lock(self, memory: mmap.mmap, device: torch.device) -> None:
        place = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        with torch.cuda.device(device):
            refused = int(torch.cuda.cudart().cudaHostRegister(place, len(memory), 0))
        if not refused:
            self._unlock = weakref.finalize(self, _unlock, place)
            self._unlock.atexit = False  # at exit the driver may have been shut down already

    def release(self) -> None:
        """Free the memory; copies of states must not be used any more."""
        if self._unlock is not None:
            self._unlock()
        self._memory = self._unlock = None

    def of(self, state: Any, device: torch.device) -> tuple[Any, Callable[[], None]]:
        """Copy a nested state as it is after all GPU work that has been launched so far.

        As in fairseq's ``move_to_cpu``, 16-bit tensors become float32. Each tensor has its own
        storage, since ``torch.save`` writes whole storages. Tied tensors stay tied. Everything that
        is not a tensor is copied too, since training continues and may change it.

        Returns:
            The copy, and a function that waits until its tensors are filled. The next call
            overwrites them.
        """
        tensors: dict[Any, Tensor] = {}

        def note(x: Tensor) -> Tensor:
            return tensors.setdefault(_identity(x), x)

        utils.apply_to_sample(note, state)
        self.reserve(sum(_room(x) for x in tensors.values()), device)
        assert self._memory is not None
        copies: dict[Any, Tensor] = {}
        start = 0
        for key, x in tensors.items():
            # Convert on the source device: a copy that also converts is synchronous.
            converted = x.detach().to(_dtype(x))
            copies[key] = _place(self._memory, start, x).copy_(converted, non_blocking=True)
            start += _room(x)
        arrived = None
        if device.type == "cuda":
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))

        def wait() -> None:
            if arrived is not None:
                wait_for(arrived)

        moved = utils.apply_to_sample(lambda x: copies[_identity(x)], state)
        return copy.deepcopy(moved, {id(x): x for x in copies.values()}), wait


def _identity(x: Tensor) -> Any:
    return x.device, x.data_ptr(), x.dtype, x.shape, x.stride()


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF else x.dtype


def _room(x: Tensor) -> int:
    """Bytes of a copy of ``x``, rounded up to the alignment."""
    return math.ceil(x.numel() * _dtype(x).itemsize / _LINE) * _LINE


def _place(memory: mmap.mmap, start: int, x: Tensor) -> Tensor:
    """An unfilled tensor like ``x`` at byte ``start``; its storage holds only this tensor."""
    like = torch.empty_like(x, dtype=_dtype(x), device="meta")
    if not x.numel():
        return torch.empty(x.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=x.numel(), offset=start)
    return flat.as_strided(x.shape, like.stride())


def _unlock(place: int) -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.cudart().cudaHostUnregister(place)
