"""``ls_adam``: fairseq's ``adam`` over flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim import adam as native
from torch import Tensor

from lightseq_fairseq.errors import UserError
from lightseq_fairseq.training.flat_adam import FlatAdam

_REFUSED = ("fp16_adam_stats", "use_old_adam", "tpu")


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
        for flag in _REFUSED:
            if getattr(cfg, flag, False):
                raise UserError(
                    f"--optimizer ls_adam does not support --{flag.replace('_', '-')}; drop that "
                    "flag or use --optimizer adam"
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
