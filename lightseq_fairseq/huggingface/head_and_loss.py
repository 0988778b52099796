"""The head over a vocabulary and its loss, in a captured step: Hugging Face calls them, ours run.

The number of words is often no multiple of 8, such as 50 257. cuBLAS has only slow kernels for such
a product; ours reads spare rows behind the matrix. torch's loss makes copies of the logits, the
largest tensors of a step, in float32; ours overwrites the logits with their gradient.

Shapes: V = words, C = model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightseq_fairseq.huggingface.loss import cross_entropy
from lightseq_fairseq.layers.linear import vocabulary_logits

# Names of autograd's nodes whose backward does not read their result, so the loss may overwrite it.
_READ_NO_RESULT = ("Add", "Mm", "ToCopy", "Clone", "_Node")


def heads(model: nn.Module) -> list[Any]:
    """The products of a model, each ``nn.Linear``, whose results are logits over words."""
    found: dict[int, Any] = {}
    for module in model.modules():
        head_of: Any = getattr(module, "get_output_embeddings", lambda: None)
        head = head_of()
        if type(head) is nn.Linear:
            found[id(head)] = head
    return list(found.values())


class HeadAndLoss(TorchFunctionMode):
    """Within the block, the layers of this package compute logits and their loss.

    Nothing may read the logits after the backward pass. A training step of Hugging Face does not.

    Args:
        weights: [V, C] each, as the heads read them in the block.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        self._weights = {id(weight) for weight in weights}
        self._words = {len(weight) for weight in weights}
        self._logits: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            self._logits = self._product(*args, **kwargs)
            return func(*args, **kwargs) if self._logits is None else self._logits
        if func is functional.cross_entropy:
            loss = self._loss(*args, **kwargs)
            return func(*args, **kwargs) if loss is None else loss
        if func is Tensor.float and self._logits is not None and args[0] is self._logits:
            return self._logits  # the loss computes in float32, whatever it reads
        return func(*args, **kwargs)

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        if id(weight) not in self._weights:
            return None
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(weight.dtype)
        if input.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
            return None
        logits = vocabulary_logits(input.flatten(0, -2), weight, bias)
        return logits.view(*input.shape[:-1], len(weight))

    def _loss(
        self, input: Tensor, target: Tensor, weight: Tensor | None = None,
        size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
        reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Tensor | None:  # fmt: skip
        """Arguments: of ``functional.cross_entropy``."""
        if (
            input.dim() != 2
            or input.shape[1] not in self._words
            or target.is_floating_point()
            or any(given is not None for given in (weight, size_average, reduce))
            or not _may_be_overwritten(input)
        ):
            return None
        return cross_entropy(input, target, ignore_index, reduction, label_smoothing)


def _may_be_overwritten(result: Tensor) -> bool:
    node = result.grad_fn
    while node is not None and "View" in node.name():
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(_READ_NO_RESULT)
