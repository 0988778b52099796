"""Cases of ops/cross_entropy.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq import ops

from .batch import zipf_tokens
from .case import PAD, Case, Formula, Make, Run, Sizes, without_autograd

SMOOTHING = 0.1


def cross_entropy(sizes: Sizes, tokens: int, make: Make) -> Iterator[Case]:
    """Yield the cases. The formula is fairseq's, in float32. Our backward overwrites the logits."""
    logits = make.leaf(tokens, sizes.vocabulary)
    target = zipf_tokens(tokens, sizes.vocabulary, make.device)
    dloss = torch.ones((), device=make.device).expand(tokens)
    share = SMOOTHING / (sizes.vocabulary - 1)

    def formula(logits: Tensor) -> tuple[Tensor, ...]:
        log_probs = functional.log_softmax(logits, -1, dtype=torch.float32)
        nll = -log_probs.gather(1, target[:, None])[:, 0]
        loss = (1 - SMOOTHING - share) * nll - share * log_probs.sum(-1)
        is_pad = target == PAD
        return loss.masked_fill(is_pad, 0.0), nll.detach().masked_fill(is_pad, 0.0)

    def forward() -> tuple[Tensor, ...]:
        return ops.cross_entropy_fwd(logits, target, SMOOTHING, PAD, False)[:2]

    plain = Formula(formula, (logits,), (dloss,))
    fwd, bwd = plain.systems()
    yield Case(
        f"cross_entropy_fwd/T{tokens}", logits.nbytes, {"ours": without_autograd(forward), **fwd}
    )

    overwritten = torch.empty_like(logits, requires_grad=False)

    def ours_backward() -> Run:
        lse = torch.no_grad()(ops.cross_entropy_fwd)(logits, target, SMOOTHING, PAD, False)[2]

        def run() -> tuple[Tensor]:
            ops.cross_entropy_bwd(dloss, overwritten, target, lse, SMOOTHING, PAD)
            return (overwritten,)

        return torch.no_grad()(run)

    yield Case(
        f"cross_entropy_bwd/T{tokens}",
        2 * logits.nbytes,
        {"ours": ours_backward, **bwd},
        restore=lambda: overwritten.copy_(logits.detach()),
    )

    def at_once() -> tuple[Tensor, ...]:
        ops.cross_entropy_fwd_bwd(dloss, overwritten, target, SMOOTHING, PAD, False)
        return (overwritten,)

    yield Case(
        f"cross_entropy_fwd_bwd/T{tokens}",
        2 * logits.nbytes,
        {"ours": without_autograd(at_once), **plain.systems_at_once()},
        restore=lambda: overwritten.copy_(logits.detach()),
    )
