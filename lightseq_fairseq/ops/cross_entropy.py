"""Label-smoothed cross entropy (fairseq: criterions/label_smoothed_cross_entropy.py).

nll  = lse - logit[target]
loss = (1 - s - s') * nll + s' * sum_j (lse - logit[j]),  s' = s / (V - 1)  for smoothing s
dlogit[j] = dloss * (softmax[j] - s' - (1 - s - s') * [j == target])

No log-probabilities are stored: forward saves lse = log-sum-exp, and backward overwrites the logits
with their gradient. If dloss is known before forward, one op does both in one pass.

Shapes: T = rows (tokens), V = vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import FLOATS, INTEGERS, check_range, check_rows, check_tensor
from .numerics import work_dtype
from .registry import Written, define

# Logits per block. A block fits a CPU's last-level cache; on a GPU it limits temporary memory.
_CPU_BLOCK, _GPU_BLOCK = 1 << 19, 1 << 26


class CrossEntropyFwd(NamedTuple):
    """(loss [T], nll [T], lse [T], correct bool [T]).

    logits: [T, V]. target: int32 or int64 [T], in [0, V). smoothing: in [0, 1).
    loss and nll are 0 and correct is False where target == padding_idx.
    correct: whether the target's logit is the largest; EMPTY unless accuracy is set.
    """

    logits: Tensor
    target: Tensor
    smoothing: float
    padding_idx: int
    accuracy: bool

    def check(self, op: str) -> None:
        _check(op, self.logits, self.target, self.smoothing)

    def shape(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, rows = self.logits, self.logits.shape[0]
        loss, nll, lse = (logits.new_empty(rows, dtype=work_dtype(logits)) for _ in range(3))
        return loss, nll, lse, logits.new_empty(rows if self.accuracy else 0, dtype=torch.bool)

    def reference(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, target, smoothing, padding_idx, accuracy = self
        rows, dtype = len(logits), work_dtype(logits)
        lse, total = logits.new_empty(rows, dtype=dtype), logits.new_empty(rows, dtype=dtype)
        best = torch.empty(rows if accuracy else 0, dtype=torch.int64, device=logits.device)
        for part in _blocks(logits):
            block = logits[part].to(dtype)
            if accuracy:
                best[part] = block.argmax(-1)
                top = block.gather(-1, best[part, None])
            else:
                top = block.amax(-1, keepdim=True)
            lse[part] = block.sub(top).exp_().sum(-1).log_().add_(top[:, 0])
            if smoothing > 0:
                total[part] = block.sum(-1)
        columns = target.long()[:, None]
        nll = lse - logits.gather(1, columns)[:, 0]
        loss = nll
        if smoothing > 0:
            share, own = _weights(smoothing, logits.shape[1])
            loss = own * nll + share * (logits.shape[1] * lse - total)
        is_pad = target == padding_idx
        correct = (best == target) & ~is_pad if accuracy else best.bool()
        return loss.masked_fill(is_pad, 0.0), nll.masked_fill_(is_pad, 0.0), lse, correct


cross_entropy_fwd = define("cross_entropy_fwd", CrossEntropyFwd, "loss nll lse correct")


class CrossEntropyBwd(NamedTuple):
    """Overwrite logits [T, V] with their gradient; rows with target == padding_idx become 0.

    dloss: float [T], gradient of loss; may be an expanded scalar. lse: forward's result.
    """

    dloss: Tensor
    logits: Written
    target: Tensor
    lse: Tensor
    smoothing: float
    padding_idx: int

    def check(self, op: str) -> None:
        dloss, logits, target, lse, smoothing, _ = self
        _check(op, logits, target, smoothing)
        check_tensor(op, "dloss", dloss, target.shape, FLOATS, logits)
        check_tensor(op, "lse", lse, target.shape, (work_dtype(logits),), logits)

    def reference(self) -> None:
        dloss, logits, target, lse, smoothing, padding_idx = self
        dtype = work_dtype(logits)
        # A bit mask, not a factor: rows past the last sentence may hold inf, and 0 * inf is NaN.
        bits = torch.int64 if dtype == torch.float64 else torch.int32
        not_pad = (target != padding_idx)[:, None].to(bits).neg_()
        scale = dloss.to(dtype)[:, None]
        share, own = _weights(smoothing, logits.shape[1])
        columns = target.long()[:, None]
        for part in _blocks(logits):
            block = logits[part]
            grad = block if block.dtype == dtype else block.to(dtype)
            grad.sub_(lse[part, None]).exp_()
            if share > 0:
                grad.sub_(share)
            grad.scatter_add_(1, columns[part], grad.new_full((1, 1), -own).expand(len(grad), 1))
            grad.mul_(scale[part]).view(bits).bitwise_and_(not_pad[part])
            if grad is not block:
                block.copy_(grad)


cross_entropy_bwd = define("cross_entropy_bwd", CrossEntropyBwd)


class CrossEntropyFwdBwd(NamedTuple):
    """Overwrite logits [T, V] with their gradient; return (loss [T], nll [T], correct [T]).

    `CrossEntropyFwd` and `CrossEntropyBwd` in one pass; arguments as there.
    """

    dloss: Tensor
    logits: Written
    target: Tensor
    smoothing: float
    padding_idx: int
    accuracy: bool

    def check(self, op: str) -> None:
        _check(op, self.logits, self.target, self.smoothing)
        check_tensor(op, "dloss", self.dloss, self.target.shape, FLOATS, self.logits)

    def shape(self) -> tuple[Tensor, Tensor, Tensor]:
        loss, nll, _, correct = CrossEntropyFwd(*self[1:]).shape()
        return loss, nll, correct

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        dloss, logits, target, smoothing, padding_idx, _ = self
        loss, nll, lse, correct = CrossEntropyFwd(*self[1:]).reference()
        CrossEntropyBwd(dloss, logits, target, lse, smoothing, padding_idx).reference()
        return loss, nll, correct


cross_entropy_fwd_bwd = define("cross_entropy_fwd_bwd", CrossEntropyFwdBwd, "loss nll correct")


def _weights(smoothing: float, classes: int) -> tuple[float, float]:
    """(weight of each class's negative log-probability, additional weight of the target class)."""
    share = smoothing / (classes - 1) if smoothing > 0 else 0.0
    return share, 1.0 - smoothing - share


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(1, (_GPU_BLOCK if logits.is_cuda else _CPU_BLOCK) // logits.shape[1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _check(op: str, logits: Tensor, target: Tensor, smoothing: float) -> None:
    check_rows(op, "logits", logits, ("T", "V"), FLOATS)
    check_tensor(op, "target", target, logits.shape[:1], INTEGERS, logits)
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"{op}: smoothing must be at least 0 and below 1, got {smoothing}")
    if logits.shape[1] < 2:
        raise ValueError(f"{op}: logits must have at least 2 classes, got {logits.shape[1]}")
    check_range(op, "target", target, logits.shape[1], "V")
