"""Column sums (gradients of biases and of LayerNorms) that share launches.

The kernels of `linear_bwd`, `activation_linear_bwd`, `bias_activation_dropout_bwd`,
`dropout_residual_layer_norm_bwd` and `embedding_layer_norm_bwd` write partial sums, which a second
kernel adds up. A step launches the second kernel about sixty times, for about a microsecond each.
Between `defer_column_sums` and `flush_column_sums` these sums are collected into a few launches.
The references need no second kernel, so both ops have references that do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .checks import FLOATS, check_rows
from .registry import Written, define


class DeferColumnSums(NamedTuple):
    """Defer column sums into ``flat`` until `flush_column_sums`.

    Until then do not read gradients in ``flat`` that an op has been told to write, and do not write
    to them. Gradients outside ``flat``, and gradients of ops on other streams than the current one,
    are not deferred.

    flat: [N], contiguous. One per device: a second call flushes the sums of the first.
    """

    flat: Tensor

    def check(self, op: str) -> None:
        check_rows(op, "flat", self.flat, ("N",), FLOATS)

    def reference(self) -> None:
        pass


defer_column_sums = define("defer_column_sums", DeferColumnSums)


class FlushColumnSums(NamedTuple):
    """Flush deferred sums, or discard them if ``wanted`` is False, and stop deferring.

    flat: as for `defer_column_sums`. wanted: False after an error, when the sums are not used.
    """

    flat: Written
    wanted: bool

    def check(self, op: str) -> None:
        DeferColumnSums(self.flat).check(op)

    def reference(self) -> None:
        pass


flush_column_sums = define("flush_column_sums", FlushColumnSums)
