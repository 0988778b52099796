"""``ls_transformer``: fairseq's Transformer computed on packed tokens by the fused layers.

Everything except the computation is inherited from fairseq's classes: flags, parameter names,
initial values, checkpoint upgrades, the dictionary.

Shapes: B = sentences, N = hypotheses, L = longest sentence, T = packed tokens, C = model width,
H = heads, V = vocabulary.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any, ClassVar

import torch
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.modules import AdaptiveInput, SinusoidalPositionalEmbedding
from fairseq.tasks.multilingual_translation import MultilingualTranslationTask
from torch import Tensor

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation.decoder import AttentionRequest, StepDecoder
from lightseq_fairseq.generation.incremental import Incremental
from lightseq_fairseq.layers import linear, sinusoidal_positions, vocabulary_logits
from lightseq_fairseq.layers.decoder import DecoderLayer, memory_weight, run_decoder
from lightseq_fairseq.layers.embedding import embed_and_cast
from lightseq_fairseq.layers.encoder import EncoderLayer, first_cast, run_encoder
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.memory.packing import Packed, Rows, Segments
from lightseq_fairseq.ops import Cast
from lightseq_fairseq.ops.bias_activation_dropout import ACTIVATIONS
from lightseq_fairseq.plugins.dropout import dropout_rng
from lightseq_fairseq.plugins.encoder_out import EncoderOut, repack
from lightseq_fairseq.plugins.flat_model import FlatModel, NotCompiled


class _Side(NotCompiled):
    """Common base of encoder and decoder: the embedding of packed tokens."""

    _table: Tensor | None = None
    _outgrown: tuple[Tensor, ...] = ()  # smaller tables that captured graphs may still read

    @property
    def embeds_on_host(self: Any) -> bool:
        """Whether the host reads the tokens to embed them, which no CUDA graph can capture."""
        return isinstance(self.embed_tokens, AdaptiveInput)

    def embed_packed(self: Any, tokens: Tensor, positions: Tensor, longest: int, rng: Tensor,
                     site: int) -> Input:  # fmt: skip
        """tokens [T] at ``positions`` [T] (from 0, below ``longest``) -> [T, C] for the layers.

        site: the dropout site, see ``layers.sites``.
        """
        table = self._table_for(longest, positions)
        if self.embeds_on_host:
            return Input(self._embed_adaptively(tokens, positions, table))
        if table is not None:
            first = self.padding_idx + 1  # row of position 0
            if torch.is_grad_enabled() and table.requires_grad:
                positions = positions + first
            else:  # without a gradient, a view that begins at that row is enough
                table = table[first:]
        return embed_and_cast(
            tokens, self.embed_tokens.weight, None if table is None else positions, table,
            scale=self.embed_scale, padding_idx=self.padding_idx,
            p=self.dropout_module.p if self.training else 0.0, rng=rng, site=site,
            project=getattr(self, "project_in_dim", None), norm=self.layernorm_embedding,
            cast=first_cast(self.layers.children()),
        )  # fmt: skip

    def _embed_adaptively(
        self: Any, tokens: Tensor, positions: Tensor, table: Tensor | None
    ) -> Tensor:
        """As ``embed_packed``, by fairseq's own modules; the host reads the tokens."""
        x = self.embed_scale * self.embed_tokens(tokens)
        if table is not None:
            x = x + table[positions + self.padding_idx + 1]
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        embedded: Tensor = self.dropout_module(x)
        return embedded

    def table_rows(self: Any, longest: int) -> int:
        """Rows of the position table for sentences of up to ``longest`` tokens; 0 without a table.

        This number is part of a graph's key: a graph captured with a smaller table would read past
        that table's end. The call also creates the table if needed, which is impossible during
        capture.

        Raises:
            UserError: the table is learned, and has fewer positions.
        """
        table = self._table_for(longest)
        return 0 if table is None else len(table)

    def _table_for(self: Any, longest: int, positions: Tensor | None = None) -> Tensor | None:
        """See ``embed_packed`` and ``table_rows``; a kernel does not check the rows that it reads.

        positions: if ``longest`` counts pads, and there are too many, these tell the real length.
        """
        if self.embed_positions is None:
            return None
        if not isinstance(self.embed_positions, SinusoidalPositionalEmbedding):
            most = len(self.embed_positions.weight) - self.padding_idx - 1
            if longest > most and positions is not None and positions.numel():
                longest = int(positions.max()) + 1
            if longest > most:
                raise UserError(
                    f"A sentence has {longest} tokens, but the model has only {most} learned "
                    "positions: shorten or skip such sentences, or train a model with more "
                    "positions."
                )
        # The table covers the longest sentence that --max-*-positions allow. A longer sentence
        # gets a new table, while captured graphs keep reading the old one.
        rows: int = max(longest, self.max_positions()) + self.padding_idx + 1
        table: Tensor = self._positions(rows)
        return table

    def _positions(self: Any, rows: int) -> Tensor:
        """Learned weight, or a sinusoidal table of at least ``rows`` rows in the model's dtype."""
        module = self.embed_positions
        if not isinstance(module, SinusoidalPositionalEmbedding):
            return module.weight
        table, like = self._table, next(self.embed_tokens.parameters())
        fits = table is not None and table.dtype == like.dtype and table.device == like.device
        if not fits or table.shape[0] < rows:
            rows = max(1024, 1 << (rows - 1).bit_length())
            # If dtype or device differ, the weights have moved too, and no captured graph is valid.
            # Then old tables are not needed.
            self._outgrown = (*self._outgrown, table) if fits else ()
            self._table = table = self.sinusoids(rows).to(like)
        return table

    def sinusoids(self: Any, count: int) -> Tensor:
        """The table of positions, float32 [``count``, C]; position 0 is in row padding_idx + 1."""
        return sinusoidal_positions(count, self.embed_positions.embedding_dim, self.padding_idx)


