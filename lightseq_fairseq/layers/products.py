"""The matrix products of the layers, in the model's precision or in fp8.

A sublayer asks ``product_for`` once for each of its weights, in forward, and keeps the answer for
backward. Both kinds have the same methods. A forward product returns its result and what backward
needs of the input: the input itself, or its transpose in E4M3, which is smaller. If backward has
the input in any case, it makes the transpose from that.

Where an op of the layers produces an operand, it casts it (the embedding; LayerNorm, the activation
and attention, forward and backward); the others are cast here.

Shapes: T = packed tokens, K = inputs, N = outputs, F = feed-forward width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.memory import fp8
from lightseq_fairseq.ops.casting import E4M3


@dataclass(frozen=True)
class Activation:
    """The activation function and the dropout after it.

    Attributes:
        name: relu, gelu (erf) or gelu_accurate (tanh), fairseq's names.
        p, rng, site: dropout, see ``ops.philox``.
    """

    name: str
    p: float
    rng: Tensor
    site: int


class Product:
    """y = x weight^T + bias in the model's precision, and its derivatives."""

    def forward(self, x: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """y [T, N], and what backward needs of x [T, K].

        x: may be a result of `activated` or `attended`. weight: [N, K], bias: [N] or None.
        """
        return ops.linear_fwd(x, weight, bias), x

    def backward(
        self, dy: Any, kept: Tensor, weight: Tensor, dweight: Tensor, dbias: Tensor | None,
        accumulate: bool, need_dx: bool = True, onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """dx [T, K]; writes dweight and dbias. See ``ops.linear_bwd``.

        dy: [T, N]; or memory of `gradient_like` that `attention_gradients` has written; or a result
        of `before_activation` of the next product. kept: from `forward`.
        """
        return ops.linear_bwd(dy, kept, weight, dweight, dbias, accumulate, need_dx, onto)

    def activated(
        self, x: Tensor, weight: Tensor, bias: Tensor, activation: Activation, need_slope: bool,
        following: Any,
    ) -> tuple[Any, Tensor, Tensor | None]:  # fmt: skip
        """The input of the ``following`` product: dropout(activation(x weight^T + bias)) [T, F].

        Also returns what backward needs of x, and for gelu what it needs of the activation.
        """
        a = activation
        h, _, slope = ops.linear_activation_fwd(
            x, weight, bias, a.name, ops.Dropout(a.p, a.rng, a.site), need_slope
        )
        return h, x, None if a.name == "relu" else slope

    def before_activation(
        self, dy: Tensor, kept: Tensor, weight: Tensor, dweight: Tensor, activation: Activation,
        saved: Tensor | None, bias: Tensor, dbias: Tensor, accumulate: bool, previous: Any,
    ) -> Any:  # fmt: skip
        """Backward of this product and of the activation before it: the gradient dz [T, F].

        Writes dweight of this product, and dbias of the ``previous`` one, whose bias is ``bias``.
        dy: [T, N]. kept: from `forward`. saved: the third result of `activated`.
        """
        dz, _ = ops.activation_linear_bwd(
            dy, kept, weight, saved, activation.p, dweight, dbias, accumulate, bias=bias
        )
        return dz

    def embedded(
        self, tokens: Tensor, weight: Tensor, positions: Tensor | None,
        position_weight: Tensor | None, gamma: Tensor | None, beta: Tensor | None, scale: float,
        dropout: ops.Dropout, eps: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """(y, mean, rstd): ``ops.embedding_layer_norm_fwd``, or without gamma and beta
        ``ops.embedding_fwd``; this product will read y."""
        tables = tokens, weight, positions, position_weight
        if gamma is None or beta is None:
            return ops.embedding_fwd(*tables, scale, dropout)[0], None, None
        return ops.embedding_layer_norm_fwd(*tables, gamma, beta, scale, dropout, eps)[:3]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Any, ...]:
        """(x, out, lse): the results of ``ops.attention_fwd``, and x, which this product reads."""
        out, lse, _ = ops.attention_fwd(q, k, v, **arguments)
        return out.flatten(1), out, lse

    def gradient_like(self, y: Tensor) -> Tensor:
        """Memory for the gradient of y, a result of `forward` or a part of it."""
        return torch.empty_like(y)

    def attention_gradients(self, of_keys: Any, **arguments: Any) -> None:
        """``ops.attention_bwd``: dq for this product, dk and dv for the product ``of_keys``.

        They are parts of memory of `gradient_like`.
        """
        ops.attention_bwd(**arguments)

    def to_autograd(self, dy: Tensor, y: Tensor) -> Tensor:
        """What autograd gets as the gradient of y, for dy in memory of `gradient_like`."""
        return dy

    def from_autograd(self, dy: Tensor) -> Tensor:
        """The inverse of `to_autograd`; other gradients stay as they are."""
        return dy

    def normalised(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, gamma: Tensor,
        beta: Tensor, dropout: ops.Dropout, *, eps: float, is_only_reader: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """``ops.dropout_residual_layer_norm_fwd``; this product will read y, perhaps only this."""
        return ops.dropout_residual_layer_norm_fwd(x, bias, residual, gamma, beta, dropout, eps)[:4]

    def before_residual(
        self, dy: Tensor | None, dsum: Tensor | None, total: Tensor, gamma: Tensor | None,
        mean: Tensor, rstd: Tensor, dropout: ops.Dropout, **sums: Any,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        """``ops.dropout_residual_layer_norm_bwd``: the gradients of this product's result, for
        `backward`, and of the residual.

        sums: dgamma, dbeta, dbias and accumulate.
        """
        dx, dresidual, _ = ops.dropout_residual_layer_norm_bwd(
            dy, dsum, total, gamma, mean, rstd, dropout, **sums
        )
        return (dx if dropout.p > 0 else dresidual), dresidual


class Fp8Product(Product):
    """The same in fp8: both operands of each product are E4M3, its result is bfloat16.

    The arguments ``weight`` are not read: the operands have them in E4M3.
    """

    def __init__(self, operands: fp8.Operands) -> None:
        self.operands = of = operands
        self.weight = ops.Quantised(of.values, of.transpose, of.weight.scale)

    def forward(self, x: Any, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        given, kept = self._input(x)
        return ops.linear_fwd(given, self.weight, bias), kept

    def _input(self, x: Any) -> tuple[ops.Quantised, Tensor]:
        of = self.operands
        if isinstance(x, Tensor):
            x = fp8.attached(x, of) or fp8.Input(*ops.fp8_quantise(x, of.input))
        of.count(x.values.numel())
        return ops.Quantised(x.values, None, of.input.scale), x.kept

    def _kept(self, x: Tensor) -> ops.Quantised:
        scale = self.operands.input.scale
        return ops.Quantised(None, x if x.dtype == E4M3 else ops.fp8_transpose(x, scale), scale)

    def backward(
        self, dy: Any, kept: Tensor, weight: Tensor, dweight: Tensor, dbias: Tensor | None,
        accumulate: bool, need_dx: bool = True, onto: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        gradient = self._gradient(dy, dbias, accumulate)
        return ops.linear_bwd(
            gradient, self._kept(kept), self.weight, dweight, None, accumulate, need_dx, onto
        )

    def _gradient(self, dy: Any, dbias: Tensor | None, accumulate: bool) -> ops.Quantised:
        to = self.operands.gradient
        if isinstance(dy, tuple):
            values, transpose = dy
        elif dy.dtype == E4M3:
            values = dy
            transpose = ops.fp8_transpose(dy, to.scale, sums=dbias, accumulate=accumulate)
        else:
            values, transpose = ops.fp8_quantise(dy, to, sums=dbias, accumulate=accumulate)
        self.operands.count(values.numel())
        return ops.Quantised(values, transpose, to.scale)

    def activated(
        self, x: Tensor, weight: Tensor, bias: Tensor, activation: Activation, need_slope: bool,
        following: Any,
    ) -> tuple[Any, Tensor, Tensor | None]:  # fmt: skip
        a, (given, kept) = activation, self._input(x)
        h, transpose, slope = ops.linear_activation_fwd(
            given, self.weight, bias, a.name, ops.Dropout(a.p, a.rng, a.site), need_slope,
            following.operands.input,
        )  # fmt: skip
        return fp8.Input(h, transpose), kept, None if a.name == "relu" else slope

    def before_activation(
        self, dy: Tensor, kept: Tensor, weight: Tensor, dweight: Tensor, activation: Activation,
        saved: Tensor | None, bias: Tensor, dbias: Tensor, accumulate: bool, previous: Any,
    ) -> Any:  # fmt: skip
        return ops.activation_linear_bwd(
            self._gradient(dy, None, accumulate), self._kept(kept), self.weight, saved,
            activation.p, dweight, dbias, accumulate, bias=bias, cast=previous.operands.gradient,
        )  # fmt: skip

    def embedded(
        self, tokens: Tensor, weight: Tensor, positions: Tensor | None,
        position_weight: Tensor | None, gamma: Tensor | None, beta: Tensor | None, scale: float,
        dropout: ops.Dropout, eps: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        tables, to = (tokens, weight, positions, position_weight), self.operands.input
        mean = rstd = None
        if gamma is None or beta is None:
            y, values = ops.embedding_fwd(*tables, scale, dropout, to)
        else:
            y, mean, rstd, values = ops.embedding_layer_norm_fwd(
                *tables, gamma, beta, scale, dropout, eps=eps, cast=to
            )
        # detach: a tensor that refers to itself is freed late.
        fp8.attach(y, self.operands, fp8.Input(values, y.detach()))
        return y, mean, rstd

    def attended(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Any, ...]:
        out, lse, values = ops.attention_fwd(q, k, v, **arguments, cast=self.operands.input)
        return fp8.Input(values, out.flatten(1)), out, lse

    def gradient_like(self, y: Tensor) -> Tensor:
        return torch.empty_like(y, dtype=E4M3)

    def attention_gradients(self, of_keys: Any, **arguments: Any) -> None:
        of_q, of_k = self.operands.gradient, of_keys.operands.gradient
        ops.attention_bwd(**arguments, q_cast=of_q, k_cast=of_k)

    def to_autograd(self, dy: Tensor, y: Tensor) -> Tensor:
        given = fp8.stand_in(y, self.operands)
        fp8.attach(given, self.operands, dy)
        return given

    def from_autograd(self, dy: Tensor) -> Tensor:
        given = fp8.attached(dy, self.operands)
        return dy if given is None else given

    def normalised(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, gamma: Tensor,
        beta: Tensor, dropout: ops.Dropout, *, eps: float, is_only_reader: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        total, y, mean, rstd, values, transpose = ops.dropout_residual_layer_norm_fwd(
            x, bias, residual, gamma, beta, dropout, eps, keep_y=not is_only_reader,
            cast=self.operands.input,
        )  # fmt: skip
        if is_only_reader:
            y = fp8.stand_in(x, self.operands)
        fp8.attach(y, self.operands, fp8.Input(values, transpose))
        return total, y, mean, rstd

    def before_residual(
        self, dy: Tensor | None, dsum: Tensor | None, total: Tensor, gamma: Tensor | None,
        mean: Tensor, rstd: Tensor, dropout: ops.Dropout, **sums: Any,
    ) -> tuple[Any, Tensor]:  # fmt: skip
        values, dresidual, transpose = ops.dropout_residual_layer_norm_bwd(
            dy, dsum, total, gamma, mean, rstd, dropout, **sums, cast=self.operands.gradient
        )
        return (values, transpose), dresidual


PLAIN = Product()


def product_for(weight: Tensor) -> Product:
    """The product with this weight, or with this result of ``as_one``."""
    operands = fp8.operands_of(weight)
    return PLAIN if operands is None else Fp8Product(operands)


__all__ = ["PLAIN", "Activation", "Fp8Product", "Product", "product_for"]
