"""How an op of this project comes to be: one schema, one reference, one shape function.

The reference is plain torch. It is the op's CPU kernel, the oracle of the tests, and what a GPU
runs where the compiled library is missing; the compiled library attaches the CUDA kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightseq_fairseq.library import REFERENCES

# FRAGMENT and not DEF: the compiled library opens the same namespace to attach its kernels.
_LIBRARY = torch.library.Library("lightseq", "FRAGMENT")


def _without_autograd(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The layers know the derivatives; the reference's steps, some of which write in place, must
    not be recorded."""

    @functools.wraps(reference)
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():  # as in a backward pass and in translating
            return reference(*arguments)
        with torch.no_grad():
            return reference(*arguments)

    return run


def register(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define `lightseq::<schema>` and return the callable op.

    reference: the CPU kernel, also listed in REFERENCES.
    fake: the same signature, returns empty tensors of the right shape, dtype and strides.
    """
    name = schema.partition("(")[0]
    reference = _without_autograd(reference)
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, reference, "CPU")
    torch.library.register_fake(f"lightseq::{name}", fake, lib=_LIBRARY)
    REFERENCES[name] = reference
    overload: Callable[..., Any] = getattr(torch.ops.lightseq, name).default
    return overload
