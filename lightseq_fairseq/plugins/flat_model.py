"""What our models have in common: places for dropout, and parameters that lie end to end."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightseq_fairseq import fairseq_compat, library
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.layers.decoder import memory_weights
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.parameters import flatten_parameters
from lightseq_fairseq.plugins.unsupported import unsupported_width


class FlatModel:
    """In front of a fairseq model among the bases of ours."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """fairseq's, which from now on translates with our search."""
        fairseq_compat.prepare()
        patching.apply("model")
        return super().build_model(args, task)  # type: ignore[misc]

    def sides(self) -> list[tuple[Any, Any]]:
        """The encoders and decoders that work together; one may be in several pairs."""
        raise NotImplementedError

    def lay_out(self) -> None:
        """To be called when the layers exist."""
        for encoder, decoder in self.sides():
            # Sites 0 and 1 are the embeddings'; each layer has its own numbers after them.
            # children(), as iterating over a list with --encoder-layerdrop leaves some layers out.
            layers = [*encoder.layers.children(), *decoder.layers.children()]
            for place, layer in enumerate(layers, 1):
                layer.site = place * SITES_PER_LAYER
        self._flatten()

    def fused_groups(self) -> list[list[Tensor]]:
        """Parameters one GEMM reads together, so that they lie side by side."""
        groups: list[list[Tensor]] = []
        for encoder, decoder in self.sides():
            for layer in [*encoder.layers.children(), *decoder.layers.children()]:
                block = layer.self_attn
                parts = (block.q_proj, block.k_proj, block.v_proj)
                groups += [[p.weight for p in parts], [p.bias for p in parts]]
            groups += [g for g in memory_weights(decoder.layers.children()) if g]
        return groups

    def _flatten(self: Any) -> None:
        flatten_parameters(self, self.fused_groups())

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        # .half(), .cuda() and .to() give every parameter a storage of its own.
        super()._apply(fn, recurse)  # type: ignore[misc]
        if next(self.parameters()).is_cuda and "attention_fwd" in library.load().kernels:
            unsupported = unsupported_width(self.sides()[0][0].cfg)
            if unsupported:
                raise UserError(unsupported)
        self._flatten()
        return self
