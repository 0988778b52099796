"""Features of sentences without gradients, by CUDA graphs of an encoder.

Shapes: B = sentences, L = longest sentence with its pads, T = packed tokens, C = model width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightseq_fairseq.generation.module_graphs import ModuleGraphs
from lightseq_fairseq.memory.filling import Column, Filled, packed
from lightseq_fairseq.memory.graphs import Graphs
from lightseq_fairseq.memory.packing import LEAST_GRANULARITY, Granularity, PackedBatch, Stream
from lightseq_fairseq.plugins.dropout import dropout_rng
from lightseq_fairseq.plugins.transformer import LSTransformerEncoder

# ``places`` are indices of the tokens in the flattened padded batch.
_LAYOUT = (Stream("source", ("tokens", "places")),)


class EncoderGraphs(ModuleGraphs):
    """Runs one encoder in evaluation mode, as CUDA graphs where they can be captured."""

    def __init__(self, what: str = "passes of the encoder") -> None:
        super().__init__(what)

    def features(self, encoder: LSTransformerEncoder, src_tokens: Tensor) -> Tensor:
        """Features [B, L, C] of src_tokens int64 [B, L], zeros at pads, which may be anywhere.

        Row counts are rounded up so that few graphs suffice, even if no graph is captured. So the
        results have the same bits with and without graphs.
        """
        batch = _packed(src_tokens, encoder.padding_idx)
        return self._features(encoder, batch, (src_tokens.shape[0], src_tokens.shape[1]))

    def _features(
        self, encoder: LSTransformerEncoder, batch: PackedBatch, shape: tuple[int, int]
    ) -> Tensor:
        device = encoder.embed_tokens.weight.device

        def send(block: Tensor) -> None:
            given = batch.pin_memory() if block.is_cuda else batch
            block.view(torch.int64).copy_(given.block, non_blocking=True)

        def launch(graphs: Graphs, block: Tensor) -> Tensor:
            source = batch.open(block.view(torch.int64))["source"]

            def encode() -> Tensor:
                rng = dropout_rng(encoder, device)
                return encoder.features(source["tokens"], source.segments, rng)

            # On a GPU, the length of the longest sentence affects only two things: attention, whose
            # bound is part of the bucket, and the table of positions.
            key = batch.bucket, encoder.table_rows(batch.longest[0])
            features = graphs.launch(key, encode)
            real = replace(source.segments, index=source["places"][: batch.ntokens], shape=shape)
            rows = features[: batch.ntokens]
            padded = real.pad(rows)  # no copy if there are no pads
            return padded.clone() if padded.data_ptr() == rows.data_ptr() else padded

        return self.run(encoder, device, batch.block.nbytes, send, launch)


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
