"""A call of an accelerated module: its options, its real tokens, and what its layers read.

Shapes: B = sentences, L = longest sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface.copies import copies
from lightseq_fairseq.huggingface.covered import LayerNorm, Linear, NotCovered, Reads
from lightseq_fairseq.huggingface.parts import ReadDecoderLayer, ReadEncoderLayer
from lightseq_fairseq.layers import fused_groups
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.memory.parameters import are_neighbours

Layers = Sequence[ReadEncoderLayer] | Sequence[ReadDecoderLayer]


class GivenPass(NamedTuple):
    """What a captured step knows of a call before it.

    Attributes:
        segments: "source" and, if there is a decoder, "target".
        segments, rng: None if the host has not packed the batch. Then the call runs as outside of a
            step, but the step has the parameters.
        of_head: see `Batch`.
        picked: int64 [rows], the packed rows that the head gets; None: all.
    """

    segments: Mapping[str, Segments] | None
    rng: Tensor | None
    of_head: str | None = None
    picked: Tensor | None = None


#: Within a captured step: what it knows.
GIVEN: ContextVar[GivenPass | None] = ContextVar("lightseq_given", default=None)


class Options(NamedTuple):
    """What a call asks for.

    Attributes:
        returns_dict: not a tuple.
        wants_states: the hidden states, too.
    """

    returns_dict: bool
    wants_states: bool


def options_of(config: Any, given: dict[str, Any], ignored: Sequence[str] = ()) -> Options:
    """Take a call's options out of its keyword arguments ``given``, or out of the configuration.

    ignored: names of arguments that change nothing.

    Raises:
        NotCovered: there is another argument, or it asks for more.
    """

    def option(name: str) -> Any:
        value = given.pop(name, None)
        return getattr(config, name, False) if value is None else value

    returns_dict = given.pop("return_dict", None)
    states = option("output_hidden_states")
    if option("output_attentions"):
        raise NotCovered("it returns attentions")
    if states and not isinstance(states, bool):
        raise NotCovered("it returns some hidden states")
    for name in (*ignored, "num_items_in_batch"):
        given.pop(name, None)
    for name, value in given.items():
        if value is not None:
            raise NotCovered(f"it is called with {name}")
    return Options(config.return_dict if returns_dict is None else returns_dict, bool(states))


def check_attention(config: Any) -> None:
    """Raises NotCovered if attention may compute something else."""
    attention = config._attn_implementation or "eager"
    if attention not in ("eager", "sdpa", "flex_attention") and "flash" not in attention:
        raise NotCovered(f"its attention is {attention}")


def check_whole(module: nn.Module) -> None:
    """Raises UserError if the module's parameters are distributed."""
    first = next(module.parameters(), None)
    if hasattr(first, "ds_id") or hasattr(first, "device_mesh"):
        raise UserError(
            "FSDP and DeepSpeed's ZeRO-3 need Hugging Face's layers: use DDP, or remove "
            "lightseq.accelerate."
        )


def read_copies(
    layers: Layers, words: Tensor, last: LayerNorm | None = None, make: Any = None
) -> torch.dtype:
    """Let layers read copies of their parameters, see `copies`: at least of those that are to be
    side by side. Returns the dtype that they read.

    words: of the embeddings, which read their own parameters: under autocast they are float32, as
        Hugging Face's. last: the LayerNorm behind the layers. make: a `KeptCopies` in place of
        `copies`.
    """
    parts, parameters, dtype = _read(layers, words, last)
    dtypes = {p.dtype for p in parameters}
    in_step = GIVEN.get() is not None  # then neighbours lie side by side already

    def is_read(block: Sequence[Tensor]) -> bool:
        is_one = in_step or (dtypes == {dtype} and are_neighbours(block))
        return is_one and all(p.is_contiguous() for p in block)

    blocks = [block for block in fused_groups(layers) if not is_read(block)]
    known = {id(p) for block in blocks for p in block}
    # A transposed matrix is not contiguous.
    blocks += [
        [p] for p in parameters
        if id(p) not in known and (dtypes != {dtype} or not p.is_contiguous())
    ]  # fmt: skip
    made = (make or copies)(blocks, dtype)
    for part in parts:
        part.weight = made.get(id(part.weight), part.weight)
        if part.bias is not None:
            part.bias = made.get(id(part.bias), part.bias)
    return dtype


def check_dtypes(layers: Layers, words: Tensor, last: LayerNorm | None = None) -> None:
    """Raises NotCovered if `read_copies` would."""
    _read(layers, words, last)


