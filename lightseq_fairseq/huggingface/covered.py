"""What our layers compute of a Hugging Face model, and reasons why they do not.

A module is read only if nothing has changed what it computes: no other class (an adapter, a
quantised layer), no hook, no other ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

# Names of Hugging Face -> those of ``layers.EncoderLayer``.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_accurate",
    "gelu_fast": "gelu_accurate",
    "gelu_accurate": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
    "gelu_python_tanh": "gelu_accurate",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# These hooks of transformers only collect what a module returns.
_COLLECTING = "transformers.utils.output_capturing"


class NotCovered(Exception):
    """Our layers do not compute this call; Hugging Face's own forward does.

    The message is the reason, a clause without a full stop, such as "it returns attentions".

    Attributes:
        is_usual: nobody need be warned.
    """

    def __init__(self, reason: str, is_usual: bool = False) -> None:
        super().__init__(reason)
        self.is_usual = is_usual


class Reads(NamedTuple):
    """What a model's head reads of its encoder's result besides the rows of real tokens.

    Attributes:
        pads: all rows of pads.
        first: the first row of each sentence.
        before: the row before each real token, which a loss predicts from it.
        holes: pads between real tokens, which a window of the encoder counts.
    """

    pads: bool
    first: bool
    before: bool = False
    holes: bool = False

    def check(
        self, no_pads: bool, first_is_real: bool, tokens_follow: bool, no_holes: bool
    ) -> None:
        """Raises NotCovered if it reads a row of a pad, whose features only Hugging Face computes,
        or needs pads between tokens.

        no_pads: a batch has none. first_is_real: none is the first of a sentence. tokens_follow:
        none is before a real token. no_holes: none is between two real tokens.
        """
        if self.holes and not no_holes:
            raise NotCovered("a sentence has pads between its tokens, which windows count")
        if self.pads and not no_pads:
            raise NotCovered("question answering also reads the features of pads")
        if self.first and not first_is_real:
            raise NotCovered("a sentence begins with a pad, whose features the head may read")
        if self.before and not tokens_follow:
            raise NotCovered("a token follows a pad, from whose features a loss predicts it")

    def check_mask(self, is_real: np.ndarray) -> None:
        """As `check`, of a mask on the host: bool [B, L]."""
        follows_pad = is_real & ~np.pad(is_real[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        holes = follows_pad.sum(1) + is_real[:, 0] > 1
        self.check(
            bool(is_real.all()), bool(is_real[:, 0].all()), not follows_pad.any(), not holes.any()
        )


@dataclass(eq=False)
class Linear:
    """The tensors of an ``nn.Linear``."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any, needs_bias: bool = True) -> Linear:
        """Raises NotCovered if something has changed what ``module`` computes."""
        check(module, nn.Linear)
        return cls(tensor(module.weight), _bias(module, needs_bias))

    @property
    def out_features(self) -> int:
        return len(self.weight)


@dataclass
class LayerNorm:
    """The tensors of an ``nn.LayerNorm``."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: Any, needs_bias: bool = True) -> LayerNorm:
        """Raises NotCovered if something has changed what ``module`` computes."""
        check(module, nn.LayerNorm)
        return cls(tensor(module.weight), _bias(module, needs_bias), module.eps)


def _bias(module: Any, is_needed: bool) -> Tensor | None:
    return None if module.bias is None and not is_needed else tensor(module.bias)


def tensor(parameter: Tensor | None) -> Tensor:
    """A parameter, or what a caller has put in its place.

    Raises NotCovered if it is no plain tensor, for example quantised.
    """
    if parameter is None or type(parameter) not in (nn.Parameter, Tensor):
        what = "no" if parameter is None else f"a {type(parameter).__qualname__} as"
        raise NotCovered(f"a layer has {what} weight or bias")
    return parameter


def rate(module: Any) -> float:
    """The rate at which an ``nn.Dropout`` drops now. Raises NotCovered as `Linear.of` does."""
    check(module, nn.Dropout)
    return float(module.p) if module.training else 0.0


def rate_now(module: Any) -> float:
    """The rate at which a dropout drops now, whatever its class is; 0 if it has none."""
    return float(getattr(module, "p", 0.0)) if module.training else 0.0


def check_table(table: Any, kind: type = nn.Embedding) -> None:
    """Raise NotCovered if an embedding may compute something else than look-ups."""
    check(table, kind)
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        raise NotCovered("an embedding has max_norm, scale_grad_by_freq or sparse")


def check(module: nn.Module, kind: type) -> None:
    """Raise NotCovered if ``module`` may compute something else than its class ``kind``."""
    if type(module) is not kind:
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        raise NotCovered(f"a layer has {name} in place of {kind.__name__}")
    # transformers 5.0 leaves the class's own forward there when it has collected attentions.
    forward = vars(module).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not kind.forward:
        raise NotCovered(f"a {kind.__name__} has another forward")
    hooks = module._forward_hooks
    if hooks and any(hook.__module__ != _COLLECTING for hook in hooks.values()):
        raise NotCovered(f"a {kind.__name__} has hooks")
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise NotCovered(f"a {kind.__name__} has hooks")


def unsupported_sizes(activation: str, width: int, heads: int, inner: int) -> dict[str, Any]:
    """What our layers lack -> whether a configuration has it."""
    head = width // heads
    return {
        f"the activation {activation}": activation not in ACTIVATIONS,
        f"a head width of {head}, which must be a multiple of 8 up to 128,": head > 128 or head % 8,
        f"a feed-forward width of {inner}, which must be a multiple of 8,": inner % 8,
    }
