"""Finds and loads the compiled CUDA kernels; ops without a kernel use their torch reference.

``scripts/build_cuda.py`` writes one library per CUDA major version into ``lightseq_fairseq/_lib``.
Importing `lightseq_fairseq.ops` loads it, which registers its kernels for the ops. An op without a
kernel runs its torch reference on a GPU as well. The results are the same except for rounding, but
it is several times slower, and the log warns once. ``lightseq-doctor`` prints the `Status`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

# Do not resolve links: gpu_check.sh creates links to this package next to another library.
DIRECTORY = Path(__file__).absolute().parents[1] / "_lib"
_HOPPER = 90  # compute capability
BUILD_COMMAND = "python scripts/build_cuda.py"

# Registrations exist as long as this object.
_IMPLEMENTATIONS = torch.library.Library("lightseq", "IMPL")


@dataclass(frozen=True)
class Status:
    """The result of `load`."""

    path: Path | None  #: the library that was loaded
    reason: str  #: why none was loaded; "" if one was
    architectures: tuple[str, ...]  #: compute capabilities it was compiled for, such as "90"
    kernels: tuple[str, ...]  #: ops that have a CUDA kernel
    references: tuple[str, ...]  #: ops that run their torch reference on a GPU
    acts_as: int | None = None  #: test builds: the compute capability it assumes for every GPU


#: Op name without namespace -> reference implementation, in order of definition. The ops add
#: themselves; this module does not import them.
REFERENCES: dict[str, Callable[..., Any]] = {}

_status: Status | None = None


def load() -> Status:
    """Load the library, and register references for ops without a kernel; cached afterwards.

    A library that is missing or does not load raises no error: `Status.reason` says why.

    Raises:
        RuntimeError: `lightseq_fairseq.ops` has not been imported.
    """
    global _status
    if not REFERENCES:
        raise RuntimeError("lightseq: import lightseq_fairseq.ops before library.load()")
    if _status is None:
        _status = _attach(DIRECTORY)
    return _status


def covers(
    architectures: tuple[str, ...], capability: tuple[int, int], acts_as: int | None = None
) -> bool:
    """Whether a library compiled for `architectures` runs on a GPU of compute `capability`.

    Machine code runs on GPUs of the same major and the same or a later minor number. For its newest
    architecture the library also holds PTX, which the driver compiles for any later GPU. PTX of an
    architecture before Hopper cannot be used on Hopper and later: there the host code uses thread
    block clusters and programmatic dependent launch, which kernels for older GPUs do not support. A
    library built with `acts_as` holds only PTX, and its host code takes this into account.
    """
    numbers = [int(re.sub(r"\D", "", architecture)) for architecture in architectures]
    gpu = 10 * capability[0] + capability[1]
    newest = max(numbers, default=gpu + 1)
    if acts_as is not None:
        return newest <= gpu
    return any(n <= gpu and n // 10 == capability[0] for n in numbers) or (
        newest <= gpu and (newest >= _HOPPER or gpu < _HOPPER)
    )


def find(directory: Path, cuda: str | None) -> Path:
    """The library in `directory` for torch's CUDA version; the newest one if torch has no CUDA.

    cuda: torch.version.cuda, such as "13.0". None for a torch without CUDA, which can load the
    library too.

    Raises:
        FileNotFoundError: the message says what was found instead, and what to do.
    """
    name = re.compile(r"liblightseq_cu(\d+)\.so")
    found = {int(m[1]): path for path in directory.glob("*") if (m := name.fullmatch(path.name))}
    major = int(cuda.partition(".")[0]) if cuda else max(found, default=0)
    if major in found:
        return found[major]
    skipped = directory / "skipped.txt"
    if found:
        versions = ", ".join(str(version) for version in sorted(found))
        what = f"the compiled library is for CUDA {versions}, but torch is for CUDA {cuda}"
    elif skipped.exists():
        what = f"the CUDA build was skipped: {skipped.read_text().strip()}"
    else:
        what = "the CUDA kernels have not been compiled"
    raise FileNotFoundError(f"{what}; `{BUILD_COMMAND}` in a clone compiles them")


def _attach(directory: Path) -> Status:
    path: Path | None = None
    reason = ""
    architectures: tuple[str, ...] = ()
    acts_as = None
    try:
        path = find(directory, torch.version.cuda)
        description = json.loads(path.with_suffix(".json").read_text())
        architectures = tuple(description["architectures"])
        acts_as = description.get("acts_as")
        gpu = _gpu_in_use()
        if gpu is not None and description.get("quick"):
            raise FileNotFoundError(
                f"{path} was compiled for checks on machines without a GPU, and its kernels are "
                f"slow; `{BUILD_COMMAND}` in a clone compiles fast ones"
            )
        if gpu is not None and not covers(architectures, gpu, acts_as):
            raise FileNotFoundError(
                f"{path} was compiled for sm_{', sm_'.join(architectures)}, but the GPU in use is "
                f"sm_{gpu[0]}{gpu[1]}; `{BUILD_COMMAND}` in a clone compiles for the machine's "
                "GPUs, from sm_80 on"
            )
        torch.ops.load_library(str(path))
    except FileNotFoundError as error:
        reason, path = str(error), None
    except OSError as error:
        reason, path = f"{path} cannot be loaded: {error.__cause__ or error}", None

    kernels = tuple(name for name in REFERENCES if _has_cuda_kernel(name))
    missing = tuple(name for name in REFERENCES if name not in kernels)
    why = reason or (
        f"{path} was compiled from older sources and has no kernel for {', '.join(missing)}; "
        f"`{BUILD_COMMAND}` in a clone compiles it again"
    )
    for name in missing:
        _IMPLEMENTATIONS.impl(name, _with_warning(REFERENCES[name], why), "CUDA")
    return Status(path, reason, architectures, kernels, missing, acts_as)


class Gpu(NamedTuple):
    """A GPU of the machine, as the driver lists it."""

    uuid: str
    capability: tuple[int, int]


def _gpu_in_use() -> tuple[int, int] | None:
    """Compute capability of torch's first GPU; None without a GPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.get_device_capability()
    shown = visible(gpus(), os.environ)
    return shown[0].capability if shown else None