def _read(
    layers: Layers, words: Tensor, last: LayerNorm | None
) -> tuple[list[LayerNorm | Linear], list[Tensor], torch.dtype]:
    """What has the parameters of layers, the parameters, and the dtype that layers read."""
    parts = [part for layer in layers for part in layer.parts]
    parts += [] if last is None else [last]
    parameters = [x for part in parts for x in (part.weight, part.bias) if x is not None]
    for parameter in parameters:
        if parameter.device != words.device:
            raise NotCovered(f"parameters are on {parameter.device} and {words.device}")
    dtypes, device = {words.dtype, *(p.dtype for p in parameters)}, words.device
    if len(dtypes) > 1:
        raise NotCovered("its parameters have several dtypes")
    if not torch.is_autocast_enabled(device.type):
        return parts, parameters, words.dtype
    dtype = torch.get_autocast_dtype(device.type)
    if dtype != torch.bfloat16:
        raise NotCovered(f"autocast computes in {str(dtype).removeprefix('torch.')}")
    if not dtypes <= {torch.bfloat16, torch.float32}:
        raise NotCovered("its parameters are neither bfloat16 nor float32")
    return parts, parameters, dtype


def segments_of(
    mask: Tensor | None, shape: tuple[int, int], device: torch.device, reads: Reads
) -> Segments:
    """The real tokens; the host waits for the GPU once, because shapes depend on their number."""
    if mask is None:
        return Segments.full(shape, device)
    if tuple(mask.shape) != shape:
        raise NotCovered("the attention mask is not of the shape [sentences, tokens]")
    is_real = mask.to(torch.bool)
    after_pads = is_real & ~nn.functional.pad(is_real[:, :-1], (1, 0), value=True)
    # A sentence without holes begins in the first column, or behind one pad.
    holes = after_pads.sum(1) + is_real[:, 0] > 1
    sums = [is_real.sum(), is_real[:, 0].sum(), after_pads.sum(), holes.sum()]
    total, first, wrong, with_holes = torch.stack(sums).tolist()
    if total == is_real.numel():
        return Segments.full(shape, device)
    reads.check(
        no_pads=False, first_is_real=first == shape[0], tokens_follow=wrong == 0,
        no_holes=with_holes == 0,
    )  # fmt: skip
    return Segments.from_mask(is_real, total)


def step_segments(side: str, shape: tuple[int, int]) -> Segments | None:
    """What a captured step has packed of a batch [B, L]; None outside of a step, and of images."""
    step = GIVEN.get()
    if step is None or side not in (step.segments or ()):
        return None
    assert step.segments is not None
    if shape != step.segments[side].shape:
        raise NotCovered("a part of the model is called with another batch than the model")
    return step.segments[side]


def rows_of_head(side: str, packed: Tensor) -> Tensor | None:
    """What the head gets of packed rows [T, C] in a captured step: [1, rows, C]; None: a padded
    result."""
    step = GIVEN.get()
    if step is None or step.of_head != side:
        return None
    rows = packed if step.picked is None else packed.index_select(0, step.picked)
    return rows[None]


def given_segments(
    cu_seqlens: Tensor, longest: int | None, mask: Tensor | None, shape: tuple[int, int]
) -> Segments:
    """Packed sentences, as a collator of transformers gives them."""
    if shape[0] != 1 or longest is None or mask is not None:
        raise NotCovered("cu_seq_lens_q comes with a mask, without max_length_q or with a batch")
    whole = Segments.full((shape[0], shape[1]), cu_seqlens.device)
    return Segments(cu_seqlens.int(), int(longest), whole.positions, whole.index, shape)


def rates_of(layers: Layers, first: float) -> tuple[float, ...]:
    """The dropout rates of a call; first: the rate behind the embedding."""
    return first, *(
        rate for layer in layers
        for rate in (
            layer.dropout, layer.activation_dropout, layer.feed_forward_dropout or 0.0,
            *(b.dropout for b in layer.blocks),
        )
    )  # fmt: skip


def rng_of(rates: Sequence[float], device: torch.device) -> Tensor:
    """The rng of all masks of a call: the step's, or one that is drawn on the device as Hugging
    Face draws masks, if a rate is not 0."""
    step = GIVEN.get()
    if step is not None and step.rng is not None:
        return step.rng
    if not any(rates):
        return torch.zeros(2, dtype=torch.int64, device=device)
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def recomputes(layers: Any) -> bool:
    """Whether backward runs these layers of Hugging Face again."""
    flags = {layer.gradient_checkpointing and layer.training for layer in layers}
    if len(flags) > 1:
        raise NotCovered("only some layers are checkpointed")
    return torch.is_grad_enabled() and flags == {True}
