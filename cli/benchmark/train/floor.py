"""Lower bound of the time of a training step on an H200, from its arithmetic and memory traffic.

GEMMs run at the best rate measured, everything else at the rate of a copy, one after the other.
Activations and weights have 16 bits. In fp8, the GEMMs of the layers have a rate of their own, and
the bytes are the same: a cast writes 8 bits twice. N = bytes of all rows of one activation:

    attention       4 N forward, 8 N backward; half for the rows of queries, half for keys. In
                    blocks of L tokens at least its GEMMs: 2 L C operations per token forward,
                    4 L C backward, since the causal mask skips half of the products; twice
                    as many in encoders and in cross attention, which are not causal
    sublayer close  4 N forward, 5 N backward (dropout, residual, LayerNorm in one pass)
    feed-forward    one bit per element for the dropout mask, written and read; biases, activations
                    and their gradients are in the GEMMs
    embedding       2 N forward, 4 N backward
    cross entropy   4 bytes per logit: read once, then overwritten with the gradient
    Adam            28 bytes per parameter with whole float32 master weights (26 if they are stored
                    as the bf16 weight and a 16-bit remainder)

A language model has no source, and no cross attention. RoBERTa has only an encoder, and computes
the logits of the masked tokens alone.

Shapes: S = source tokens, T = target tokens, C = width, F = ffn width, V = vocabulary,
L = tokens of a block of text.
"""

from __future__ import annotations

from typing import NamedTuple

from lightseq_fairseq.cli.benchmark.train.corpus import MASKED_SHARE
from lightseq_fairseq.cli.benchmark.train.shapes import UNUSED_POSITIONS, Shape

BYTES = 4.3e9  # per millisecond


class Rates(NamedTuple):
    """Operations of GEMMs per millisecond."""

    gemm: float
    fp8_gemm: float


# In a burst at the highest clock, and for seconds at the power limit of 700 W, which long runs
# reach: the fastest passes over t2t big's layers in docs/notebook/fp8.md ("fp8 products"). The
# burst rate of fp8 is not measured: it is twice that of bf16.
BURST, SUSTAINED = Rates(790e9, 1580e9), Rates(630e9, 1041e9)


class Floor(NamedTuple):
    """Milliseconds by part."""

    layer_gemm: float
    logits_gemm: float
    attention: float
    elementwise: float
    cross_entropy: float
    adam: float


def parameters(shape: Shape, vocabulary: int) -> int:
    """Trained parameters; all embeddings of a translation model are one."""
    c, f, cross = shape.width, shape.ffn, not shape.is_language_model
    attention = 4 * (c * c + c)
    feed_forward = 2 * c * f + f + c
    encoder_layer = attention + feed_forward + 2 * 2 * c
    decoder_layer = (1 + cross) * attention + feed_forward + (2 + cross) * 2 * c
    last_norms = (1 + cross) * 2 * c if shape.normalize_before else 0
    # RoBERTa: a linear layer, a LayerNorm and the logit biases.
    head = c * c + c + 2 * c + vocabulary if shape.is_masked else 0
    sides = 2 if shape.encoder_layers and shape.decoder_layers else 1
    head += 2 * c * sides * shape.norms_embedding
    layers = shape.encoder_layers * encoder_layer + shape.decoder_layers * decoder_layer
    embeddings = vocabulary if shape.tied else 2 * vocabulary
    positions = sides * (shape.positions + UNUSED_POSITIONS) if shape.positions else 0
    return (embeddings + positions) * c + layers + last_norms + head


def floor(
    shape: Shape, vocabulary: int, source: float, target: float, block: float = 0,
    text: float = 0, classifies: bool = False, in_fp8: bool = False, rates: Rates = BURST,
) -> Floor:  # fmt: skip
    """Lower bound for a step with these numbers of real tokens (or their means over many steps).

    The tokens of RoBERTa are those of ``target``.

    Args:
        block: tokens of a block of text; 0: sentences, which are short.
        text: tokens of a source, as its tokens see it on average; 0: sources are short.
        classifies: RoBERTa is fine-tuned for classes of sentences, without logits of words.
        in_fp8: the GEMMs of the layers are in fp8.
        rates: BURST or SUSTAINED.
    """
    predicted, head = target, vocabulary
    if shape.is_masked:
        source, target, predicted = target, 0.0, MASKED_SHARE * target * (not classifies)
        head += shape.width
    c, f, encoder, decoder = shape.width, shape.ffn, shape.encoder_layers, shape.decoder_layers
    cross = not shape.is_language_model
    # Multiply-adds of the forward GEMMs; a step does each three times: forward, dx, dW.
    encoder_layer = source * (4 * c * c + 2 * c * f)
    decoder_layer = target * ((4 + 2 * cross) * c * c + 2 * c * f) + source * cross * 2 * c * c
    macs = encoder * encoder_layer + decoder * decoder_layer
    n_source, n_target = 2 * c * source, 2 * c * target
    of_decoder = (1 + 0.5 * cross) * n_target + 0.5 * cross * n_source
    attention = 12 * (encoder * n_source + decoder * of_decoder)
    if shape.is_masked:
        text = block
    products = 6 * c * (block * decoder * target + 2 * text * encoder * source)
    products += 12 * text * c * decoder * target * cross
    close = 9 * (encoder * 2 * n_source + decoder * (2 + cross) * n_target)
    mask = 2 * f / 8 * (encoder * source + decoder * target)
    embedding = 6 * (n_source + n_target)
    return Floor(
        layer_gemm=6 * macs / (rates.fp8_gemm if in_fp8 else rates.gemm),
        logits_gemm=6 * predicted * c * head / rates.gemm,
        attention=max(attention / BYTES, products / rates.gemm),
        elementwise=(close + mask + embedding) / BYTES,
        cross_entropy=4 * predicted * vocabulary / BYTES,
        adam=28 * parameters(shape, vocabulary) / BYTES,
    )