class LSTransformerEncoder(_Side, TransformerEncoderBase):
    """Encoder on packed tokens. Source: ``fairseq.models.transformer.TransformerEncoderBase``."""

    def build_encoder_layer(self, cfg: TransformerConfig) -> EncoderLayer:
        return EncoderLayer(
            cfg.encoder.embed_dim, cfg.encoder.ffn_embed_dim, cfg.encoder.attention_heads,
            normalize_before=cfg.encoder.normalize_before, **_rates(cfg),
        )  # fmt: skip

    def packed(
        self, src_tokens: Tensor, rng: Tensor, states: list[Tensor] | None = None
    ) -> tuple[Tensor, Segments]:
        """src_tokens int64 [B, L] -> features [T, C] and the segments (rows of each sentence).

        states: see ``run_encoder``.
        """
        segments = Segments.from_mask(src_tokens.ne(self.padding_idx))
        return self.encoded(segments.pack(src_tokens), segments, rng, states).x, segments

    def features(self, tokens: Tensor, segments: Segments, rng: Tensor) -> Tensor:
        """tokens [T] of packed sentences -> [T, C]."""
        return self.encoded(tokens, segments, rng).x

    def encoded(
        self, tokens: Tensor, segments: Segments, rng: Tensor, states: list[Tensor] | None = None,
        cast: Cast | None = None,
    ) -> Input:  # fmt: skip
        """As ``features``; states, cast: see ``run_encoder``."""
        x = self.embed_packed(tokens, segments.positions, segments.max_len, rng, 0)
        return run_encoder(
            self.layers, self.layer_norm, x, segments, rng,
            checkpoint_activations=self.cfg.checkpoint_activations, states=states, cast=cast,
        )  # fmt: skip

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False, token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:  # fmt: skip
        """fairseq's padded interface, for fairseq's generators and other decoders.

        Returns a dict with encoder_out [L, B, C] (zeros at pads), encoder_padding_mask [B, L],
        src_lengths [B, 1] and, with ``return_all_hiddens``, encoder_states: [L, B, C] each.
        """
        if token_embeddings is not None:
            raise UserError(
                "ls_transformer does not support token_embeddings: pass only src_tokens."
            )
        states: list[Tensor] | None = [] if return_all_hiddens else None
        rng = dropout_rng(self, src_tokens.device)
        features, segments = self.packed(src_tokens, rng, states)
        mask = src_tokens.eq(self.padding_idx)
        padded = {
            "encoder_out": [segments.pad(features).transpose(0, 1)],
            "encoder_padding_mask": [mask],
            "encoder_embedding": [],
            "encoder_states": [segments.pad(x).transpose(0, 1) for x in states or ()],
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~mask).sum(1, keepdim=True, dtype=torch.int32)],
        }
        return EncoderOut(padded, features, segments)

    def reorder_encoder_out(
        self, encoder_out: dict[str, list[Tensor]], new_order: Tensor
    ) -> dict[str, list[Tensor]]:
        """Reorder the output: row i becomes the former row ``new_order[i]`` (int64 [N])."""
        if isinstance(encoder_out, EncoderOut):
            return encoder_out.reordered(new_order)
        return super().reorder_encoder_out(encoder_out, new_order)


