"""``accelerate(model)``: a Hugging Face model's own object, whose stacks our layers compute.

Only the class of its encoder changes, to a subclass of the same name with another ``forward``:
parameters, their names, ``save_pretrained`` and everything around it stay. What the layers do not
compute, Hugging Face's forward computes, and `report` counts it.

Shapes: B = sentences, L = longest sentence, T = packed tokens, C = model width.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface.bert import Bert, Layer
from lightseq_fairseq.huggingface.copies import copies
from lightseq_fairseq.huggingface.covered import ACTIVATIONS, NotCovered, Reads
from lightseq_fairseq.layers.encoder import EncoderParts, run_encoder
from lightseq_fairseq.memory.packing import Segments

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# Class of the encoder -> prefix of the names of its parts.
_ENCODERS = {
    "BertModel": "Bert",
    "RobertaModel": "Roberta",
    "XLMRobertaModel": "XLMRoberta",
    "CamembertModel": "Camembert",
}
_SUPPORTED = "BERT, RoBERTa, XLM-R and CamemBERT"
# Heads that read only the rows of real tokens, and heads that also read those of pads. Others read
# the first row of each sentence.
_READ_TOKENS = ("ForMaskedLM", "ForTokenClassification")
_READ_PADS = ("ForQuestionAnswering",)


class GivenPass(NamedTuple):
    """What a captured step knows of a call before it.

    Attributes:
        segments, rng: of the call; None if the host has not packed the batch. Then the call runs as
            outside of a step, but the step has the parameters.
    """

    segments: Segments | None
    rng: Tensor | None


#: Within a captured step: what it knows.
GIVEN: ContextVar[GivenPass | None] = ContextVar("lightseq_given", default=None)


@dataclass
class Coverage:
    """How often our layers computed, and why Hugging Face's did instead.

    Attributes:
        calls: of an accelerated forward.
        fallbacks: reason -> how often Hugging Face's forward ran.
    """

    calls: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"accelerated: {self.calls} calls"]
        lines += [f"Hugging Face's forward: {n} calls, because {why}"
                  for why, n in self.fallbacks.most_common()]  # fmt: skip
        return "\n".join(lines)


@dataclass
class _State:
    """What an accelerated encoder keeps besides its modules."""

    family: Bert
    reads: Reads
    report: Coverage = field(default_factory=Coverage)

    def __deepcopy__(self, memo: Any) -> _State:
        return _State(self.family, self.reads)


class Accelerated:
    """Mixin of the encoders' classes, see `_class_of`."""

    _lightseq: _State
    _original: type

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """A file has Hugging Face's object, so that it can be loaded without this package."""
        state = {name: value for name, value in vars(self).items() if name != "_lightseq"}
        return object.__new__, (self._original,), state

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


@functools.cache
def _class_of(original: Any) -> Any:
    """The subclass of a class of Hugging Face that our layers compute.

    Its name and module are those of ``original``, by which transformers finds what it records.
    """
    theirs: Callable[..., Any] = original.forward

    # torch.compile calls it as it is: what it does depends on objects of Python.
    @torch.compiler.disable
    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._lightseq
        try:
            result = _forward(self, state, *args, **kwargs)
        except NotCovered as reason:
            given = GIVEN.get()
            if given is not None and given.segments is not None:
                raise  # the step runs again without a packed batch
            if str(reason) not in state.report.fallbacks:
                warnings.warn(
                    f"lightseq: Hugging Face's own forward runs, because {reason}.", stacklevel=2
                )
            state.report.fallbacks[str(reason)] += 1
            return theirs(self, *args, **kwargs)
        state.report.calls += 1
        return result

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__,
             "__doc__": original.__doc__, "_original": original, "forward": forward}  # fmt: skip
    return type(original.__name__, (Accelerated, original), names)


def accelerate(model: Model) -> Model:
    """Let our layers compute a model's encoder; returns ``model`` itself.

    The encoder's result has zeros in the rows of pads. Hugging Face's has numbers there that a head
    should not read.

    Args:
        model: a model of transformers, or a module that contains one.

    Raises:
        UserError: our layers do not support this model; the sentence says why.
    """
    _check_version()
    found = [m for m in model.modules() if type(m).__name__ in _ENCODERS and _is_theirs(m)]
    if not found:
        raise UserError(
            f"{type(model).__name__} is not supported (supported: {_SUPPORTED}): remove "
            "lightseq.accelerate."
        )
    new = [encoder for encoder in found if not isinstance(encoder, Accelerated)]
    for encoder in new:
        _check_supported(encoder)
    for encoder in new:
        outer = type(_owner(model, encoder)).__name__
        reads = Reads(outer.endswith(_READ_PADS), not outer.endswith(_READ_TOKENS))
        family = Bert(encoder, _ENCODERS[type(encoder).__name__])
        encoder._lightseq = _State(family, reads)  # type: ignore[assignment]
        encoder.__class__ = _class_of(type(encoder))  # type: ignore[arg-type]
    return model


