"""What tests of accelerated models have in common, beside ``scripts.random_models``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import lightseq_fairseq.huggingface as lightseq

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from scripts.random_models import Result, build  # noqa: E402 (which needs transformers)

IS_OLDEST = transformers.__version__.startswith("5.0.")
needs_captured_step = pytest.mark.skipif(
    IS_OLDEST, reason="the loop of transformers 5.0 has no place for the captured step"
)
# Of a test. Any two show that the modules of a version are read rightly.
RANDOM_MODELS = 2 if IS_OLDEST else 10


def pair(name: str, **config: Any) -> tuple[Any, Any]:
    """A plain model, and an accelerated copy of it."""
    plain = build(name, **config)
    return plain, lightseq.accelerate(copy.deepcopy(plain))


def assert_same(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """All numbers are equal but for this error, absolute or relative."""
    near = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found.loss, expected.loss, **near)
    assert found.outputs.keys() == expected.outputs.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    for name in expected.outputs:
        torch.testing.assert_close(found.outputs[name], expected.outputs[name], **near)
    assert len(found.states) == len(expected.states)
    for mine, theirs in zip(found.states, expected.states):
        torch.testing.assert_close(mine, theirs, **near)
    for name in expected.gradients:
        torch.testing.assert_close(
            found.gradients[name], expected.gradients[name], **near,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def assert_ours(model: Any, calls: int | None = None) -> None:
    """Our layers have computed all calls of a model."""
    coverage = lightseq.report(model)
    assert not coverage.fallbacks, coverage
    assert coverage.calls == calls if calls is not None else coverage.calls > 0


@contextmanager
def one_warning(reason: str) -> Iterator[None]:
    """Within it the package warns once, of a fallback for this reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if "lightseq" in str(w.message)]
    assert len(texts) == 1 and reason in texts[0], texts