class LSTransformerDecoder(_Side, TransformerDecoderBase):
    """Decoder on packed tokens. Source: ``fairseq.models.transformer.TransformerDecoderBase``.

    Like fairseq's decoder, it may have no source: then ``no_encoder_attn`` is True, and the
    arguments memory (encoder features) and source (their segments) are None.
    """

    def __init__(
        self, cfg: TransformerConfig, dictionary: Any, embed_tokens: Any,
        no_encoder_attn: bool = False, output_projection: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        self.reads_source = not no_encoder_attn
        self.steps = StepDecoder()

    def build_decoder_layer(
        self, cfg: TransformerConfig, no_encoder_attn: bool = False
    ) -> DecoderLayer | EncoderLayer:
        side = cfg.decoder
        sizes = (side.embed_dim, side.ffn_embed_dim, side.attention_heads)
        rates = {"normalize_before": side.normalize_before, **_rates(cfg)}
        if no_encoder_attn:
            return EncoderLayer(*sizes, **rates)
        return DecoderLayer(*sizes, encoder_dim=cfg.encoder.embed_dim, **rates)

    def packed(
        self, prev_output_tokens: Tensor, memory: Tensor | None, source: Segments | None,
        rng: Tensor, causal: bool = True, attention_of: int | None = None,
    ) -> tuple[Tensor, Segments, Tensor | None]:  # fmt: skip
        """prev_output_tokens int64 [B, L], memory [T_src, C] -> features [T, C], segments, weights.

        weights: cross-attention probabilities [H, B, L, L_src] of the layer ``attention_of``, or
        None.
        """
        segments = Segments.from_mask(prev_output_tokens.ne(self.padding_idx))
        tokens = segments.pack(prev_output_tokens)
        x, weights = self.features(tokens, segments, memory, source, rng, causal, attention_of)
        return x, segments, weights

    def features(
        self, tokens: Tensor, segments: Segments, memory: Tensor | Input | None,
        source: Segments | None, rng: Tensor, causal: bool = True, attention_of: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """tokens [T] of packed sentences, memory [T_src, C] -> [T, C], weights as in ``packed``."""
        x = self.embed_packed(tokens, segments.positions, segments.max_len, rng, 1)
        stack, recompute = (self.layers, self.layer_norm), self.cfg.checkpoint_activations
        if memory is None or source is None:
            y = run_encoder(*stack, x, segments, rng, causal, recompute).x
            return self.project_out(y), None
        weights: list[Tensor] | None = None if attention_of is None else []
        y = run_decoder(
            *stack, x, memory, segments, source, rng, causal, recompute, weights, attention_of or 0
        )
        return self.project_out(y), weights[0] if weights else None

    def project_out(self, x: Tensor) -> Tensor:
        """Project features of the stack [T, C] to the width of the output embedding."""
        return x if self.project_out_dim is None else linear(x, self.project_out_dim.weight)

    def output_layer(self, features: Tensor) -> Tensor:
        """Logits [..., V] of features [..., C]; with adaptive softmax, the features themselves."""
        if self.adaptive_softmax is not None:
            return features
        rows = features.flatten(0, -2)
        logits = vocabulary_logits(rows, self.output_projection.weight)
        return logits.unflatten(0, features.shape[:-1])

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: dict[str, Any] | None = None, full_context_alignment: bool = False,
        alignment_layer: int | None = None, alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        """fairseq's padded interface: features [B, L, C], or [B, 1, C] with incremental state.

        extra["attn"][0] is the cross attention [B, L, L_src] of ``alignment_layer`` (default: the
        last), averaged over the first ``alignment_heads`` heads (default: all).
        """
        if not self.reads_source:
            encoder_out = None
        elif encoder_out is None:
            raise UserError("The decoder of ls_transformer needs encoder_out: pass it.")
        layer = self.num_layers - 1 if alignment_layer is None else alignment_layer
        if incremental_state is not None:
            hypotheses = self._incremental(encoder_out, incremental_state, prev_output_tokens)
            request = AttentionRequest(layer, alignment_heads) if self.reads_source else None
            features, attention = hypotheses.decode_next(self, prev_output_tokens, request)
            return features.unsqueeze(1), _extras(
                None if attention is None else attention.unsqueeze(1)
            )
        memory, source = (None, None) if encoder_out is None else repack(encoder_out)
        features, segments, weights = self.packed(
            prev_output_tokens, memory, source, dropout_rng(self, prev_output_tokens.device),
            causal=not full_context_alignment, attention_of=layer,
        )  # fmt: skip
        return segments.pad(features), _extras(_over_heads(weights, alignment_heads))

    def _incremental(
        self, encoder_out: dict[str, list[Tensor]] | None, state: dict[str, Any], tokens: Tensor
    ) -> Incremental:
        kept = self.get_incremental_state(state, "hypotheses")
        if kept is None:
            memory: Tensor | None
            if encoder_out is None:
                none = tokens.new_zeros(len(tokens), 0, dtype=torch.bool)
                memory, source, rows = None, Segments.from_mask(none), None
            elif isinstance(encoder_out, EncoderOut):
                memory, source, rows = encoder_out.features, encoder_out.segments, encoder_out.rows
            else:
                (memory, source), rows = repack(encoder_out), None
            kept = {"hypotheses": Incremental(self.steps, self, memory, source, rows)}
            self.set_incremental_state(state, "hypotheses", kept)
        return kept["hypotheses"]

    def reorder_incremental_state(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        """Reorder the hypotheses: row i becomes the former row ``new_order[i]``.

        Beam search calls this after each step.
        """
        kept = self.get_incremental_state(incremental_state, "hypotheses")
        if kept is not None:
            kept["hypotheses"].reorder(new_order)


def _over_heads(weights: Tensor | None, heads: int | None) -> Tensor | None:
    """Weights [H, B, L, L_src], averaged over the first ``heads`` heads (None: all)."""
    return None if weights is None else weights[:heads].mean(0)


def _extras(attention: Tensor | None) -> dict[str, Any]:
    """fairseq's dict of extras with the attention [B, L, L_src]."""
    return {"attn": [attention], "inner_states": []}


def _rates(cfg: TransformerConfig) -> dict[str, Any]:
    return {
        "dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        # --relu-dropout is the old name; like fairseq, read it if the new one is zero.
        "activation_dropout": float(cfg.activation_dropout or cfg.relu_dropout or 0.0),
        "activation": str(cfg.activation_fn),
    }


@register_model("ls_transformer")
class LSTransformerModel(FlatModel, TransformerModel):
    """Transformer on packed tokens with all parameters in one flat buffer.

    Attributes:
        of_encoder, of_decoder: the classes of its two sides.

    Source: ``fairseq.models.transformer.TransformerModel``, whose flags, parameter names and
    initial values it keeps; Vaswani et al. 2017.
    """

    packs_tokens = True  # the ls_ criteria call forward with packed=True
    family = families.TRANSLATION
    of_encoder: ClassVar[type[LSTransformerEncoder]] = LSTransformerEncoder
    of_decoder: ClassVar[type[LSTransformerDecoder]] = LSTransformerDecoder

    @classmethod
    def build_model(cls, args: Namespace, task: Any) -> LSTransformerModel:
        """As in ``FlatModel``; raises UserError also for --task multilingual_translation."""
        if isinstance(task, MultilingualTranslationTask):
            raise UserError(
                f"--arch {args.arch} is one model, but --task multilingual_translation trains one "
                "for each language pair: use --arch ls_multilingual_transformer, or --task "
                "translation_multi_simple_epoch, which trains one model for all pairs."
            )
        return super().build_model(args, task)

    @classmethod
    def add_args(cls, parser: ArgumentParser) -> None:
        """fairseq's flags, and all activations of the fused layers."""
        super().add_args(parser)
        # The parser has no public list of its flags.
        flag = parser._option_string_actions["--activation-fn"]
        flag.choices = [*dict.fromkeys((*(flag.choices or ()), *ACTIVATIONS))]

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Any, embed_tokens: Any) -> LSTransformerEncoder:
        return cls.of_encoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Any, embed_tokens: Any) -> LSTransformerDecoder:
        return cls.of_decoder(TransformerConfig.from_namespace(args), tgt_dict, embed_tokens)

    def sides(self) -> list[tuple[LSTransformerEncoder, LSTransformerDecoder]]:
        return [(self.encoder, self.decoder)]

    def spared(self) -> list[Tensor]:
        projection = self.decoder.output_projection
        return [] if projection is None else [projection.weight]

    def forward(
        self, src_tokens: Tensor, src_lengths: Tensor | None, prev_output_tokens: Tensor,
        return_all_hiddens: bool = True, features_only: bool = False,
        alignment_layer: int | None = None, alignment_heads: int | None = None,
        packed: bool = False,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Logits of a batch.

        Args:
            src_tokens: int64 [B, L_src], padded on either side.
            src_lengths: not used; the lengths follow from the pads.
            prev_output_tokens: int64 [B, L], padded on the right.
            features_only: stop before the projection to the vocabulary.
            alignment_layer, alignment_heads: see ``LSTransformerDecoder.extract_features``.
            packed: return only the rows of real tokens, and no extras.

        Returns:
            (logits [B, L, V] with zeros at pads, fairseq's dict of extras), or with ``packed``
            (logits [T, V], segments of the target).
        """
        rng = dropout_rng(self, src_tokens.device)
        memory, source = self.encoder.packed(src_tokens, rng)
        layer = self.decoder.num_layers - 1 if alignment_layer is None else alignment_layer
        x, segments, weights = self.decoder.packed(
            prev_output_tokens, memory, source, rng, attention_of=None if packed else layer
        )
        if not features_only:
            x = self.decoder.output_layer(x)
        if packed:
            return x, segments
        return segments.pad(x), _extras(_over_heads(weights, alignment_heads))

    def packed_logits(self, batch: Packed, rng: Tensor) -> Tensor:
        """Logits [T, V] of a batch of sentence pairs; ``rng`` int64 [2] from ``draw_rng``."""
        return packed_logits(self.encoder, self.decoder, batch, rng)


def packed_logits(
    encoder: LSTransformerEncoder, decoder: LSTransformerDecoder, batch: Packed, rng: Tensor
) -> Tensor:
    """See ``LSTransformerModel.packed_logits``."""
    target = batch["target"]
    x = decoded(encoder, decoder, batch["source"], target["previous"], target.segments, rng)
    return decoder.output_layer(x)


def decoded(
    encoder: LSTransformerEncoder, decoder: LSTransformerDecoder, source: Rows, previous: Tensor,
    segments: Segments, rng: Tensor,
) -> Tensor:  # fmt: skip
    """Features [T, C] of the decoder, whose input is ``previous`` [T] in ``segments``."""
    layers = list(decoder.layers.children())
    cast = memory_weight(layers).input_cast if layers else None
    memory = encoder.encoded(source["tokens"], source.segments, rng, cast=cast)
    return decoder.features(previous, segments, memory, source.segments, rng)[0]
