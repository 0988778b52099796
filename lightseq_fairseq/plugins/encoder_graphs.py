"""Features of sentences without gradients, by CUDA graphs of an encoder.

The kernels of a small batch take less time than their launches. So the encoder runs as a graph.

Shapes: B = sentences, L = longest sentence with its pads, T = packed tokens, C = model width.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.generation.parameter_addresses import ParameterAddresses
from lightseq_fairseq.memory.filling import Column, Filled, packed
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.packing import LEAST_GRANULARITY, Granularity, PackedBatch, Stream
from lightseq_fairseq.plugins.dropout import dropout_rng
from lightseq_fairseq.plugins.transformer import LSTransformerEncoder

# ``places`` are indices of the tokens in the flattened padded batch.
_LAYOUT = (Stream("source", ("tokens", "places")),)
_LEAST_BLOCK = 1 << 16  # elements; room for batches of 20 000 tokens


class EncoderGraphs:
    """Runs one encoder in evaluation mode, as CUDA graphs where they can be captured.

    The graphs and the block that they read are kept from batch to batch, until the weights move.
    Several threads and streams may use this object; their calls run one after another. A copy of
    the encoder's model gets an empty ``EncoderGraphs``.
    """

    _addresses: ParameterAddresses
    _block: Tensor
    _done: torch.cuda.Event | None

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._graphs: Graphs | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @torch.no_grad()
    def features(self, encoder: LSTransformerEncoder, src_tokens: Tensor) -> Tensor:
        """Features [B, L, C] of src_tokens int64 [B, L], zeros at pads, which may be anywhere.

        Row counts are rounded up so that few graphs suffice, even if no graph is captured. So the
        results have the same bits with and without graphs.
        """
        batch = _packed(src_tokens, encoder.padding_idx)
        with self._turn:
            try:
                return self._features(encoder, batch, (src_tokens.shape[0], src_tokens.shape[1]))
            except BaseException:
                self._forget()
                raise

    def _features(
        self, encoder: LSTransformerEncoder, batch: PackedBatch, shape: tuple[int, int]
    ) -> Tensor:
        graphs = self._open(encoder, len(batch.block))
        block = self._block[: len(batch.block)]
        with self._in_turn(block.device):
            given = batch.pin_memory() if block.is_cuda else batch
            block.copy_(given.block, non_blocking=True)
            source = batch.open(block)["source"]

            def encode() -> Tensor:
                rng = dropout_rng(encoder, block.device)
                return encoder.features(source["tokens"], source.segments, rng)

            # On a GPU, the length of the longest sentence affects only two things: attention, whose
            # bound is part of the bucket, and the table of positions.
            key = batch.bucket, encoder.table_rows(batch.longest[0])
            features = graphs.launch(key, encode)
            real = replace(source.segments, index=source["places"][: batch.ntokens], shape=shape)
            return real.pad(features[: batch.ntokens])  # a copy: the next batch overwrites features

    def _open(self, encoder: LSTransformerEncoder, size: int) -> Graphs:
        """The graphs; new ones if the encoder changed, its weights moved or the block must grow."""
        if self._graphs is None or size > len(self._block) or not self._addresses.intact(encoder):
            self._forget()
            device = encoder.embed_tokens.weight.device
            self._graphs = Graphs(device, "passes of the encoder")
            self._addresses = ParameterAddresses(encoder)
            self._done = torch.cuda.Event() if device.type == "cuda" else None
            room = max(_LEAST_BLOCK, 1 << (size - 1).bit_length())
            with torch.inference_mode(False):  # else only calls in inference mode could write it
                self._block = torch.zeros(room, dtype=torch.int64, device=device)
        return self._graphs

    @contextlib.contextmanager
    def _in_turn(self, device: torch.device) -> Iterator[None]:
        """Let the current stream wait until other streams have used the block and the graphs."""
        if self._done is None:
            yield
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(self._done)
        yield
        stream.record_event(self._done)

    def _forget(self) -> None:
        """Drop the graphs, for example after an error within a pass."""
        if self._graphs is not None:
            self._graphs.clear()
        self._graphs = None


def _packed(src_tokens: Tensor, pad: int) -> PackedBatch:
    """The real tokens of a padded batch; the only time that the host waits for the GPU, because all
    shapes depend on their number."""
    padded = src_tokens.cpu().numpy()
    is_real = padded != pad
    places = is_real.ravel().nonzero()[0]
    # From 2048 rows on, at most a thirty-second of the rows is unused.
    fine = max(LEAST_GRANULARITY, 1 << max(len(places) - 1, 0).bit_length() >> 6)
    columns = (Column(padded.ravel()[places], pad), Column(places, 0))
    source = Filled(is_real.sum(1), columns, Granularity(fine), least=1)
    return packed(_LAYOUT, [source], len(places))
