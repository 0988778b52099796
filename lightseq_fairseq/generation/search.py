"""Beam search, diverse beam search and sampling with one model, without the host in the loop.

A step is one CUDA graph: decoder, candidates, and what becomes of them. The host only launches it,
and learns one step late how many sentences are unfinished: so it sees the end, and makes the rows
fewer when enough sentences are through.

Letters: B sentences, T packed source tokens, N rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.generation.decoder import StepDecoder, bucket
from lightseq_fairseq.generation.memory import Memory
from lightseq_fairseq.ops.beam_search import Progress
from lightseq_fairseq.training.batch import Segments

MOST_BEAM = 64  # that the CUDA kernels have room for


@dataclass(frozen=True)
class Rules:
    """How to search; the names and meanings are those of fairseq's generators.

    Attributes:
        beam: hypotheses of a sentence, and results.
        pad, eos, unk, min_len, unk_penalty, temperature: see ``ops.beam_candidates``.
        length_penalty, groups, diversity: see ``ops.beam_advance``.
        sampled, topk, topp: draw the tokens, see ``ops.beam_sample``.
    """

    beam: int
    pad: int
    eos: int
    unk: int
    min_len: int = 1
    unk_penalty: float = 0.0
    temperature: float = 1.0
    length_penalty: float = 1.0
    groups: int = 1
    diversity: float = 0.0
    sampled: bool = False
    topk: int = 0
    topp: float = 0.0


@torch.no_grad()
def search(
    steps: StepDecoder, encoder: Any, decoder: Any, tokens: Tensor, source: Segments,
    rules: Rules, first: int, max_len: int, positions: int, rng: Tensor | None = None,
) -> list[list[dict[str, Tensor]]]:  # fmt: skip
    """The results of each sentence, best first, as fairseq's ``SequenceGenerator`` gives them.

    Args:
        steps: the decoder's; see ``StepDecoder`` for ``encoder`` and ``decoder``.
        tokens: int64 [T], the packed sentences, at least one; source: where they lie.
        first: the token to begin with.
        max_len: tokens of a result without its end.
        positions: so many will do, as a rule; there are more when they do not.
        rng: int64 [2], for sampling.

    Returns: for each sentence a list of dicts, on the CPU: tokens int64 [L] with the end, score
    float32 [], positional_scores float32 [L]; attention and alignment are empty.
    """
    sentences, beam = len(source.cu_seqlens) - 1, rules.beam
    rows = bucket(sentences * beam)
    user = _User()
    steps = steps.lent_to(user)
    try:
        memory = steps.begin_with(
            encoder, decoder, tokens, source, rows, min(positions, max_len + 1)
        )
        _start(memory, sentences, rules, first, max_len)
        if rng is not None:
            memory.rng.copy_(rng)
        unfinished = _Unfinished(sentences, memory.device)
        for step in range(max_len + 1):
            steps.make_room(rows, step + 1, step)
            steps.run((rows, rules), functools.partial(_advance, steps, decoder, rows, rules))
            left = unfinished.after(step, memory.progress[Progress.UNFINISHED])
            if left == 0:
                break
            if bucket(left * beam) < rows:
                rows = bucket(left * beam)
                _compact(memory, step + 1, rows // beam, beam)
    except BaseException:
        steps.forget()
        raise
    results = _results(memory, sentences, step + 1, beam)
    steps.end()
    return results


class _User:
    """Somebody who holds a ``StepDecoder``."""


class _Unfinished:
    """How many sentences are unfinished, known one step late so that the GPU never waits.

    Always exactly one: rows and with them rounding errors would else depend on the host's speed.
    """

    def __init__(self, sentences: int, device: torch.device) -> None:
        self._before, self._events = sentences, None
        if device.type == "cuda":
            self._pinned = torch.zeros(2, dtype=torch.int32).pin_memory()
            self._events = (torch.cuda.Event(), torch.cuda.Event())

    def after(self, step: int, count: Tensor) -> int:
        """On a GPU after the step before, on a CPU after this one. count: int32 []."""
        if self._events is None:
            return int(count)
        this, last = step % 2, (step + 1) % 2
        self._pinned[this].copy_(count, non_blocking=True)
        self._events[this].record()
        if step == 0:
            return self._before
        self._events[last].synchronize()
        return int(self._pinned[last])


def _start(memory: Memory, sentences: int, rules: Rules, first: int, max_len: int) -> None:
    memory.progress[Progress.MAX_LEN].fill_(max_len)
    memory.progress[Progress.UNFINISHED].fill_(sentences)
    memory.sentences[:sentences] = torch.arange(sentences, dtype=torch.int32, device=memory.device)
    memory.tokens.fill_(first)
    # All hypotheses of a sentence are the same at first: one of each group is to have descendants.
    memory.scores.fill_(-torch.inf)
    scores = memory.scores[: sentences * rules.beam].view(sentences, rules.beam)
    scores[:, : rules.beam if rules.sampled else rules.groups] = 0.0


def _advance(steps: StepDecoder, decoder: Any, rows: int, rules: Rules) -> None:
    """One step of all hypotheses, in places that never change."""
    memory, beam = steps.memory, rules.beam
    x, _ = steps.features(decoder, rows, beam)
    slots = rows // beam
    logits = decoder.output_layer(x)[: slots * beam]
    scores, sentences = memory.scores[: slots * beam], memory.sentences[:slots]
    tokens = (rules.pad, rules.eos, rules.unk, rules.min_len, rules.unk_penalty, rules.temperature)
    if rules.sampled:
        candidates = ops.beam_sample(
            logits, scores, sentences, memory.progress, memory.rng, beam, rules.topk, rules.topp,
            *tokens,
        )  # fmt: skip
    else:
        candidates = ops.beam_candidates(logits, scores, memory.progress, 2 * beam, *tokens)
    ops.beam_advance(
        *candidates, memory.progress, sentences, memory.tokens[: slots * beam], scores,
        memory.ancestry, memory.past_tokens, memory.past_scores, memory.hypothesis_tokens,
        memory.hypothesis_scores, memory.lengths, memory.totals, beam, rules.groups,
        rules.diversity, rules.eos, rules.length_penalty,
    )  # fmt: skip


def _compact(memory: Memory, positions: int, slots: int, beam: int) -> None:
    """Bring the unfinished sentences into the first ``slots``; keys and values stay in place."""
    kept = (memory.sentences < 0).int().argsort(stable=True)[:slots]
    rows = (kept[:, None] * beam + torch.arange(beam, device=kept.device)).flatten()
    memory.sentences[:slots] = memory.sentences[kept]
    memory.sentences[slots:] = -1
    memory.tokens[: len(rows)], memory.scores[: len(rows)] = (
        memory.tokens[rows],
        memory.scores[rows],
    )
    memory.ancestry[:positions, : len(rows)] = memory.ancestry[:positions, rows]


def _results(
    memory: Memory, sentences: int, positions: int, beam: int
) -> list[list[dict[str, Tensor]]]:
    """All that ``ops.beam_advance`` has kept; few large copies and views of them."""
    count = sentences * beam
    lengths, totals = memory.lengths[:count].cpu().long(), memory.totals[:count].cpu()
    tokens = memory.hypothesis_tokens[:positions, :count].t().cpu()
    scores = memory.hypothesis_scores[:positions, :count].t().cpu()
    scores[:, 1:] -= scores[:, :-1].clone()

    found = lengths > 0
    numbers = found.view(sentences, beam).sum(1)
    if int(numbers.min()) == 0:
        raise UserError(
            "a sentence has no translation of a finite score: the model's output is not a number, "
            "which a diverged training or an overflow of --fp16 leaves behind."
        )
    ranks = totals.masked_fill(~found, -torch.inf).view(sentences, beam)
    order = ranks.argsort(dim=1, descending=True, stable=True)
    order = (order + torch.arange(0, count, beam)[:, None]).flatten()
    order = order[found[order]]
    real = torch.arange(positions) < lengths[order, None]
    sizes, empty = lengths[order].tolist(), torch.empty(0)
    hypotheses = iter(
        {
            "tokens": words,
            "score": total,
            "attention": empty,
            "alignment": empty,
            "positional_scores": each,
        }
        for words, total, each in zip(
            tokens[order][real].long().split(sizes), totals[order].unbind(),
            scores[order][real].split(sizes), strict=True,
        )
    )  # fmt: skip
    return [[next(hypotheses) for _ in range(number)] for number in numbers.tolist()]
