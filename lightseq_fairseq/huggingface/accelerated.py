"""``accelerate(model)``: a Hugging Face model's own object, whose stacks our layers compute.

Only the class of its encoder changes, to a subclass of the same name with another ``forward``:
parameters, their names, ``save_pretrained`` and everything around it stay. What the layers do not
compute, Hugging Face's forward computes, and `report` counts it.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface.bert import Bert
from lightseq_fairseq.huggingface.calls import GIVEN
from lightseq_fairseq.huggingface.covered import NotCovered, Reads
from lightseq_fairseq.huggingface.generate import is_generating, search_in
from lightseq_fairseq.huggingface.gpt2 import Gpt2
from lightseq_fairseq.huggingface.modernbert import ModernBert
from lightseq_fairseq.huggingface.seq2seq import Seq2Seq
from lightseq_fairseq.huggingface.swapped import Coverage, Swapped, subclass
from lightseq_fairseq.huggingface.vit import Vit
from lightseq_fairseq.ops.casting import ALIGNMENT

Model = TypeVar("Model", bound=nn.Module)

# Class of a module that our layers compute -> how, and the prefix of the names of its parts.
_FAMILIES: dict[str, tuple[Any, str]] = {
    "ViTModel": (Vit, "ViT"),
    "GPT2Model": (Gpt2, "GPT2"),
    "ModernBertModel": (ModernBert, "ModernBert"),
}
for _prefix in ("Bert", "Roberta", "XLMRoberta", "Camembert"):
    _FAMILIES[f"{_prefix}Model"] = Bert, _prefix
for _prefix in ("Bart", "MBart", "M2M100", "Pegasus", "Marian"):
    _FAMILIES[f"{_prefix}Encoder"] = _FAMILIES[f"{_prefix}Decoder"] = Seq2Seq, _prefix
_SUPPORTED = (
    "BERT, RoBERTa, XLM-R, CamemBERT, ModernBERT, BART, mBART, M2M-100, NLLB, Pegasus, Marian, ViT "
    "and GPT-2"
)
# What else the user of a refused model can do: also if it was passed to our Trainer.
_INSTEAD = "use the plain model and Trainer of transformers"
# Heads that read only the rows of real tokens, and heads that also read those of pads. Others read
# the first row of each sentence.
_READ_TOKENS = ("ForMaskedLM", "ForTokenClassification", "LMHeadModel")
_READ_PADS = ("ForQuestionAnswering",)
_PREDICTS = "LMHeadModel"  # each token from the row before it


@dataclass
class _State:
    """What an accelerated encoder keeps besides its modules."""

    family: Bert | Gpt2 | ModernBert | Seq2Seq | Vit
    reads: Reads
    fp8: bool = False
    report: Coverage = field(default_factory=Coverage)

    def __deepcopy__(self, memo: Any) -> _State:
        return _State(copy.deepcopy(self.family), self.reads, self.fp8)


class Accelerated(Swapped):
    """Mixin of the encoders' classes, see `_class_of`."""

    _lightseq: _State


@functools.cache
def _class_of(original: Any) -> Any:
    """The subclass of a class of Hugging Face that our layers compute."""
    theirs: Callable[..., Any] = original.forward

    # torch.compile calls it as it is: what it does depends on objects of Python.
    @torch.compiler.disable
    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._lightseq
        try:
            result = state.family.forward(self, state.reads, *args, **kwargs)
        except NotCovered as reason:
            given = GIVEN.get()
            if given is not None and given.segments is not None:
                raise  # the step runs again without a packed batch
            state.report.falls_back(reason, "forward")
            return theirs(self, *args, **kwargs)
        state.report.calls += 1
        if state.fp8 and self.training and torch.is_grad_enabled() and GIVEN.get() is None:
            warnings.warn(
                "lightseq: fp8 needs lightseq.Trainer; this loop computes in bfloat16 or float32.",
                stacklevel=2,
            )
        return result

    return subclass(original, Accelerated, forward=forward)