def report(model: nn.Module) -> Coverage:
    """How often the layers of an accelerated model computed, and why Hugging Face's did."""
    total = Coverage()
    for encoder in _accelerated(model):
        total.calls += encoder._lightseq.report.calls
        total.fallbacks += encoder._lightseq.report.fallbacks
    return total


def restore(model: Model) -> Model:
    """Undo `accelerate`; returns ``model`` itself. Its weights are those of now."""
    for encoder in _accelerated(model):
        encoder.__class__ = encoder._original
        del encoder._lightseq
    return model


def _accelerated(model: nn.Module) -> list[Any]:
    found = [m for m in model.modules() if isinstance(m, Accelerated)]
    if not found:
        raise UserError(f"{type(model).__name__} is not accelerated: call lightseq.accelerate.")
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
    """Raises UserError if no call of this encoder could be computed by our layers."""
    name, config = type(encoder).__name__, encoder.config
    width, heads = config.hidden_size, config.num_attention_heads
    reasons = {
        "another forward, such as that of device_map,": "forward" in vars(encoder),
        "a decoder (is_decoder)": config.is_decoder,
        "cross attention (add_cross_attention)": config.add_cross_attention,
        f"chunk_size_feed_forward {config.chunk_size_feed_forward}": config.chunk_size_feed_forward,
        f"the activation {config.hidden_act}": config.hidden_act not in ACTIVATIONS,
        f"a head width of {width // heads} (a multiple of 8 up to 128)": width // heads > 128
        or width // heads % 8,
        f"an intermediate_size of {config.intermediate_size} (a multiple of 8)": (
            config.intermediate_size % 8
        ),
    }
    for what, is_so in reasons.items():
        if is_so:
            raise UserError(f"{name} with {what} is not supported: remove lightseq.accelerate.")


def _forward(
    model: Any, state: _State, input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None, inputs_embeds: Tensor | None = None,
    *more: Any, **options: Any,
) -> Any:  # fmt: skip
    """The result of the encoder, by our layers; raises NotCovered if they do not compute it."""
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

    config = model.config
    given = options.pop("return_dict", None)
    returns_dict = config.return_dict if given is None else given
    wants_states = _option(options, config, "output_hidden_states")
    if more or (input_ids is None) == (inputs_embeds is None):
        raise NotCovered("it is called with other arguments")
    if config.is_decoder:
        raise NotCovered("it is a decoder")
    if _option(options, config, "output_attentions"):
        raise NotCovered("it returns attentions")
    if wants_states and not isinstance(wants_states, bool):
        raise NotCovered("it returns some hidden states")
    cu_seqlens, longest = options.pop("cu_seq_lens_q", None), options.pop("max_length_q", None)
    for name in ("cu_seq_lens_k", "max_length_k", "use_cache", "num_items_in_batch"):
        options.pop(name, None)
    for name, value in options.items():
        if value is not None:
            raise NotCovered(f"it is called with {name}")
    like = input_ids if input_ids is not None else inputs_embeds
    assert like is not None
    shape = like.shape[0], like.shape[1]
    step = GIVEN.get()
    first = next(model.encoder.parameters(), None)
    if hasattr(first, "ds_id") or hasattr(first, "device_mesh"):
        raise UserError(
            "FSDP and DeepSpeed's ZeRO-3 need Hugging Face's layers: use DDP, or remove "
            "lightseq.accelerate."
        )
    layers, recomputes = state.family.layers(model), _recomputes(model)
    if step is not None and step.segments is not None:
        if shape != step.segments.shape:
            raise NotCovered("the encoder is called with another batch than the model")
        segments = step.segments
    elif cu_seqlens is not None:
        segments = _given_segments(cu_seqlens, longest, attention_mask, shape)
    else:
        segments = _segments(attention_mask, shape, like.device, state)
    if step is None:
        _read_copies(layers, model.embeddings.word_embeddings.weight)
    # From here on nothing raises NotCovered: Hugging Face's forward would draw other masks.
    rng = None if step is None else step.rng
    rng = _rng(model, layers, like.device) if rng is None else rng
    x = None
    if input_ids is not None:
        try:
            x = state.family.embedded(model, segments, rng, input_ids, token_type_ids, position_ids)
        except NotCovered:
            x = None  # Hugging Face's own embedding, for example with hooks (NEFTune)
    if x is None:
        padded = model.embeddings(
            input_ids=input_ids, position_ids=position_ids, token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
        )  # fmt: skip
        x = segments.pack(padded)
    x = x.to(layers[0].fc1.weight.dtype)
    states: list[Tensor] | None = [] if wants_states else None
    with torch.autocast(like.device.type, enabled=False):
        y = run_encoder(
            layers, None, x, segments, rng, checkpoint_activations=recomputes, states=states
        )  # fmt: skip
    wide = model.embeddings.word_embeddings.weight.dtype

    def padded_again(rows: Tensor) -> Tensor:
        return segments.pad(rows.to(wide))

    result = Output(last_hidden_state=padded_again(y))
    if model.pooler is not None:
        result["pooler_output"] = model.pooler(result.last_hidden_state)
    if states is not None:
        inner = [padded_again(rows) for rows in states[:-1]]
        result["hidden_states"] = (*inner, result.last_hidden_state)
    return result if returns_dict else result.to_tuple()


