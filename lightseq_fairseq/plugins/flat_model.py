"""What our models have in common: places for dropout, and parameters that lie end to end."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask
from torch import Tensor

from lightseq_fairseq import fairseq_compat, library
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.layers.decoder import DecoderLayer, memory_weights
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.parameters import flatten_parameters
from lightseq_fairseq.plugins.unsupported import unsupported_option, unsupported_width


class Data(NamedTuple):
    """What a model trains on.

    Attributes:
        tasks: fairseq's that have it, and all that extend them.
        words: what it is, for those who have taken another task; and what they are to take.
    """

    tasks: tuple[type, ...]
    words: tuple[str, str]


SENTENCE_PAIRS = Data(
    (TranslationTask, TranslationMultiSimpleEpochTask, MultilingualTranslationTask),
    ("pairs of sentences", "--task translation or another one of translation"),
)
TEXT = Data((LanguageModelingTask,), ("running text", "--task language_modeling"))


class FlatModel:
    """In front of a fairseq model among the bases of ours.

    Attributes:
        data: what it trains on.
    """

    data: ClassVar[Data]

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """fairseq's, which from now on translates with our search.

        Raises:
            UserError: naming a flag that the fused layers cannot honour, the reason and the way
                out.
        """
        if (unsupported := unsupported_option(args)) is not None:
            raise UserError(unsupported)
        fairseq_compat.prepare()
        patching.apply("model")
        return super().build_model(args, task)  # type: ignore[misc]

    def sides(self) -> list[tuple[Any, ...]]:
        """The stacks that work together, such as an encoder and its decoder, in the order of the
        data; one may be in several places."""
        raise NotImplementedError

    def lay_out(self) -> None:
        """To be called when the layers exist."""
        for stacks in self.sides():
            # Sites 0 and 1 are the embeddings'; each layer has its own numbers after them.
            for place, layer in enumerate(_layers(*stacks), 1):
                layer.site = place * SITES_PER_LAYER
        self._flatten()

    def fused_groups(self) -> list[list[Tensor]]:
        """Parameters one GEMM reads together, so that they lie side by side."""
        groups: list[list[Tensor]] = []
        for stacks in self.sides():
            layers = _layers(*stacks)
            for layer in layers:
                block = layer.self_attn
                parts = (block.q_proj, block.k_proj, block.v_proj)
                groups += [[p.weight for p in parts], [p.bias for p in parts]]
            attending = [layer for layer in layers if isinstance(layer, DecoderLayer)]
            groups += [g for g in memory_weights(attending) if g]
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


def _layers(*stacks: Any) -> list[Any]:
    # children(), as iterating over a list with --encoder-layerdrop leaves some layers out.
    return [layer for stack in stacks for layer in stack.layers.children()]
