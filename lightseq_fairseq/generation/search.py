"""Beam search, diverse beam search and sampling with one model, without the host in the loop.

A step is one CUDA graph, which the host only launches. One step late, the host learns which
sentences have ended. Their slots are refilled with the sentences that wait. When none waits, the
host reduces the number of rows.

Shapes: B = sentences, T = packed source tokens, N = rows. A slot is the ``beam`` adjacent rows of a
sentence.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.generation import prompts
from lightseq_fairseq.generation.decoder import StepDecoder, bucket, first_bucket, most_rows
from lightseq_fairseq.generation.incremental import expected_length
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import LazyHypothesis, Results
from lightseq_fairseq.generation.search_buffers import OF_SENTENCE, Sizes
from lightseq_fairseq.generation.source import SearchBatch, Source, SourcePart
from lightseq_fairseq.generation.step import Step

MOST_BEAM = 64  # the largest beam that the CUDA kernels support
_REFILL = 16  # slots are refilled when one of so many is free


@torch.no_grad()
def search(
    steps: StepDecoder, encoder: Any, decoder: Any, batches: Sequence[SearchBatch],
    options: SearchOptions, first: int, rng: Tensor | None = None,
) -> list[list[list[LazyHypothesis]]]:  # fmt: skip
    """The results of each sentence, best first, as fairseq's ``SequenceGenerator`` gives them.

    The words of a sentence do not depend on the others. There are as many slots as the largest
    batch has sentences, or fewer if these do not fit into memory.

    Args:
        steps: the decoder's ``StepDecoder``, which also describes ``decoder``.
        encoder: see ``StepDecoder.encode``; None for a decoder without a source, such as a language
            model.
        batches: the sentences. The encoder reads a batch at a time.
        first: the first decoder input token.
        rng: int64 [2], for sampling.

    Returns: for each batch a list for each sentence, see ``generation.results.LazyHypothesis``.
    """
    user = _User()
    steps = steps.lent_to(user)
    try:
        return _Search(steps, encoder, decoder, batches, options, first).results(rng)
    except BaseException:
        steps.forget()
        raise


class _User:
    """Its lifetime marks how long a search uses a ``StepDecoder``, see ``lent_to``."""


class _Search:
    """What the host knows of a search.

    Attributes:
        rows: rows of a step, ``beam`` for each slot; perhaps more.
        launched: steps so far.
        in_slot: the sentence of each slot, -1 for none.
        began, ends_by: number of steps before the sentence of each slot, and after its last one.
        steps_ahead, places_ahead: its step, and its position in the buffers, less ``launched``.
        moved: the slots of the step before from which the slots come, if they have moved.
        waiting: the first sentence that has not begun. encoded: batches that the encoder has read.
        left: sentences of each batch that have not ended. longest: upper bound of the lengths of
            its results. reported: whether the host knows that their last steps have run.

    Attributes that `_plan` computes:
        running: which slots have a sentence. count: how many.
        refills: whether sentences that wait begin now. fewest: rows that suffice.
        furthest: the largest of ``places_ahead``. next_due: the earliest of ``ends_by``.
        forced_until, all_end: as numbers of steps, until when there are forced tokens, and after
            which step all hypotheses end, -1 for none.
    """

    running: np.ndarray
    fewest: int
    furthest: int
    next_due: int
    forced_until: int
    all_end: int

    def __init__(
        self, steps: StepDecoder, encoder: Any, decoder: Any, batches: Sequence[SearchBatch],
        options: SearchOptions, first: int,
    ) -> None:  # fmt: skip
        self.steps, self.encoder, self.decoder, self.options = steps, encoder, decoder, options
        self.memory = steps.buffers(*((decoder,) if encoder is None else (decoder, encoder)))
        self.device, self.first = self.memory.device, first
        one = batches[0]
        self.has_prompts = encoder is None and not one.end_together  # those of fairseq
        # Tokens that do not count for the length of a result, as in transformers.
        self.prompt = one.tokens.shape[1] - 1 if one.end_together else 0
        if self.has_prompts:
            batches = [
                each._replace(tokens=prompts.with_first(each.tokens, first, options, each.max_len))
                for each in batches
            ]
        reader = decoder if encoder is None else encoder
        self.source = source = Source.of(
            batches, options.pad if self.has_prompts else reader.padding_idx
        )
        max_len = max(each.max_len for each in batches)
        self.table = decoder.table_rows(max_len + 1)
        forced = [each.forced for each in batches if each.forced is not None]
        # The last step ends a hypothesis, whatever is forced.
        most_forced = max_len + (not options.forces_eos)
        self.after_forced = min(max((x.shape[1] for x in forced), default=0), most_forced)
        self.min_len_from = self.after_forced
        if self.has_prompts:
            self.min_len_from = source.longest - 1
        self._open(batches, max_len)

    def _open(self, batches: Sequence[SearchBatch], max_len: int) -> None:
        """Allocate the buffers."""
        source, beam, device = self.source, self.options.beam, self.device
        # One position more than the last step has: prompts that fill a bucket write there.
        positions = max_len + 2
        if self.encoder is None:  # its hypotheses usually reach max_len
            positions = max(positions, prompts.room(source.longest, device) + 1)
        else:
            positions = min(positions, max(expected_length(source.longest), self.after_forced) + 2)
        most = max(most_rows(self.memory, positions) // beam, 1)
        self.rows = first_bucket(min(source.largest_batch, most) * beam, device)
        slots = self.rows // beam
        part, read = source.largest_batch, source.most_tokens
        if self.encoder is None:
            part = min(slots, source.sentences)
            read = int((source.cu_seqlens[part:] - source.cu_seqlens[:-part]).max())
        sizes = Sizes(positions, source.sentences * beam, self.rows, source.sentences, part, read)
        self.steps.open(source, sizes)
        self.memory.keep_blocked(self.options.blocked)
        self.in_slot = np.full(slots, -1)
        self.began, self.ends_by, self.steps_ahead, self.places_ahead = np.zeros((4, slots), int)
        self.count, self.refills = 0, True
        self.kind: tuple[int, bool, bool] | None = None
        self.moved: np.ndarray | None = None
        self.launched = self.waiting = self.encoded = 0
        self.forced = prompts.keep_forced(
            self.memory, batches, source.batches, self.after_forced, self.options.pad
        )
        self.left = [end - start for start, end in itertools.pairwise(source.batches)]
        self.longest, self.reported = [1] * len(self.left), [True] * len(self.left)

    def results(self, rng: Tensor | None) -> list[list[list[LazyHypothesis]]]:
        """See `search`."""
        if rng is not None:
            self.memory.rng.copy_(rng)
        while self.count or self.refills:
            if self.refills:
                self._refill()
            elif self.fewest < self.rows:
                self._compact(self.fewest)
            if self.count:
                self._step()
        found = [each.read() for each in self.found]
        self.steps.launched += self.launched
        self.steps.end()
        return found

    def _plan(self) -> None:
        """Compute what only changes with the slots: a step itself must cost the host little."""
        source, options = self.source, self.options
        self.running = running = self.in_slot >= 0
        self.count = count = int(running.sum())
        slots, is_waiting = len(running), self.waiting < source.sentences
        # Without a forced eos, all sentences must be at the same step.
        self.refills = is_waiting and (
            not count or (options.forces_eos and (slots - count) * _REFILL >= slots)
        )
        self.fewest = self.rows if is_waiting else bucket(count * options.beam, self.device)
        if count:
            ends_by = self.ends_by[running]
            self.next_due = int(ends_by.min())
            self.all_end = -1 if options.forces_eos else int(ends_by.max())
            self.furthest = int(self.places_ahead[running].max())
            self.forced_until = self.after_forced - int(self.steps_ahead[running].min())

    def _refill(self) -> None:
        """Begin the next sentences in the free slots."""
        source, memory, options = self.source, self.memory, self.options
        beam, is_first = options.beam, self.waiting == 0
        free = np.flatnonzero(self.in_slot < 0)
        count = min(len(free), source.sentences - self.waiting)
        if self.encoder is None and not is_first:
            count = 1 << (count.bit_length() - 1)  # few graphs, each for a number of prompts
        begin, self.waiting = self.waiting, self.waiting + count
        end = self.waiting
        if self.encoder is not None:  # the GPU reads the source while the host prepares the rest
            self._encode(is_first)
        slots, sentences = free[:count], np.arange(begin, end)
        numbers = np.zeros((len(OF_SENTENCE), count), np.int64)
        tokens, steps, last_steps, places = numbers
        tokens.fill(self.first)
        if self.encoder is None:
            part = source.part(begin, end)
            places[:], tokens[:] = part.lengths - 1, part.tokens[part.boundaries[1:] - 1]
        steps[:], last_steps[:] = self.prompt or places, source.max_lens[begin:end]
        # At first all hypotheses of a sentence are equal: only one per group may have
        # continuations, or all of them when sampling.
        scores = np.full((count, beam), -np.inf, np.float32)
        scores[:, : beam if options.sampled else options.groups] = 0.0
        self.in_slot[slots], self.began[slots] = sentences, self.launched
        self.steps_ahead[slots] = steps - self.launched
        self.places_ahead[slots] = places - self.launched
        self.ends_by[slots] = self.launched + last_steps - steps + 1
        if self.has_prompts:
            finished = prompts.finished(part, options.eos)
            self.in_slot[slots[finished]], scores[finished] = -1, -np.inf
        if is_first:
            host, rows = memory.host, slice(count * beam)
            host["tokens"].fill(self.first)
            host["scores"].fill(-np.inf)
            host["scores"][rows] = scores.ravel()
            host["sentences"][:count] = self.in_slot[:count]
            for name, each in zip(OF_SENTENCE, numbers.repeat(beam, 1), strict=True):
                host[name][rows] = each
            memory.send_rows()
        else:
            memory.start(slots, self.in_slot[slots], numbers, scores)
        if self.encoder is None:
            self._prefill(part, free if is_first else slots, is_first)
        if is_first:  # while the GPU reads the source
            self.steps.progress.begin()
            self.found = [Results(size, beam) for size in self.left]
        if self.has_prompts and finished.any():
            self._end(sentences[finished], places[finished], is_reported=False)
        self._plan()

    def _prefill(self, part: SourcePart, slots: np.ndarray, is_first: bool) -> None:
        """Let the decoder read the prompts of a part, in the first of these slots."""
        self._send(part, slots, is_first)
        prompts.prefill(
            self.steps, self.decoder, part, len(slots), self.options, self.table, self.has_prompts
        )

    def _encode(self, is_first: bool) -> None:
        """Let the encoder read the batches of all sentences that have begun."""
        bounds = self.source.batches
        while bounds[self.encoded] < self.waiting:
            first, end = bounds[self.encoded : self.encoded + 2]
            part = self.source.part(first, end)
            self._send(part, None, is_first)
            start = int(self.source.cu_seqlens[first])
            self.steps.encode(self.encoder, self.decoder, part, start)
            self.encoded += 1
            is_first = False

    def _send(self, part: SourcePart, slots: np.ndarray | None, is_first: bool) -> None:
        memory = self.memory
        if not is_first:
            memory.next_source()
        part.write(memory.host)
        if slots is not None:
            memory.host["source_slots"][: len(slots)] = slots
        memory.send_source()

    def _step(self) -> None:
        """Launch a step, and learn which sentences have ended."""
        place = self.furthest + self.launched
        if place > self.memory.positions - 2:
            for each in self.found:
                each.wait()
            self.steps.make_room(self.memory.rows, place + 2, place)
        follows, ends_all = self.launched < self.forced_until, self.launched + 1 == self.all_end
        if self.kind != (self.rows, follows, ends_all):
            self.kind = self.rows, follows, ends_all
            step = Step(self.rows, self.options, self.min_len_from, self.prompt, follows, ends_all)
            forced = self.forced if follows else None
            # Sizes that a graph knows, beside those of the buffers.
            sizes = None if forced is None else forced.shape, len(self.memory.lengths) * ends_all
            self.key = step, self.table, *sizes
            self.run = functools.partial(step.run, self.steps, self.decoder, forced)
        self.steps.launch(self.key, self.run)
        self.launched += 1
        progress, moved = self.steps.progress, self.moved
        progress.step()
        self.moved = None
        if self.launched >= self.next_due:  # while the GPU is busy: no report is needed for this
            self._free(self.ends_by <= self.launched, self.ends_by, is_reported=False)
            if not self.count:
                return
        number, ended_at = progress.ended()
        ended_at = ended_at[: len(self.running)] if moved is None else ended_at[moved]
        # A list, since each first use of a numpy function between two steps takes much longer.
        if number and number in ended_at.tolist():
            self._free((ended_at == number) & (self.began < number), number, is_reported=True)

    def _free(self, ended: np.ndarray, steps: int | np.ndarray, is_reported: bool) -> None:
        """Free the slots whose sentences have ``ended``, after so many steps."""
        ended = ended & self.running
        if ended.any():
            sentences, lengths = self.in_slot[ended], (self.places_ahead + steps)[ended]
            self.in_slot[ended] = -1
            self._end(sentences, lengths, is_reported)
            self._plan()

    def _end(self, sentences: np.ndarray, lengths: np.ndarray, is_reported: bool) -> None:
        """These sentences have ended: fetch the results of a batch that is complete.

        lengths: the most tokens of their results. is_reported: whether the host knows that their
        last step has run.
        """
        complete = []
        for sentence, length in zip(sentences.tolist(), lengths.tolist(), strict=True):
            batch = bisect.bisect(self.source.batches, sentence) - 1
            self.left[batch] -= 1
            self.longest[batch] = max(self.longest[batch], length)
            self.reported[batch] &= is_reported
            if not self.left[batch]:
                complete.append(batch)
        for batch in sorted(complete):
            # A step writes its report only after its results are visible to the whole GPU. So what
            # is reported can be read while later steps run.
            stream = self.steps.progress.beside(not self.reported[batch])
            first, positions = self.source.batches[batch], self.longest[batch]
            self.found[batch].fetch(self.memory, first, positions, stream)

    def _compact(self, rows: int) -> None:
        """Move the sentences of the last slots to free slots among the first ones.

        Keys and values do not move: a sentence reads them where they are. So no sentence may write
        there, and the sentences of the first slots must stay.
        """
        memory, beam, running = self.memory, self.options.beam, self.running
        slots = np.arange(rows // beam)
        moved = np.flatnonzero(running[len(slots) :]) + len(slots)
        slots[np.flatnonzero(~running[: len(slots)])[: len(moved)]] = moved
        positions = self.furthest + self.launched
        kept = memory.sent(slots).long()
        old = (kept[:, None] * beam + torch.arange(beam, device=kept.device)).flatten()
        memory.sentences[: len(kept)] = memory.sentences[kept]
        memory.sentences[len(kept) :] = -1
        of_rows = memory.tokens, memory.scores, memory.steps, memory.last_steps, memory.places
        for each in of_rows:
            each[: len(old)] = each[old]
        memory.ancestry[:positions, : len(old)] = memory.ancestry[:positions, old]
        # The last rows, of no slot, write where no sentence has anything.
        memory.places[len(old) : rows] = positions
        memory.ancestry[:positions, len(old) : rows] = 0
        self.rows, self.in_slot = rows, self.in_slot[slots]
        self.began, self.ends_by = self.began[slots], self.ends_by[slots]
        self.steps_ahead, self.places_ahead = self.steps_ahead[slots], self.places_ahead[slots]
        if self.steps.progress.is_delayed:
            self.moved = slots  # the next report is of a step before
        self._plan()