def _option(options: dict[str, Any], config: Any, name: str) -> Any:
    """An argument of forward, or if it is not given the configuration's."""
    given = options.pop(name, None)
    return getattr(config, name, False) if given is None else given


def _read_copies(layers: Sequence[Layer], words: Tensor) -> None:
    """Let layers read copies of their parameters, see `copies`: at least of those that are to be
    side by side.

    words: of the embeddings, which read their own parameters: under autocast they are float32, as
        Hugging Face's.
    """
    parts = [part for layer in layers for part in layer.parts]
    parameters = [x for part in parts for x in (part.weight, part.bias)]
    for parameter in parameters:
        if parameter.device != words.device:
            raise NotCovered(f"parameters are on {parameter.device} and {words.device}")
    dtypes = {words.dtype, *(p.dtype for p in parameters)}
    dtype = _dtype(words.device, dtypes)
    blocks: list[list[Tensor]] = []
    for layer in layers:
        first = layer.parts[:3]
        blocks += [[part.weight for part in first], [part.bias for part in first]]
    if dtypes != {dtype}:
        known = {id(p) for block in blocks for p in block}
        blocks += [[p] for p in parameters if id(p) not in known]
    made = copies(blocks, dtype)
    for part in parts:
        part.weight = made.get(id(part.weight), part.weight)
        part.bias = made.get(id(part.bias), part.bias)


def _dtype(device: torch.device, dtypes: set[torch.dtype]) -> torch.dtype:
    """The dtype of the layers, for those of the parameters."""
    if len(dtypes) > 1:
        raise NotCovered("its parameters have several dtypes")
    if not torch.is_autocast_enabled(device.type):
        return next(iter(dtypes))
    dtype = torch.get_autocast_dtype(device.type)
    if dtype != torch.bfloat16:
        raise NotCovered(f"autocast computes in {str(dtype).removeprefix('torch.')}")
    if not dtypes <= {torch.bfloat16, torch.float32}:
        raise NotCovered("its parameters are neither bfloat16 nor float32")
    return dtype


def _segments(
    mask: Tensor | None, shape: tuple[int, int], device: torch.device, state: _State
) -> Segments:
    """The real tokens; the host waits for the GPU once, because shapes depend on their number."""
    if mask is None:
        return Segments.full(shape, device)
    if tuple(mask.shape) != shape:
        raise NotCovered("the attention mask is not of the shape [sentences, tokens]")
    is_real = mask.to(torch.bool)
    total, first = torch.stack([is_real.sum(), is_real[:, 0].sum()]).tolist()
    if total == is_real.numel():
        return Segments.full(shape, device)
    state.reads.check(no_pads=False, first_is_real=first == shape[0])
    return Segments.from_mask(is_real, total)


def _given_segments(
    cu_seqlens: Tensor, longest: int | None, mask: Tensor | None, shape: tuple[int, int]
) -> Segments:
    """Packed sentences, as a collator of transformers gives them."""
    if shape[0] != 1 or longest is None or mask is not None:
        raise NotCovered("cu_seq_lens_q comes with a mask, without max_length_q or with a batch")
    whole = Segments.full((shape[0], shape[1]), cu_seqlens.device)
    return Segments(cu_seqlens.int(), int(longest), whole.positions, whole.index, shape)


def _rng(model: Any, layers: Sequence[EncoderParts], device: torch.device) -> Tensor:
    """The rng of all masks of a call, drawn on the device as Hugging Face draws masks."""
    first = model.embeddings.dropout
    rates = [layer.dropout or layer.self_attn.dropout for layer in layers]
    if not any(rates) and not (first.training and getattr(first, "p", 0.0)):
        return torch.zeros(2, dtype=torch.int64, device=device)
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def _recomputes(model: Any) -> bool:
    """Whether backward runs the layers again."""
    flags = {layer.gradient_checkpointing and layer.training for layer in model.encoder.layer}
    if len(flags) > 1:
        raise NotCovered("only some layers are checkpointed")
    return torch.is_grad_enabled() and flags == {True}
