"""How much memory a run takes, asked alike for every system of ``lightseq-bench``."""

from __future__ import annotations

import resource

import torch


class MemoryMeter:
    """What this process takes from here on: of the GPU, or without one its resident memory.

    torch's allocator knows of its own memory alone; CUDA graphs, the code of kernels and libraries
    take theirs beside it. So the GPU is asked, which knows no processes: what is in use now, by
    others and by this process's bare context, is subtracted, and others have to stay as they are.
    """

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._before = _in_use() if gpu else 0

    def peak(self) -> int:
        """Bytes: torch's peak, and what else is in use now, which is rarely given back."""
        if not self._gpu:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        return _in_use() - self._before + given_back


def _in_use() -> int:
    """Bytes of the GPU that anybody uses, with this process's context in place."""
    free, total = torch.cuda.mem_get_info()
    return total - free
