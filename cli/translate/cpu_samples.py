"""Keeps samples on the CPU if our search is used.

fairseq's loops move each sample to the GPU and then print it sentence by sentence, with a host sync
for each. Our search takes the source from the CPU, and its results are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightseq_fairseq.fairseq_compat import patching

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def left_on_cpu() -> Iterator[None]:
    """Within the block fairseq's translation loops leave samples on the CPU for our generator.

    This holds while the generator that ``task.build_generator`` returned last is an
    ``LSSequenceGenerator``. If that falls back to fairseq's search, it moves the samples itself.
    For any other generator the loops move the samples as usual.
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

    def make_batches(original: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
        for batch in original(*args, **options):
            yield _staying(batch) if is_ours else batch

    # fairseq-generate moves samples by the first of these, fairseq-interactive tensor by tensor.
    with (
        patching.within("fairseq.utils:move_to_cuda", move_to_cuda),
        patching.within("fairseq_cli.interactive:make_batches", make_batches),
        patching.within("fairseq.tasks:FairseqTask.build_generator", build_generator),
    ):
        yield


def _staying(batch: Any) -> Any:
    """A ``Batch`` of fairseq-interactive whose tokens and lengths ignore ``cuda()``."""

    def staying(tensor: Tensor) -> Tensor:
        view = tensor.view_as(tensor)
        vars(view)["cuda"] = lambda: tensor
        return view

    tokens, lengths = staying(batch.src_tokens), staying(batch.src_lengths)
    return batch._replace(src_tokens=tokens, src_lengths=lengths)
