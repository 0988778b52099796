"""Keeps samples on the CPU if our search is used.

fairseq-generate moves each sample to the GPU and then prints it sentence by sentence, with a host
sync for each. Our search takes the source from the CPU, and its results are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightseq_fairseq.fairseq_compat import patching


@contextmanager
def left_on_cpu() -> Iterator[None]:
    """Within the block fairseq-generate leaves samples on the CPU for our generator.

    This holds while the generator that ``task.build_generator`` returned last is an
    ``LSSequenceGenerator``. If that generator falls back to fairseq's search, it moves the samples
    itself. For any other generator, fairseq-generate moves the samples.
    """
    from lightseq_fairseq.plugins.generator import LSSequenceGenerator

    patching.apply("model")  # before the block, whose end would undo it
    is_ours = False

    def build_generator(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        nonlocal is_ours
        generator = original(*args, **options)
        is_ours = isinstance(generator, LSSequenceGenerator)
        return generator

    def move_to_cuda(original: Callable[..., Any], sample: Any, device: Any = None) -> Any:
        return sample if is_ours else original(sample, device)

    with (
        patching.within("fairseq.utils:move_to_cuda", move_to_cuda),
        patching.within(
            "fairseq.tasks:FairseqTask.build_generator", build_generator, by="cli.translate.cpu"
        ),
    ):
        yield
