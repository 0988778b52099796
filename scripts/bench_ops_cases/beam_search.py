"""Cases of ops/beam_search.py: the best continuations of N hypotheses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightseq_fairseq import ops

from .case import PAD, Case, Formula, Make, Sizes, without_autograd
from .decode_attention import SENTENCES, STEP

EOS, UNK = 2, 3


def beam_search(sizes: Sizes, make: Make) -> Iterator[Case]:
    """Yield the cases. Eager does the same as fairseq: log_softmax in float32, mask, add, topk."""
    for sentences in SENTENCES:
        rows, count = sentences * sizes.beam, 2 * sizes.beam
        logits = make.rows(rows, sizes.vocabulary, scale=3.0)
        scores = torch.randn(rows, device=make.device)
        steps = torch.full((rows,), STEP, dtype=torch.int32, device=make.device)
        last_steps = torch.full_like(steps, 200)
        rules = (PAD, EOS, UNK, 1, 0, 0.0, 1.0)

        def formula(logits: Tensor, scores: Tensor, count: int = count) -> tuple[Tensor, ...]:
            log_probs = torch.log_softmax(logits, 1, dtype=torch.float32)
            log_probs[:, PAD] = -torch.inf
            best, tokens = log_probs.add_(scores[:, None]).topk(count)
            return best, tokens.int()

        def ours(
            logits: Tensor = logits,
            scores: Tensor = scores,
            at: tuple[Tensor, Tensor] = (steps, last_steps),
            count: int = count,
            rules: tuple[int, int, int, int, int, float, float] = rules,
        ) -> tuple[Tensor, ...]:
            return ops.beam_candidates(logits, scores, *at, count, *rules)

        fwd, _ = Formula(formula, (logits, scores), ()).systems()
        yield Case(
            f"beam_candidates/N{rows}", logits.nbytes, {"ours": without_autograd(ours), **fwd}
        )
