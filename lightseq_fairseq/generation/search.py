"""Beam search, diverse beam search and sampling with one model, without the host in the loop.

A step is one CUDA graph, which the host only launches. One step late, the host learns which
sentences have ended. Their slots are refilled with the sentences that wait. When none waits, the
host reduces the number of rows.

Shapes: B = sentences, T = packed source tokens, N = rows. A slot is the ``beam`` adjacent rows of a
sentence.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightseq_fairseq.generation import prompts
from lightseq_fairseq.generation.decoder import StepDecoder, bucket, first_bucket, most_rows
from lightseq_fairseq.generation.incremental import expected_length
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.generation.results import Fetched, LazyHypothesis, Newest
from lightseq_fairseq.generation.search_buffers import OF_SENTENCE, Sizes, power
from lightseq_fairseq.generation.source import (
    Chunk,
    ChunkPlaces,
    Group,
    SearchBatch,
    SourcePart,
    on_cpu,
)
from lightseq_fairseq.generation.step import Step

MOST_BEAM = 64  # the largest beam that the CUDA kernels support
REFILL = 16  # slots are refilled when one of so many is free


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
        return Search.of_all(steps, encoder, decoder, batches, options, first).results(rng)
    except BaseException:
        steps.forget()
        raise


class _User:
    """Its lifetime marks how long a search uses a ``StepDecoder``, see ``lent_to``."""


class Room(NamedTuple):
    """What the sentences of a search need at most.

    slots: sentences that are searched at a time.
    chunks: what the encoder reads at a time, as many as have room together; their sentences and
    tokens. read_sentences, read_tokens: of what a model reads at a time. longest: tokens of a
    sentence.
    max_len, forced: tokens of a result, and with which it begins.
    min_len_from: see ``ops.beam_candidates``.
    """

    slots: int
    chunks: int
    sentences: int
    tokens: int
    read_sentences: int
    read_tokens: int
    longest: int
    max_len: int
    forced: int
    min_len_from: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], options: SearchOptions, reads_prompts: bool) -> Room:
        """For these chunks. reads_prompts: whether the tokens are prompts of fairseq."""
        max_len = max(int(each.max_lens.max()) for each in chunks)
        longest = max(int(each.lengths.max()) for each in chunks)
        sentences = [each.sentences for each in chunks]
        tokens = [len(each.tokens) for each in chunks]
        forced = [x.shape[1] for each in chunks for x in each.forced if x is not None]
        # The last step ends a hypothesis, whatever is forced.
        after_forced = min(max(forced, default=0), max_len + (not options.forces_eos))
        return cls(
            max(sentences), len(chunks), sum(sentences), sum(tokens), max(sentences), max(tokens),
            longest, max_len, after_forced, longest - 1 if reads_prompts else after_forced,
        )  # fmt: skip


class Search:
    """A search of all sentences that are given; or, if ``is_open``, of those that arrive.

    Args:
        steps, encoder, decoder, options, first: see `search`.
        room: what the sentences need at most.
        prompt: tokens that do not count for the length of a result, as in transformers.
        reads_prompts: whether the tokens of sentences are prompts of fairseq.
        chunks: all sentences; None for a search that is open, see `add`.

    Attributes:
        rows: rows of a step, ``beam`` for each slot; perhaps more.
        launched: steps so far.
        in_slot: the sentence of each slot, -1 for none.
        began, ends_by: number of steps before the sentence of each slot, and after its last one.
        steps_ahead, places_ahead: its step, and its position in the buffers, less ``launched``.
        moved: the slots of the step before from which the slots come, if they have moved.
        waiting: chunks with sentences that have not begun. unbegun: number of these sentences.
        places: where they are in the buffers.
        fetched: results on their way to the host. ended: the groups whose results these are.

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
        self, steps: StepDecoder, encoder: Any, decoder: Any, options: SearchOptions, first: int,
        room: Room, prompt: int = 0, reads_prompts: bool = False,
        chunks: Sequence[Chunk] | None = None,
    ) -> None:  # fmt: skip
        self.steps, self.encoder, self.decoder, self.options = steps, encoder, decoder, options
        self.memory = steps.buffers(*((decoder,) if encoder is None else (decoder, encoder)))
        self.device, self.first, self.room = self.memory.device, first, room
        self.prompt, self.reads_prompts, self.is_open = prompt, reads_prompts, chunks is None
        self.table = decoder.table_rows(room.max_len + 1)
        self.places = ChunkPlaces(room.sentences, room.tokens, room.chunks)
        self.waiting: deque[Chunk] = deque()
        self.fetched: deque[Fetched] = deque()
        self.ended: list[Group] = []
        self.unbegun = 0
        for each in chunks or ():
            self._place(each)
        self._open(chunks or ())

    @classmethod
    def of_all(
        cls, steps: StepDecoder, encoder: Any, decoder: Any, batches: Sequence[SearchBatch],
        options: SearchOptions, first: int,
    ) -> Search:  # fmt: skip
        """A search of all sentences of these batches, see `search`."""
        one, batches = batches[0], on_cpu(batches)
        reads_prompts = encoder is None and not one.end_together
        pad = (decoder if encoder is None else encoder).padding_idx
        if reads_prompts:
            pad = options.pad
            batches = prompts.with_first(batches, first, options)
        chunks = [Chunk.of([each], pad) for each in batches]
        room = Room.of(chunks, options, reads_prompts)
        prompt = one.tokens.shape[1] - 1 if one.end_together else 0
        return cls(
            steps, encoder, decoder, options, first, room, prompt, reads_prompts, chunks
        )  # fmt: skip

    def _open(self, chunks: Sequence[Chunk]) -> None:
        """Allocate the buffers."""
        room, beam, device = self.room, self.options.beam, self.device
        # One position more than the last step has: prompts that fill a bucket write there.
        positions = room.max_len + 2
        if self.encoder is None:  # its hypotheses usually reach max_len
            positions = max(positions, prompts.room(room.longest, device) + 1)
        else:
            positions = min(positions, max(expected_length(room.longest), room.forced) + 2)
        most = max(most_rows(self.memory, positions) // beam, 1)
        rows = first_bucket(min(room.slots, most) * beam, device)
        self.rows = self.most_rows = self.fewest = rows
        slots, numbers = self.rows // beam, self.places.size
        part, read = room.read_sentences, room.read_tokens
        if self.encoder is None and not self.is_open:  # prompts of any batches are read together
            part = min(slots, room.sentences)
            ends = np.concatenate([[0], *[each.lengths for each in chunks]]).cumsum()
            read = int((ends[part:] - ends[:-part]).max())
        sizes = Sizes(positions, numbers * beam, self.rows, numbers, part, read)
        bounds = [each.start + each.boundaries for each in chunks]
        self.steps.open(np.concatenate(bounds) if bounds else np.zeros(1), room.tokens, sizes)
        self.memory.keep_blocked(self.options.blocked)
        self.in_slot = np.full(slots, -1)
        self.began, self.ends_by, self.steps_ahead, self.places_ahead = np.zeros((4, slots), int)
        self.kind: tuple[int, bool, bool] | None = None
        self.moved: np.ndarray | None = None
        self.launched = self.count = 0
        self.forced = prompts.room_for_forced(self.memory, numbers, room.forced)
        if chunks:
            prompts.keep_forced(self.memory, self.forced, chunks, self.options.pad)
        self.is_new, self.is_sent = True, False  # whether rows and a source were sent to the device
        self.refills = bool(chunks)

    def results(self, rng: Tensor | None) -> list[list[list[LazyHypothesis]]]:
        """See `search`."""
        if rng is not None:
            self.memory.rng.copy_(rng)
        chunks = [*self.waiting]
        while self.is_busy:
            self.advance()
        found = [group.results.read() for chunk in chunks for group in chunk.groups]
        self.close()
        return found

    @property
    def is_busy(self) -> bool:
        """Whether sentences have not ended."""
        return bool(self.count or self.unbegun)

    def advance(self) -> None:
        """Run a step, if there are sentences. ``ended`` has the groups that are new there."""
        if self.refills:
            self._refill()
        elif self.fewest < self.rows:
            self._compact(self.fewest)
        if self.count:
            self._step()

    def close(self) -> None:
        """Call this after the last step."""
        self.steps.launched += self.launched
        self.steps.end()

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self.in_slot) - self.count

    def add(self, batches: Sequence[SearchBatch]) -> list[Group] | None:
        """Begin sentences of a search that is open; the encoder reads them together.

        batches: their tokens are on the CPU.

        Returns: a group for each batch. None: there are not enough free slots, or no room in the
        buffers; try it again when others have ended.
        """
        pad = self.options.pad
        if self.encoder is not None:
            pad = self.encoder.padding_idx
        elif self.reads_prompts:
            batches = prompts.with_first(batches, self.first, self.options)
        chunk = Chunk.of(batches, pad)
        if self.is_new:
            self._begin()
        if chunk.sentences > self.free or not self._place(chunk):
            return None
        memory, beam, start, end = self.memory, self.options.beam, chunk.first, chunk.end
        self.steps.progress.follow()  # the results that were here are on their way to the host
        memory.cu_seqlens[start : end + 1] = memory.sent(chunk.start + chunk.boundaries)
        memory.lengths[start * beam : end * beam] = 0
        prompts.keep_forced(memory, self.forced, [chunk], self.options.pad)
        self._refill()
        return chunk.groups

    def cancel(self, group: Group) -> None:
        """End the sentences of a group, which gets no results."""
        if not group.left:
            return
        its = (self.in_slot >= group.first) & (self.in_slot < group.first + group.size)
        slots = np.flatnonzero(its)
        self.memory.sentences[self.memory.sent(slots).long()] = -1
        self.in_slot[slots] = -1
        group.chunk.left -= group.left
        group.left = 0
        self.places.take_back()
        self._plan()

    def newest(self) -> Newest:
        """The newest tokens of the best hypotheses, after the last step.

        Those of a sentence that ended at this step mean nothing.
        """
        rows = slice(0, self.rows, self.options.beam)
        return Newest(self.memory, rows, self.in_slot)

    def _place(self, chunk: Chunk) -> bool:
        """Let the sentences of a chunk wait; returns whether there is room for them."""
        if not self.places.give(chunk, self.options.beam):
            return False
        self.waiting.append(chunk)
        self.unbegun += chunk.sentences
        return True

    def _plan(self) -> None:
        """Compute what only changes with the slots: a step itself must cost the host little."""
        options, beam = self.options, self.options.beam
        self.running = running = self.in_slot >= 0
        self.count = count = int(running.sum())
        slots = len(running)
        # Without a forced eos, all sentences must be at the same step.
        self.refills = bool(self.unbegun) and (
            not count or (options.forces_eos and (slots - count) * REFILL >= slots)
        )
        if self.is_open:  # sentences arrive: none is moved
            last = int(running.nonzero()[0][-1]) + 1 if count else 1
            self.rows = min(bucket(last * beam, self.device), self.most_rows)
        self.fewest = self.rows
        if not (self.unbegun or self.is_open):
            self.fewest = bucket(count * beam, self.device)
        if count:
            ends_by = self.ends_by[running]
            self.next_due = int(ends_by.min())
            self.all_end = -1 if options.forces_eos else int(ends_by.max())
            self.furthest = int(self.places_ahead[running].max())
            self.forced_until = self.room.forced - int(self.steps_ahead[running].min())

    def _begin(self) -> None:
        """Send the rows of a search that is open, which have no sentences yet."""
        self.memory.host["tokens"].fill(self.first)
        self.memory.host["scores"].fill(-np.inf)
        self.memory.send_rows()
        self.steps.progress.begin()
        self.is_new = False

    def _next(self, count: int) -> tuple[SourcePart, list[Chunk]]:
        """The next ``count`` sentences that begin, and the chunks whose first ones are there."""
        parts, chunks = [], []
        self.unbegun -= count
        while count:
            chunk = self.waiting[0]
            if not chunk.begun:
                chunks.append(chunk)
            end = min(chunk.begun + count, chunk.sentences)
            parts.append(chunk.part(chunk.begun, end))
            count -= end - chunk.begun
            chunk.begun = end
            if end == chunk.sentences:
                self.waiting.popleft()
        return SourcePart.joined(parts), chunks

    def _refill(self) -> None:
        """Begin the next sentences in the free slots."""
        memory, options = self.memory, self.options
        beam, is_first = options.beam, self.is_new
        free = np.flatnonzero(self.in_slot < 0)
        count = min(len(free), self.unbegun)
        if self.encoder is None and not (is_first or self.is_open):
            count = 1 << (count.bit_length() - 1)
        part, chunks = self._next(count)
        if self.encoder is not None:  # the GPU reads the source while the host prepares the rest
            for each in chunks:
                read = each.part()
                self._send(read, None)
                self.steps.encode(self.encoder, self.decoder, read, each.start)
        slots = free[:count]
        numbers = np.zeros((len(OF_SENTENCE), count), np.int64)
        tokens, steps, last_steps, places = numbers
        tokens.fill(self.first)
        if self.encoder is None:
            places[:], tokens[:] = part.lengths - 1, part.tokens[part.boundaries[1:] - 1]
        steps[:], last_steps[:] = self.prompt or places, part.max_lens
        # At first all hypotheses of a sentence are equal: only one per group may have
        # continuations, or all of them when sampling.
        scores = np.full((count, beam), -np.inf, np.float32)
        scores[:, : beam if options.sampled else options.groups] = 0.0
        self.in_slot[slots], self.began[slots] = part.numbers, self.launched
        self.steps_ahead[slots] = steps - self.launched
        self.places_ahead[slots] = places - self.launched
        self.ends_by[slots] = self.launched + last_steps - steps + 1
        if self.reads_prompts:
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
            # Few graphs, each for a number of prompts; those without tokens need free slots, too.
            self._prefill(part, free if is_first else free[: power(count)])
        if is_first:  # while the GPU reads the source
            self.steps.progress.begin()
            self.is_new = False
        if self.reads_prompts and finished.any():
            self._end(part.numbers[finished], places[finished], is_reported=False)
        self._plan()

    def _prefill(self, part: SourcePart, slots: np.ndarray) -> None:
        """Let the decoder read the prompts of a part, in the first of these slots."""
        self._send(part, slots)
        prompts.prefill(
            self.steps, self.decoder, part, len(slots), self.options, self.table, self.reads_prompts
        )

    def _send(self, part: SourcePart, slots: np.ndarray | None) -> None:
        memory = self.memory
        if self.is_sent:
            memory.next_source()
        self.is_sent = True
        part.write(memory.host)
        if slots is not None:
            memory.host["source_slots"][: len(slots)] = slots
        memory.send_source()

    def _step(self) -> None:
        """Launch a step, and learn which sentences have ended."""
        place = self.furthest + self.launched
        if place > self.memory.positions - 2:
            for each in self.fetched:
                each.wait()
            self.steps.make_room(self.memory.rows, place + 2, place)
        follows, ends_all = self.launched < self.forced_until, self.launched + 1 == self.all_end
        if self.kind != (self.rows, follows, ends_all):
            self.kind = self.rows, follows, ends_all
            step = Step(
                self.rows, self.options, self.room.min_len_from, self.prompt, follows, ends_all
            )
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
            group = self.places.group_of[sentence]
            group.left -= 1
            group.chunk.left -= 1
            group.longest = max(group.longest, length)
            group.reported &= is_reported
            if not group.left:
                complete.append(group)
        if complete:
            self._fetch(sorted(complete, key=lambda group: group.first))
            self.places.take_back()

    def _fetch(self, groups: list[Group]) -> None:
        """Fetch the results of groups that are complete."""
        beam, positions = self.options.beam, max(group.longest for group in groups)
        # A step writes its report only after its results are visible to the whole GPU. So what is
        # reported can be read while later steps run.
        stream = self.steps.progress.beside(not all(group.reported for group in groups))
        bounds = [(each.first * beam, (each.first + each.size) * beam) for each in groups]
        rows = slice(*bounds[0]) if len(groups) == 1 else np.r_[tuple(slice(*x) for x in bounds)]
        fetched, first = Fetched(self.memory, rows, positions, stream), 0
        for group, (start, end) in zip(groups, bounds, strict=True):
            group.results.take(fetched, first)
            first += end - start
        while self.fetched and self.fetched[0].is_complete:
            self.fetched.popleft()
        self.fetched.append(fetched)
        self.ended += groups

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
