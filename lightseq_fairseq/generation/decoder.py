"""One step of the decoder (ops only, no autograd), and the graphs and buffers of all steps.

Shapes: N = rows (hypotheses and unused rows), C = model width, H = heads, T = packed source tokens,
B = sentences, S = padded source length.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.generation.delayed_progress import DelayedProgress
from lightseq_fairseq.generation.parameter_addresses import ParameterAddresses
from lightseq_fairseq.generation.search_buffers import SearchBuffers, Sizes, power
from lightseq_fairseq.generation.source import SourcePart
from lightseq_fairseq.layers.attention import MultiheadAttention
from lightseq_fairseq.layers.decoder import memory_weight
from lightseq_fairseq.layers.node import Input, apply
from lightseq_fairseq.layers.stack import Stack, Sublayer
from lightseq_fairseq.layers.weight import Weight
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.packing import Segments, bucket_len
from lightseq_fairseq.ops.checks import trust_boundaries

# Fractions of the GPU's memory that the cache of a search, and the keys and values of its sources,
# may take. After a search, twice the larger one may stay allocated: rows are rounded up.
_CACHE, _SOURCE = 0.07, 0.1


def bucket(rows: int, device: torch.device) -> int:
    """Rows of a step for ``rows`` hypotheses, rounded up so that few different graphs are needed.

    On a GPU: powers of two up to 64; then multiples of 64, at most four buckets per doubling; above
    1024 eight buckets per doubling, since there each additional row costs time. A CPU captures no
    graphs, so nothing is rounded.
    """
    if device.type != "cuda":
        return rows
    if rows <= 64:
        return 1 << max(rows - 1, 0).bit_length()
    unit = max(64, 1 << ((rows - 1).bit_length() - (4 if rows > 1024 else 3)))
    return -(-rows // unit) * unit


def first_bucket(rows: int, device: torch.device) -> int:
    """Tighter rounding for a batch's first row count, which it keeps for most of its steps.

    Above 256 rows: multiples of 64. For these, csrc/linear/matmul.cu searches for the fastest
    cuBLASLt algorithm.
    """
    if rows <= 256 or device.type != "cuda":
        return bucket(rows, device)
    return -(-rows // 64) * 64


class AttentionRequest(NamedTuple):
    """Asks for the cross-attention weights of ``layer``, averaged over the first ``heads`` heads.

    heads: None for all heads.
    """

    layer: int
    heads: int | None


class StepDecoder:
    """Runs the steps of one decoder, as CUDA graphs where they can be captured.

    The graphs and the buffers they read are kept from batch to batch, until the weights move.

    The methods' argument ``decoder`` has ``layers``, ``layer_norm``, ``reads_source``,
    ``embeds_on_host``, ``embed_packed``, ``table_rows`` and ``project_out``, as
    ``plugins.transformer.LSTransformerDecoder`` does. The decoder owns this object, so this object
    keeps no reference to the decoder. A copy of the decoder gets an empty ``StepDecoder``.

    Attributes:
        launched: steps of all searches, for measurements.
    """

    memory: SearchBuffers
    progress: DelayedProgress
    _captures: bool

    def __init__(self) -> None:
        self._addresses: ParameterAddresses | None = None
        self._graphs: Graphs | None = None
        self._user: Callable[[], object] | None = None
        self.launched = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def lent_to(self, user: object) -> StepDecoder:
        """Lend this object to ``user``; while an earlier user is alive, return a new empty one."""
        if self._user is not None and self._user() is not None:
            return StepDecoder()
        self._user = weakref.ref(user)
        return self

    def begin(
        self, decoder: Any, features: Tensor | None, cu_seqlens: Tensor, rows: int, positions: int
    ) -> SearchBuffers:
        """Allocate the buffers of a batch, and compute the cross-attention keys and values.

        features: [T, C_enc], the encoder's packed output; None for a decoder without a source.
        cu_seqlens: int32 [B + 1].
        rows: the most rows of the batch. positions: the least number of positions to allocate.
        """
        memory, rows = self.buffers(decoder), _room(rows)
        starts = cu_seqlens.cpu().numpy()
        sizes = Sizes(positions, 0, rows, max(rows, len(starts)))
        memory.open(sizes, starts, int(starts[-1]))
        memory.send_rows()
        memory.ancestry.zero_()  # unused rows read it too
        if features is not None:
            memory.keep_source(_keys_and_values(decoder, features))
        return memory

    def open(self, cu_seqlens: np.ndarray, tokens: int, sizes: Sizes) -> None:
        """As `begin`, for a search, after `buffers`; ``encode`` then runs the encoder, or
        ``prefill`` the decoder.

        cu_seqlens: integers, boundaries of the first sentences. tokens: rows of ``memory.source``.
        sizes: the least. The caller writes the rest of ``memory.host`` and sends it.
        """
        memory, slots, rows = self.memory, sizes.rows, _room(sizes.rows)
        sizes = sizes._replace(
            rows=rows,
            sentences=max(rows, power(sizes.sentences)),
            read_sentences=max(rows, power(sizes.read_sentences)),
            read_tokens=bucket(sizes.read_tokens, memory.device),
        )
        memory.open(sizes, cu_seqlens, tokens)
        if self.progress.make_room(slots):
            memory.moved = True

    def encode(self, encoder: Any, decoder: Any, part: SourcePart, first: int) -> None:
        """Run the encoder on the ``part`` of the source that is in ``memory``, as a graph.

        It stores the cross-attention keys and values of all layers in ``memory.source``, from row
        ``first`` on.

        encoder: has ``features``, ``padding_idx`` and ``table_rows``, as the encoder of
        ``plugins.transformer``.
        """
        memory, longest = self.memory, part.longest
        sentences = bucket(len(part.lengths), memory.device)
        count = bucket(len(part.tokens), memory.device)

        def encode() -> Tensor:
            tokens, positions = memory.source_tokens[:count], memory.source_positions[:count]
            boundaries = memory.boundaries[: sentences + 1]
            trust_boundaries(boundaries, count, longest)
            shape = (sentences, longest)
            segments = Segments(boundaries, longest, positions, positions[:0], shape, most)
            return _keys_and_values(decoder, encoder.features(tokens, segments, memory.rng))

        table, most = encoder.table_rows(longest), bucket_len(longest)
        key = ("source", *memory.layout, count, sentences, table, most)
        memory.keep_source(self.launch(key, encode)[: len(part.tokens)], first)

    def buffers(self, decoder: Any, *others: Any) -> SearchBuffers:
        """The buffers, which are new if the weights of these modules have moved."""
        if self._addresses is None or not self._addresses.intact(decoder, *others):
            self.forget()
            layers, first = list(decoder.layers), next(decoder.parameters())
            self.memory = SearchBuffers(
                len(layers), layers[0].self_attn.out_proj.out_features, first, decoder.reads_source
            )
            self.progress = DelayedProgress(first.device)
            self._graphs = Graphs(first.device, "decoding steps")
            self._addresses = ParameterAddresses(decoder, *others)
            self._captures = not decoder.embeds_on_host
        return self.memory

    def make_room(self, rows: int, positions: int, used: int) -> None:
        """Grow the buffers to ``rows`` and ``positions``; keep the first ``used`` positions."""
        memory = self.memory
        if rows > memory.rows or positions > memory.positions:
            most = max(positions, memory.positions * 3 // 2)
            memory.resize(_room(max(rows, memory.rows)), most, used)

    def launch(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        """Run ``function`` or replay its graph; equal keys must mean the same computation.

        Nothing is captured if the decoder embeds tokens on the host.

        Returns the result of ``function``, which the next run may overwrite.
        """
        assert self._graphs is not None
        if not self._captures:
            return function()
        if self.memory.moved:
            self._void()
        return self._graphs.launch((self.memory.rows, self.memory.positions, *key), function)

    def end(self) -> None:
        """After a batch: free buffers and graphs if the buffers exceed what may stay allocated."""
        if self.memory.nbytes > _most_kept(self.memory.device):
            self.forget()

    def forget(self) -> None:
        """Drop graphs and buffers, for example after an error within a step."""
        if self._graphs is not None:
            self._void()
            del self.memory, self.progress
        self._graphs = self._addresses = None

    def _void(self) -> None:
        """Drop the graphs, whose input addresses are no longer valid."""
        if self._graphs is not None:
            self._graphs.clear()
            self.memory.moved = False

    def features(
        self, decoder: Any, rows: int, beam: int, attention: AttentionRequest | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Features [N, C] of ``memory.tokens[:rows]``; appends their keys and values to the cache.

        beam: rows per slot, see ``SearchBuffers``. attention: which cross-attention
        weights to return too, float32 [N, S]; this requires beam 1.
        """
        memory, weights = self.memory, None
        slots, places = memory.sentences[: rows // beam], memory.places[:rows]

        def past(place: int, block: MultiheadAttention, qkv: Tensor) -> Tensor:
            keys, values = memory.cache[:, place].unbind(1)
            return ops.decode_self_attention(
                qkv, keys, values, memory.ancestry, places, block.num_heads, _scale(block), beam
            )  # fmt: skip

        def source(place: int, block: MultiheadAttention, q: Tensor) -> Tensor:
            nonlocal weights
            keys, values = memory.source[:, place].unbind(1)
            out = ops.decode_cross_attention(
                q, keys, values, memory.cu_seqlens, slots, beam, block.num_heads, _scale(block)
            )
            if attention is not None and place == attention.layer:
                each = _cross_weights(q, keys, memory.columns, slots, block)
                weights = each[: attention.heads].mean(0)
            return out

        trust_boundaries(memory.cu_seqlens, len(memory.source), len(memory.source))
        x = decoder.embed_packed(memory.tokens[:rows], places, 1, memory.rng, 1)
        cross = source if memory.reads_source else None
        return _run_layers(decoder, x, memory.rng, past, cross), weights

    def prefill(self, decoder: Any, count: int, prompts: int, longest: int, beam: int) -> Tensor:
        """Features [T, C] of the prompts in ``memory``; writes their keys and values to the cache.

        All prompts pass through the layers together, packed. The entries of a prompt are in the
        first row of its slot, to which ``memory.ancestry`` leads all hypotheses of the slot.

        count: T or more. prompts: their number or more, each with a slot of its own. longest:
        upper bound of a prompt's length; the cache must have more positions than that.
        """
        memory = self.memory
        tokens, positions = memory.source_tokens[:count], memory.source_positions[:count]
        boundaries = memory.boundaries[: prompts + 1]
        trust_boundaries(boundaries, count, longest)
        segments = Segments(boundaries, longest, positions, positions[:0], (prompts, longest))
        places, prompt = memory.prompt_places(count, prompts)
        first = memory.source_slots[:prompts].long() * beam
        rows = first[prompt]
        each = (first[:, None] + torch.arange(beam, device=memory.device)).flatten()
        memory.ancestry[:longest, each] = first.repeat_interleave(beam).int()

        def attend(place: int, block: MultiheadAttention, qkv: Tensor) -> Tensor:
            keys, values = memory.cache[:, place].unbind(1)
            q, k, v = qkv.unflatten(1, (3, block.num_heads, -1)).unbind(1)
            keys[places, rows], values[places, rows] = k.flatten(1), v.flatten(1)
            arguments = block.arguments(segments, segments, True, memory.rng, 0)
            return ops.attention_fwd(q, k, v, **arguments)[0].flatten(1)

        x = decoder.embed_packed(tokens, positions, 1, memory.rng, 1)
        return _run_layers(decoder, x, memory.rng, attend, None)


@dataclass(frozen=True, kw_only=True)
class _Attention(Sublayer):
    """attend: from the result of the first product to what the last one reads, [N, C]."""

    attend: Callable[[Tensor], Tensor]

    def forward(self, x: Input, memory: Tensor | None) -> tuple[Tensor, None]:
        projected, _ = self.first.multiply(x)
        return self.last.multiply(Input(self.attend(projected)))[0], None


def _run_layers(
    decoder: Any, x: Input, rng: Tensor, self_attention: Callable[..., Tensor],
    cross_attention: Callable[..., Tensor] | None,
) -> Tensor:  # fmt: skip
    """The decoder's features of embedded tokens x [N, C].

    self_attention: (place of the layer, its block, qkv [N, 3 * C]) -> [N, C], before the output
    projection. cross_attention: the same with queries [N, C] in place of qkv; None for a decoder
    without a source.
    """

    def sublayers(place: int, layer: Any) -> list[Sublayer]:
        site = layer.first_site(rng)

        def attention(block: Any, norm: Any, attend: Callable[..., Tensor], *read: Any) -> Sublayer:
            return _Attention(
                norm=norm, first=Weight.of(*read), last=Weight.of(block.out_proj, bias=False),
                bias=block.out_proj.bias, dropout=layer.output_dropout(rng, site + 1),
                attend=functools.partial(attend, place, block),
            )  # fmt: skip

        block, norm = layer.self_attn, layer.self_attn_layer_norm
        parts = [attention(block, norm, self_attention, block.q_proj, block.k_proj, block.v_proj)]
        if cross_attention is not None:
            block, norm, site = layer.encoder_attn, layer.encoder_attn_layer_norm, site + 2
            parts += [attention(block, norm, cross_attention, block.q_proj)]
        return [*parts, layer.feed_forward(rng, site + 2)]

    layers = list(decoder.layers)
    stack = Stack(
        [sublayers(place, layer) for place, layer in enumerate(layers)], decoder.layer_norm,
        rng, is_pre_norm=layers[0].normalize_before,
    )  # fmt: skip
    features: Tensor = decoder.project_out(apply(stack, x)[0].x)
    return features


def most_rows(memory: SearchBuffers, positions: int) -> int:
    """The most rows of a search whose cache takes no more than its share of the memory."""
    return int(_CACHE * _total(memory.device) / (memory.token_bytes * positions))


def most_source(decoder: Any) -> int:
    """The most source tokens of a search whose keys and values take no more than their share."""
    layers, first = list(decoder.layers), next(decoder.parameters())
    token_bytes = len(layers) * 2 * layers[0].self_attn.out_proj.out_features * first.element_size()
    return int(_SOURCE * _total(first.device) / token_bytes)


@functools.cache
def _total(device: torch.device) -> int:
    """Bytes of memory of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _most_kept(device: torch.device) -> float:
    """Bytes of buffers that may stay allocated between two searches."""
    return 2 * _SOURCE * _total(device) if device.type == "cuda" else 0.0


def _keys_and_values(decoder: Any, features: Tensor) -> Tensor:
    """Cross-attention keys and values of all L layers, [T, L * 2 * C]."""
    return memory_weight(list(decoder.layers)).multiply(Input(features))[0]


def _room(rows: int) -> int:
    """Rows to allocate for ``rows``: 2^k or 3 * 2^k, since each size needs its own graphs."""
    power = 1 << max(rows - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power


def _scale(block: MultiheadAttention) -> float:
    return (block.q_proj.out_features // block.num_heads) ** -0.5


def _cross_weights(
    q: Tensor, keys: Tensor, columns: Tensor, sentences: Tensor, block: MultiheadAttention
) -> Tensor:
    """Attention weights of the queries q [N, C] over the padded source: float32 [H, N, S]."""
    tokens = columns[sentences.clamp_min(0).long()].long()
    heads = block.num_heads
    queries = q.unflatten(1, (heads, -1)) * _scale(block)
    seen = keys[tokens.clamp_min(0)].unflatten(2, (heads, -1))
    scores = torch.einsum("nhd,nshd->hns", queries, seen)
    return torch.softmax(scores.masked_fill_(tokens < 0, -torch.inf), -1, dtype=torch.float32)