def accelerate(model: Model, fp8: bool = False) -> Model:
    """Let our layers compute a model's encoder and decoder, and our search run ``generate``;
    returns ``model`` itself.

    The encoder's result has zeros in the rows of pads. Hugging Face's has numbers there that a head
    should not read.

    Args:
        model: a model of transformers, or a module that contains one.
        fp8: our Trainer computes the products of its layers in fp8 (E4M3, delayed scaling), all
            else in bfloat16. Other loops compute them in bfloat16, and warn.

    Raises:
        UserError: our layers do not support this model; the sentence says why.
    """
    _check_version()
    if not isinstance(model, nn.Module):
        raise UserError(
            f"lightseq.accelerate needs a model, not {model!r}: load it first, for example with "
            "AutoModelForSequenceClassification.from_pretrained."
        )
    found = [m for m in model.modules() if type(m).__name__ in _FAMILIES and _is_theirs(m)]
    if not found:
        raise UserError(
            f"{type(model).__name__} is not supported (supported: {_SUPPORTED}): {_INSTEAD}."
        )
    if all(type(module).__name__.endswith("Decoder") for module in found):
        raise UserError(
            f"{type(model).__name__}, a decoder without an encoder, is not supported: {_INSTEAD}."
        )
    states: dict[Any, _State] = {}
    for encoder in found:
        if isinstance(encoder, Accelerated):
            states[encoder] = encoder._lightseq
            continue
        _check_supported(encoder)
        outer = type(_owner(model, encoder)).__name__
        kind, prefix = _FAMILIES[type(encoder).__name__]
        reads = Reads(
            outer.endswith(_READ_PADS), not outer.endswith(_READ_TOKENS),
            outer.endswith(_PREDICTS), holes=kind is ModernBert,
        )  # fmt: skip
        states[encoder] = _State(kind(encoder, prefix), reads)
    for encoder, state in states.items() if fp8 else ():
        _check_fp8(encoder, state.family.products(encoder))
    for encoder, state in states.items():  # nothing has changed before
        state.fp8 = fp8 or state.fp8
        if not isinstance(encoder, Accelerated):
            encoder._lightseq = state
            encoder.__class__ = _class_of(type(encoder))  # type: ignore[arg-type]
    for module in model.modules():
        if is_generating(module) and _is_theirs(module):
            search_in(module)
    return model


def report(model: nn.Module) -> Coverage:
    """How often the layers of an accelerated model computed, and why Hugging Face's did."""
    total = Coverage()
    for module in _swapped(model):
        total.calls += module._lightseq.report.calls
        total.fallbacks += module._lightseq.report.fallbacks
    return total


def restore(model: Model) -> Model:
    """Undo `accelerate`; returns ``model`` itself. Its weights are those of now."""
    for module in _swapped(model):
        module.__class__ = module._original
        del module._lightseq
    return model


def _swapped(model: nn.Module) -> list[Any]:
    found = [m for m in model.modules() if isinstance(m, Swapped)]
    if not found:
        raise UserError(
            f"{type(model).__name__} is not accelerated: lightseq.accelerate has not been called."
        )
    return found


def _check_version() -> None:
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise UserError(
            f"lightseq.accelerate needs transformers 5, but {transformers.__version__} is "
            "installed: pip install --upgrade transformers"
        )


def _is_theirs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _owner(model: nn.Module, encoder: nn.Module) -> nn.Module:
    """The module that calls ``encoder``: the innermost one that contains it, or itself."""
    owners = [m for m in model.modules() if any(child is encoder for child in m.children())]
    return owners[-1] if owners else encoder


def _check_supported(encoder: Any) -> None:
    """Raises UserError if no call of this module could be computed by our layers."""
    name, (kind, _) = type(encoder).__name__, _FAMILIES[type(encoder).__name__]
    other = "another forward, such as that of device_map,"
    for what, is_so in {
        other: "forward" in vars(encoder),
        **kind.unsupported(encoder.config),
    }.items():
        if is_so:
            raise UserError(f"{name} with {what} is not supported: {_INSTEAD}.")


def _check_fp8(encoder: Any, products: list[list[Tensor]]) -> None:
    """Raises UserError if its products, each of these weights, cannot be computed in fp8."""
    for weights in products:
        width = next((n for n in weights[0].shape if n % ALIGNMENT), None)
        lacks = f"a width of {width}, which is no multiple of {ALIGNMENT}"
        if width is None and not weights[0].is_contiguous():
            lacks = "matrices that are stored transposed"
        elif width is None:
            continue
        raise UserError(
            f"{type(encoder).__name__} with {lacks}, cannot be computed in fp8: call "
            "lightseq.accelerate without fp8."
        )
