"""Common base of the ls_ models: dropout sites, and parameters in one flat buffer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn

from fairseq.models import MODEL_REGISTRY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base import dictionaries, library
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import Family
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.layers import MultiheadAttention, fused_groups
from lightseq_fairseq.layers.decoder import product_weights
from lightseq_fairseq.layers.sites import SITES_PER_LAYER
from lightseq_fairseq.memory.packing import PackedBatch
from lightseq_fairseq.memory.parameters import flatten_parameters
from lightseq_fairseq.plugins.unsupported import unsupported_option, unsupported_width


def with_dictionaries(args: Any) -> Any:
    """Return the object whose attribute ``dictionaries`` has the digests of a checkpoint's
    dictionaries (see ``base.dictionaries``). ``args``: the checkpoint's model options.

    For a Namespace this is ``args``. fairseq's ``build_model`` removes unknown settings from a
    DictConfig, but keeps its parent: so the parent, the whole configuration, has the attribute.
    """
    return args if isinstance(args, Namespace) else args._get_parent()


def berts_initial_values() -> AbstractContextManager[None]:
    """Within the block, fairseq's ``init_bert_params`` knows our class of attention."""
    known = "fairseq.modules.transformer_sentence_encoder:MultiheadAttention"
    return patching.within(known, MultiheadAttention)


class NotCompiled:
    """Base of the ls_ models, encoders and decoders: TorchScript cannot compile them."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by ``torch.jit.script``, also for a module that contains this one."""
        raise UserError(
            f"TorchScript cannot compile {type(self).__name__}, because its layers call kernels of "
            "this package: compile fairseq's own model, which "
            "fairseq.checkpoint_utils.load_model_ensemble builds from the same checkpoint."
        )


class FlatModel(NotCompiled):
    """Mixin of the ls_ models; it comes before the fairseq model in the list of base classes.

    A model defines ``family``, ``sides`` and

    * ``forward``, with fairseq's padded arguments and results, so that every criterion works. If
      the class sets ``packs_tokens = True``, our criteria call ``forward(..., packed=True)``, which
      returns (logits [T, V], segments). Otherwise ``--pack-tokens`` refuses the model;
    * ``packed_logits``, if the captured step supports it, and ``class_outputs`` and ``unused_by``,
      if it has further heads: see ``step.objectives``;
    * ``spared``, if its vocabulary need not be a multiple of 8. Then ``vocabulary_logits`` computes
      the logits without a copy of the weights;
    * ``build_model``, if fairseq's names a class that ours must replace. Then ``PATCHES`` has an
      entry, and ``patching.within`` replaces it.

    Attributes:
        family: the record of the model's family.
        generation: how an import searches, see ``checkpoints.generation_settings``; else {}.
    """

    family: ClassVar[Family]
    generation: Mapping[str, Any] = {}

    def __init__(self, *parts: Any) -> None:
        """``parts``: the arguments of fairseq's model, which has all layers afterwards."""
        super().__init__(*parts)
        for stacks in self.sides():
            # Sites 0 and 1 belong to the embeddings. Within a group, each layer gets its own sites
            # after them.
            for place, layer in enumerate(_layers(*stacks), 1):
                layer.site = place * SITES_PER_LAYER
        self.flatten()

    @classmethod
    def build_model(cls, args: Any, task: Any) -> Any:
        """Build the model as fairseq does; from then on, generation uses our search where it can.

        Raises:
            UserError: the fused layers do not support an option; the message names the option, the
                reason and what to do. Or as in ``check_dictionaries``.
        """
        cls.check_dictionaries(args, task)
        if (unsupported := unsupported_option(args, cls.family.supports)) is not None:
            arch = getattr(args, "arch", None) or registered_name(cls)
            raise UserError(unsupported.sentence(arch))
        fairseq_compat.prepare()
        patching.apply("model")
        model = super().build_model(args, task)  # type: ignore[misc]
        model.generation = getattr(with_dictionaries(args), "generation", None) or {}
        return model

    @classmethod
    def check_dictionaries(cls, args: Any, task: Any) -> None:
        """Raises UserError if ``args`` are a checkpoint's options and a dictionary of the task
        differs from the checkpoint's. It does not check a task for another kind of data: other code
        refuses such a task."""
        if cls.family.has_task(type(task)):
            dictionaries.check(task, getattr(with_dictionaries(args), "dictionaries", None))

    def sides(self) -> list[tuple[Any, ...]]:
        """The groups of stacks that run together, such as an encoder and its decoder, in the order
        of the data flow; a stack may be in several groups.

        A stack has ``cfg``, a ``TransformerConfig`` of fairseq, ``layers`` and ``table_rows``. Each
        layer has ``self_attn`` and ``site``.
        """
        raise NotImplementedError

    def stacks_of(self, part: str) -> tuple[Any, ...]:
        """The group of ``sides`` that trains on the ``part`` of a batch."""
        return self.sides()[0]

    def table_rows(self, batch: PackedBatch) -> tuple[int, ...]:
        """Rows of the position tables that a batch reads, a part of the keys of graphs.

        Raises:
            UserError: a sentence has more tokens than there are learned positions.
        """
        stacks = self.stacks_of(batch.part)
        read_by = {"source": stacks[0], "target": stacks[-1]}
        return tuple(
            read_by[stream.name].table_rows(longest)
            for stream, longest in zip(batch.layout, batch.longest, strict=True)
            if {"tokens", "previous"} & {*stream.columns}
        )

    def fused_groups(self) -> list[list[Tensor]]:
        """Groups of parameters that one GEMM reads; each group is contiguous in the flat buffer."""
        return [group for stacks in self.sides() for group in fused_groups(_layers(*stacks))]

    def products(self) -> list[list[Tensor]]:
        """The products of the layers that --fp8 computes in fp8: the weights that each reads."""
        return [p for stacks in self.sides() for p in product_weights(_layers(*stacks))]

    def spared(self) -> list[Tensor]:
        """Parameters after which the flat buffer has zero rows, see ``flatten_parameters``."""
        return []

    def flatten(self: Any) -> None:
        """Lay out the parameters; call it after some have been frozen."""
        if isinstance(next(self.parameters()), FakeTensor):
            return  # built for its shapes alone
        flatten_parameters(self, self.fused_groups(), self.spared())

    def register_classification_head(self: Any, *arguments: Any, **options: Any) -> None:
        """As in fairseq, if its model has this method; then flatten the parameters again."""
        super().register_classification_head(*arguments, **options)  # type: ignore[misc]
        self.flatten()

    def prepare_for_inference_(self: Any, cfg: Any) -> None:
        """As fairseq's, but with --bf16 as well; fairseq's handles only --fp16."""
        super().prepare_for_inference_(cfg)  # type: ignore[misc]
        if cfg.common.bf16 and not cfg.common.fp16:
            self.bfloat16()

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        # .half(), .cuda() and .to() give each parameter its own storage: flatten them again.
        super()._apply(fn, recurse)  # type: ignore[misc]
        if next(self.parameters()).is_cuda and "attention_fwd" in library.load().kernels:
            unsupported = unsupported_width(self.sides()[0][0].cfg)
            if unsupported:
                raise UserError(unsupported.sentence(registered_name(type(self))))
        self.flatten()
        return self


def registered_name(model: type) -> str:
    """The name of a model's class in fairseq's registry, such as ``ls_transformer``."""
    return next((name for name, known in MODEL_REGISTRY.items() if known is model), model.__name__)


def _layers(*stacks: Any) -> list[Any]:
    # Use children(): with --encoder-layerdrop, iterating over the list itself skips layers.
    return [layer for stack in stacks for layer in stack.layers.children()]
