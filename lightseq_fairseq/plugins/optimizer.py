"""``ls_adam``: fairseq's ``adam`` over flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from fairseq import optim
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim import adam as native
from torch import Tensor, nn

from lightseq_fairseq.errors import UserError
from lightseq_fairseq.parameters import flat_buffers
from lightseq_fairseq.training.flat_adam import FlatAdam

# Options that select another implementation of Adam, and why they do not apply to this one.
UNSUPPORTED = {
    "fp16_adam_stats": "its moments are float32",
    "use_old_adam": "there is one implementation of it",
    "tpu": "it runs on GPUs and CPUs",
}


@register_optimizer("ls_adam", dataclass=native.FairseqAdamConfig)
class FairseqAdam(native.FairseqAdam):
    """fairseq's ``adam`` with ``FlatAdam`` inside: same flags, same numbers, same files.

    The class bears fairseq's name because a resumed run asserts that the optimizer's name is the
    one in the checkpoint: so either continues what the other has saved.

    With ``--fp16`` and ``--bf16`` fairseq's ``FP16Optimizer`` owns the float32 parameters, the
    loss scale and its rule of clipping, and this optimizer works on what it is given: one flat
    vector, or a list which becomes one.
    """

    def __init__(self, cfg: Any, params: Iterable[Any]) -> None:
        """
        Args:
            cfg: fairseq's ``FairseqAdamConfig``.
            params: parameters to train.

        Raises:
            UserError: for a flag that selects another implementation of Adam.
        """
        # Not the parent's __init__, which would build fairseq's own Adam beside ours.
        FairseqOptimizer.__init__(self, cfg)
        for option, reason in UNSUPPORTED.items():
            if getattr(cfg, option, False):
                raise UserError(
                    f"--optimizer ls_adam does not support --{option.replace('_', '-')} "
                    f"({reason}): drop it, or use --optimizer adam"
                )
        self._optimizer = FlatAdam(params, **self.optimizer_config)

    @property
    def optimizer(self) -> FlatAdam:
        """The torch optimizer."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        # Only fairseq.optim.shard_ assigns it.
        raise UserError(
            "--optimizer ls_adam does not support --zero-sharding os; use --optimizer adam for it"
        )

    def zero_grad(self) -> None:
        """Clear the gradients and what has been asked of them."""
        self._optimizer.zero_grad()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients by ``c``: a number, or a 0-dim tensor that is not read here."""
        self._optimizer.multiply_grads(c)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Norm before clipping; see ``FlatAdam.clip_grad_norm``."""
        return self._optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)


class FP16Optimizer(optim.FP16Optimizer):
    """fairseq's, with the float32 parameters laid out like the 16-bit ones.

    So one kernel updates both. It bears fairseq's name because a resumed run asserts that, and
    writes what fairseq would: with ``--fp16`` one vector of each moment unless
    ``--fp16-no-flatten-grads`` is given.
    """

    def __init__(self, cfg: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(cfg, *arguments, **keywords)
        self._writes_vectors = cfg.common.fp16 and not cfg.common.fp16_no_flatten_grads

    @classmethod
    def build_optimizer(cls, cfg: Any, params: Iterable[Any], **keywords: Any) -> FP16Optimizer:
        """From fairseq's configuration and the 16-bit parameters."""
        params = list(params)
        masters = {
            id(parameter): nn.Parameter(view)
            for buffer in flat_buffers(params)
            for parameter, view in zip(
                buffer.parameters, buffer.views(buffer.data.float()), strict=True
            )
        }
        fp32_params = [masters[id(p)] for p in params]
        return cls(cfg, params, optim.build_optimizer(cfg.optimizer, fp32_params), fp32_params)

    def state_dict(self) -> dict[str, Any]:
        """What fairseq's FP16Optimizer would write."""
        state: dict[str, Any] = super().state_dict()
        if not self._writes_vectors or not state["state"]:
            return state
        (group,) = state["param_groups"]
        found = [state["state"].get(i) for i in group["params"]]
        vectors: dict[str, Any] = {"step": max(entry["step"] for entry in found if entry)}
        for name in ("exp_avg", "exp_avg_sq"):
            vectors[name] = torch.cat(
                [
                    entry[name].flatten() if entry else torch.zeros_like(p).flatten()
                    for entry, p in zip(found, self.fp32_params, strict=True)
                ]
            )
        return {**state, "state": {0: vectors}, "param_groups": [{**group, "params": [0]}]}