def visible(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA shows to a process with this environment, in CUDA's order.

    gpus: in PCI bus order.

    CUDA reads CUDA_VISIBLE_DEVICES up to the first entry that names no GPU. An entry is a number or
    the beginning of a UUID. CUDA numbers the fastest GPU first; here this is assumed to be the GPU
    with the latest compute capability. With CUDA_DEVICE_ORDER=PCI_BUS_ID it numbers by PCI bus.
    MIG devices are not distinguished: with them, all GPUs are returned.
    """
    ordered = list(gpus)
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        ordered.sort(key=lambda gpu: gpu.capability, reverse=True)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or wanted.startswith("MIG-"):
        return ordered
    shown: list[Gpu] = []
    for entry in map(str.strip, wanted.split(",")):
        named = [gpu for gpu in ordered if entry and gpu.uuid.startswith(entry)]
        if entry.isdecimal() and int(entry) < len(ordered):
            named = [ordered[int(entry)]]
        if len(named) != 1:
            break
        shown += named
    return shown


def gpus() -> list[Gpu]:
    """The machine's GPUs in PCI bus order; empty if the driver does not list them.

    This uses NVML instead of CUDA, since an import must not initialise CUDA: forked child processes
    could then not use it.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2() != 0:
        return []
    found = []
    count, device, major, minor = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    uuid = ctypes.create_string_buffer(96)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            nvml.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            )
            nvml.nvmlDeviceGetUUID(device, uuid, len(uuid))
            found.append(Gpu(uuid.value.decode(), (major.value, minor.value)))
    nvml.nvmlShutdown()
    return found


def _has_cuda_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"lightseq::{name}", "CUDA"))


def _with_warning(reference: Callable[..., Any], why: str) -> Callable[..., Any]:
    @functools.wraps(reference)
    def run(*args: Any, **kwargs: Any) -> Any:
        _warn(why)
        return reference(*args, **kwargs)

    return run


@functools.cache
def _warn(why: str) -> None:
    logger.warning("this GPU runs slow PyTorch code instead of CUDA kernels: %s", why)
