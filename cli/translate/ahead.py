"""Lets fairseq-generate search many batches together.

fairseq-generate searches one batch after the other. Its last sentences leave most of the GPU idle,
and so does a batch of few sentences. So this reads the batches of a window ahead, and lets our
generator search all their sentences when fairseq asks for the first one.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightseq_fairseq.fairseq_compat import patching

WINDOW = 1 << 13  # sentences, one or two seconds of a GPU


@contextmanager
def searched_together(args: Namespace) -> Iterator[None]:
    """Within the block fairseq-generate's calls of our generator search windows of batches.

    args: those of fairseq-generate.
    """
    import torch

    from lightseq_fairseq.plugins.generator import TOGETHER, LSSequenceGenerator, together

    patching.apply("model")  # before the block, whose end would undo it
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    window: list[Any] = []
    found: dict[tuple[int, ...], Any] = {}

    def prefix(sample: Any) -> Any:  # as in fairseq-generate
        return sample["target"][:, : args.prefix_size] if args.prefix_size > 0 else None

    def inference_step(
        original: Callable[..., Any], generator: Any, models: Any, sample: Any,
        prefix_tokens: Any = None, constraints: Any = None,
    ) -> Any:  # fmt: skip
        if not isinstance(generator, LSSequenceGenerator):
            return original(
                generator, models, sample, prefix_tokens=prefix_tokens, constraints=constraints
            )
        if (key := _key(sample)) not in found:
            found.clear()
            calls = [
                functools.partial(
                    original, generator, models, each,
                    prefix_tokens=prefix(each),
                    constraints=each.get("constraints"),
                )
                for each in window
            ]  # fmt: skip
            found.update(zip(map(_key, window), together(generator, calls), strict=True))
        return found.pop(key)

    def build_generator(original: Callable[..., Any], task: Any, *more: Any, **options: Any) -> Any:
        task.inference_step = functools.partial(inference_step, task.inference_step)
        return original(task, *more, **options)

    def progress_bar(original: Callable[..., Any], *more: Any, **options: Any) -> Any:
        bar = original(*more, **options)
        return _Bar(bar, window, WINDOW if device in TOGETHER else 1)

    with (
        patching.within("fairseq.logging.progress_bar:progress_bar", progress_bar, by=_BY),
        patching.within("fairseq.tasks:FairseqTask.build_generator", build_generator, by=_BY),
    ):
        yield


_BY = "cli.translate.ahead"


def _key(sample: dict[str, Any]) -> tuple[int, ...]:
    return tuple(sample["id"].tolist())


class _Bar:
    """fairseq's progress bar. ``window`` has the batches with which the next one is searched."""

    def __init__(self, bar: Any, window: list[Any], most: int) -> None:
        self._bar, self._window, self._most = bar, window, most

    def __iter__(self) -> Iterator[Any]:
        batches: list[Any] = []
        sentences = 0
        for batch in self._bar:
            batches.append(batch)
            sentences += len(batch.get("id", ()))
            if sentences >= self._most:
                yield from self._given(batches)
                batches, sentences = [], 0
        yield from self._given(batches)

    def _given(self, batches: list[Any]) -> list[Any]:
        # fairseq skips a batch without sentences.
        self._window[:] = [batch for batch in batches if "net_input" in batch]
        return batches

    def log(self, *args: Any, **options: Any) -> None:
        self._bar.log(*args, **options)
