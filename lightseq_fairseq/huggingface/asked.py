"""What ``generate`` asks for: its configuration, and its lists of what is done to scores and of
what ends a result. What our search does not know is seen, because it is in the lists.

Shapes: V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lightseq_fairseq.generation.options import STOPPING, SearchOptions
from lightseq_fairseq.generation.search import MOST_BEAM
from lightseq_fairseq.huggingface.covered import NotCovered


@dataclass
class Asked:
    """What a configuration and the lists of ``generate`` ask for.

    Attributes:
        eos: None: a result ends at its greatest length.
        max_len: the step at which hypotheses must end.
        forced: the first token of each result.
        filling: of the sequences behind their end.
        others: see ``SearchOptions``.
    """

    beam: int
    eos: int | None
    filling: int
    max_len: int
    length_penalty: float
    early_stopping: bool | str
    min_len: int = 0
    no_repeat_ngram: int = 0
    blocked: set[int] = field(default_factory=set)
    forced: int | None = None
    forces_eos: bool = False
    renormalizes: bool = False
    sampled: bool = False
    temperature: float = 1.0
    topk: int = 0
    topp: float = 0.0

    @classmethod
    def of(cls, config: Any, processors: Any, criteria: Any) -> Asked:
        """Raises NotCovered if they ask for something else."""
        eos, early = _ids(config.eos_token_id), config.early_stopping or False
        if len(eos) > 1:
            raise NotCovered(f"generate has {len(eos)} eos tokens")
        if early not in [*STOPPING]:
            raise NotCovered(f"early_stopping is {early}")
        if config.do_sample and config.num_beams > 1:
            raise NotCovered("generate samples among beams")
        pads = _ids(config.pad_token_id) or eos or [0]  # without eos there is nothing to fill
        # As there: behind the end of a beam search there are no pads of number 0.
        filling = pads[0] if config.num_beams == 1 or not eos else pads[0] or eos[0]
        penalty = 1.0 if config.length_penalty is None else float(config.length_penalty)
        found = cls(
            config.num_beams, eos[0] if eos else None, filling, config.max_length - 2, penalty,
            early, sampled=bool(config.do_sample),
        )  # fmt: skip
        for each in criteria:
            found._end(each)
        for each in processors:
            found._process(each)
        forced = {found.forced, found.eos if found.forces_eos else None} - {None}
        if forced & found.blocked or found.eos in {found.forced} - {None}:
            raise NotCovered("a forced token is eos or blocked")
        if found.forces_eos:
            found.min_len = min(found.min_len, found.max_len)
        return found

    def _end(self, each: Any) -> None:
        from transformers.generation import stopping_criteria as known

        is_known = (
            type(each) is known.MaxLengthCriteria and each.max_length - 2 == self.max_len
        ) or (type(each) is known.EosTokenCriteria and _ids(each.eos_token_id) == [self.eos])
        if not is_known:
            raise NotCovered(f"generate has a {type(each).__name__}")

    def _process(self, each: Any) -> None:
        from transformers.generation import logits_process as known

        kind, other = type(each), NotCovered(f"generate has a {type(each).__name__}")
        if self.renormalizes:  # it is the last one
            raise other
        if self.sampled and self._cuts(each):
            return
        if (self.temperature != 1.0 or self.topk or self.topp) and (
            kind is not known.LogitNormalization
        ):
            raise other
        if kind in (known.MinLengthLogitsProcessor, known.MinNewTokensLengthLogitsProcessor):
            if kind is known.MinLengthLogitsProcessor:
                least = each.min_length - 1  # with the first decoder input
            else:
                least = each.min_new_tokens + each.prompt_length_to_skip - 1
            if _ids(each.eos_token_id) != [self.eos]:
                raise other
            self.min_len = max(self.min_len, least)
        elif kind is known.NoRepeatNGramLogitsProcessor and not self.no_repeat_ngram:
            if each.ngram_size == 1:
                raise NotCovered("no_repeat_ngram_size is 1")
            self.no_repeat_ngram = each.ngram_size
        elif kind is known.NoBadWordsLogitsProcessor:
            if any(len(words) > 1 for words in each.sequence_bias):
                raise NotCovered("bad_words_ids have several tokens")
            self.blocked |= {words[0] for words in each.sequence_bias}
        elif kind is known.SuppressTokensLogitsProcessor:
            self.blocked |= set(_ids(each.suppress_tokens))
        elif kind is known.ForcedBOSTokenLogitsProcessor and self.forced is None:
            if len(tokens := _ids(each.bos_token_id)) != 1:
                raise NotCovered("one of several tokens is forced")
            self.forced = tokens[0]
        elif kind is known.ForcedEOSTokenLogitsProcessor and each.max_length - 2 == self.max_len:
            if _ids(each.eos_token_id) != [self.eos]:
                raise NotCovered("another token than eos is forced at the end")
            self.forces_eos = True
        elif kind is known.LogitNormalization:
            self.renormalizes = True
        else:
            raise other

    def _cuts(self, each: Any) -> bool:
        """Take in a change of the probabilities of samples; whether it is known, in this order."""
        from transformers.generation import logits_process as known

        kind = type(each)
        if kind is known.TemperatureLogitsWarper:
            is_first = self.temperature == 1.0 and not self.topk and not self.topp
            self.temperature = float(each.temperature)
            return is_first
        if getattr(each, "filter_value", None) != -torch.inf or self.topp:
            return False
        if kind is known.TopKLogitsWarper and not self.topk:
            self.topk = each.top_k
            return True
        if kind is known.TopPLogitsWarper and each.min_tokens_to_keep == 1:
            self.topp = float(each.top_p)
        return self.topp > 0

    def options(self, words: int, device: torch.device) -> SearchOptions:
        """Options of a search among ``words`` tokens; behind them are some that are impossible."""
        most = MOST_BEAM if device.type == "cuda" else words
        if 2 * self.beam >= words or self.beam > most:
            raise NotCovered(f"num_beams is {self.beam}")
        # The search itself has one token that no result has.
        renormalizes = self.renormalizes or self.sampled
        is_one = len(self.blocked) == 1 and not renormalizes
        none = next(iter(self.blocked)) if is_one else words
        blocked = tuple(sorted(self.blocked)) if none == words else ()
        return SearchOptions(
            beam=self.beam, pad=none, eos=words if self.eos is None else self.eos, unk=words,
            min_len=self.min_len, length_penalty=self.length_penalty,
            no_repeat_ngram=self.no_repeat_ngram, early_stopping=self.early_stopping,
            blocked=blocked, renormalizes=renormalizes, forces_eos=self.forces_eos,
            sampled=self.sampled, temperature=self.temperature, topk=self.topk, topp=self.topp,
        )  # fmt: skip


def _ids(tokens: Any) -> list[int]:
    """The numbers of some tokens, of one, or of none."""
    if tokens is None:
        return []
    found = torch.as_tensor(tokens).flatten().tolist()
    return [int(token) for token in found]
