"""``ls_adam``: fairseq's ``adam`` on flat parameter buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from fairseq import optim
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim import adam as native
from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import flat_buffers
from lightseq_fairseq.plugins import settings
from lightseq_fairseq.plugins.settings import ADAM, REFUSED, is_used
from lightseq_fairseq.step.flat_adam import FlatAdam


@register_optimizer("ls_adam", dataclass=native.FairseqAdamConfig)
class FairseqAdam(native.FairseqAdam):
    """fairseq's ``adam`` implemented by ``FlatAdam``: same flags, same results, same checkpoints.

    The class has the name of fairseq's class, because fairseq compares the optimizer's name with
    the one in the checkpoint when it resumes a run. Each of the two can resume the other's run.

    With ``--fp16`` or ``--bf16``, fairseq's ``FP16Optimizer`` owns the float32 master weights, the
    loss scale and the clipping rule. This optimizer then works on the parameters it is given: one
    flat vector, or a list, which it flattens.
    """

    def __init__(self, cfg: Any, params: Iterable[Any]) -> None:
        """Raises UserError for a flag that selects another implementation of Adam."""
        # Skip the parent's __init__, which would also build fairseq's Adam.
        FairseqOptimizer.__init__(self, cfg)
        for flag, row in settings.rows(ADAM, REFUSED):
            if is_used(flag, row, cfg):
                raise UserError(
                    f"--optimizer ls_adam does not support {flag} ({row.reason}): remove it, or "
                    "use --optimizer adam."
                )
        self._optimizer = FlatAdam(params, **self.optimizer_config)

    def zero_grad(self) -> None:
        """Set the gradients to None and reset the factor that ``multiply_grads`` has stored."""
        self._optimizer.zero_grad()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiply the gradients by ``c``: a number, or a 0-dim tensor (no host sync)."""
        self._optimizer.multiply_grads(c)

    def clip_grad_norm(
        self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Clip the gradients and return their norm before clipping.

        See ``FlatAdam.clip_grad_norm``.
        """
        return self._optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)


class FP16Optimizer(optim.FP16Optimizer):
    """fairseq's ``FP16Optimizer`` with master weights in the same layout as the 16-bit weights.

    One kernel can then update both. The class has the name of fairseq's class, which fairseq
    compares when it resumes a run. Its state dict has fairseq's format: with ``--fp16`` one flat
    vector per moment, unless ``--fp16-no-flatten-grads`` is given.
    """

    def __init__(self, cfg: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(cfg, *arguments, **keywords)
        flattens = cfg.common.fp16 and not cfg.common.fp16_no_flatten_grads
        self._writes_vectors = flattens and self.fp32_optimizer.supports_flat_params

    @classmethod
    def build_optimizer(cls, cfg: Any, params: Iterable[Any], **keywords: Any) -> FP16Optimizer:
        """Build from fairseq's configuration and the 16-bit parameters."""
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
        """The state in the format of fairseq's FP16Optimizer."""
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


# fairseq's name for the optimizer of a run depends on the precision.
_BY_PRECISION = ("FairseqAdam", "FP16Optimizer", "MemoryEfficientFP16Optimizer")


def accept_other_precision(checkpoint: dict[str, Any], cfg: Any) -> None:
    """Let a run with ``ls_adam`` resume from a checkpoint of Adam in another precision, in place.

    fairseq would refuse it by the name of the optimizer. But the state is the same in all
    precisions: float32 moments, which ``FlatAdam`` reads as a vector or as a list.
    """
    saved, common = (checkpoint.get("cfg") or {}).get("optimizer") or {}, cfg.common
    if cfg.optimizer._name != "ls_adam" or saved.get("_name") != "adam":
        return
    last = checkpoint["optimizer_history"][-1]
    if last["optimizer_name"] in _BY_PRECISION:
        in_16_bits = common.fp16 or common.bf16
        saves_memory = common.memory_efficient_fp16 or common.memory_efficient_bf16
        last["optimizer_name"] = _BY_PRECISION[in_16_bits + (in_16_bits and saves_memory)]
