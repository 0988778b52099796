"""Sums over rows, gradients of biases and of LayerNorms, that share launches.

The kernels of `linear_bwd`, `bias_activation_dropout_bwd` and `dropout_residual_layer_norm_bwd`
leave partial sums behind, which a second launch adds up. A step has some sixty of these, of a
microsecond each: between `defer_column_sums` and `flush_column_sums` a few launches do for all. The
references need no second launch, and there both do nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .checks import FLOATS, check_rows, check_tensor
from .registry import Written, define


class DeferColumnSums(NamedTuple):
    """From now on sums that ops write into ``flat`` may come later, by `flush_column_sums` at last.

    Until then nobody may read them or write what an op has been told to write. Gradients elsewhere
    are complete when their op returns, as ever, and so are those of other streams than the current.

    flat: [N], contiguous. A device has one at a time: the one before is flushed.
    Raises ValueError on a wrong shape, dtype or layout.
    """

    flat: Tensor

    def check(self, op: str) -> None:
        check_tensor(op, "flat", self.flat, ("N",), FLOATS)
        check_rows(op, "flat", self.flat)

    def reference(self) -> None:
        pass


defer_column_sums = define("defer_column_sums", DeferColumnSums)


class FlushColumnSums(NamedTuple):
    """What `defer_column_sums` has begun ends: sums that have not come yet come now, or never do.

    flat: as for `defer_column_sums`. wanted: False after an error, when nobody will read them.
    Raises ValueError on a wrong shape, dtype or layout.
    """

    flat: Written
    wanted: bool

    def check(self, op: str) -> None:
        DeferColumnSums(self.flat).check(op)

    def reference(self) -> None:
        pass


flush_column_sums = define("flush_column_sums", FlushColumnSums)
