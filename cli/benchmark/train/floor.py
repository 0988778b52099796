"""Lower bound of the time of a training step on an H200, from its arithmetic and memory traffic.

GEMMs run at the best rate measured, everything else at the rate of a copy, one after the other.
Activations and weights have 16 bits. N = bytes of all rows of one activation:

    attention       4 N forward, 8 N backward; half for the rows of queries, half for keys
    sublayer close  4 N forward, 5 N backward (dropout, residual, LayerNorm in one pass)
    feed-forward    one bit per element for the dropout mask, written and read; biases, activations
                    and their gradients are in the GEMMs
    embedding       2 N forward, 4 N backward
    cross entropy   4 bytes per logit: read once, then overwritten with the gradient
    Adam            28 bytes per parameter with whole float32 master weights (26 if split)

Shapes: S = source tokens, T = target tokens, C = width, F = ffn width, V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from lightseq_fairseq.cli.benchmark.train.cases import Shape

FLOPS, BYTES = 790e9, 4.3e9  # per millisecond


class Floor(NamedTuple):
    """Milliseconds by part."""

    layer_gemm: float
    logits_gemm: float
    attention: float
    elementwise: float
    cross_entropy: float
    adam: float


def parameters(shape: Shape, vocabulary: int) -> int:
    """Trained parameters, with one embedding for source, target and output."""
    c, f = shape.width, shape.ffn
    feed_forward = 2 * c * f + f + c
    encoder_layer = 4 * (c * c + c) + feed_forward + 2 * 2 * c
    decoder_layer = 8 * (c * c + c) + feed_forward + 3 * 2 * c
    last_norms = 2 * 2 * c if shape.normalize_before else 0
    layers = shape.encoder_layers * encoder_layer + shape.decoder_layers * decoder_layer
    return vocabulary * c + layers + last_norms


def floor(shape: Shape, vocabulary: int, source: float, target: float) -> Floor:
    """Lower bound for a step with these numbers of real tokens (or their means over many steps)."""
    c, f, encoder, decoder = shape.width, shape.ffn, shape.encoder_layers, shape.decoder_layers
    # Multiply-adds of the forward GEMMs; a step does each three times: forward, dx, dW.
    encoder_layer = source * (4 * c * c + 2 * c * f)
    decoder_layer = target * (6 * c * c + 2 * c * f) + source * 2 * c * c
    macs = encoder * encoder_layer + decoder * decoder_layer
    n_source, n_target = 2 * c * source, 2 * c * target
    attention = 12 * (encoder * n_source + decoder * (1.5 * n_target + 0.5 * n_source))
    close = 9 * (encoder * 2 * n_source + decoder * 3 * n_target)
    mask = 2 * f / 8 * (encoder * source + decoder * target)
    embedding = 6 * (n_source + n_target)
    return Floor(
        layer_gemm=6 * macs / FLOPS,
        logits_gemm=6 * target * c * vocabulary / FLOPS,
        attention=attention / BYTES,
        elementwise=(close + mask + embedding) / BYTES,
        cross_entropy=4 * target * vocabulary / BYTES,
        adam=28 * parameters(shape, vocabulary) / BYTES,
    )
