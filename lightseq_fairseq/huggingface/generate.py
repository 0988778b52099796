"""``model.generate`` of sequence-to-sequence models, whose loop is our search.

All that comes before the loop is Hugging Face's: its arguments, the configuration, the encoder, and
the list of what is done to scores. The search reads this list. What it does not cover, Hugging
Face's loop does.

Shapes: B = sentences, N = B * num_beams, S = padded source length, C = model width, V = vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightseq_fairseq.generation.options import STOPPING, SearchOptions
from lightseq_fairseq.generation.search import MOST_BEAM
from lightseq_fairseq.huggingface.covered import NotCovered
from lightseq_fairseq.huggingface.searched import SearchedDecoder
from lightseq_fairseq.huggingface.swapped import Coverage, Swapped, subclass

_CLASSES = (
    "BartForConditionalGeneration",
    "MBartForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "MarianMTModel",
)
# Arguments of the loop that change nothing, or that are read here or by the encoder.
_READ = ("attention_mask", "inputs_embeds", "encoder_outputs", "labels", "use_cache", "cache",
         "past_key_values", "cache_position", "output_attentions",
         "output_hidden_states")  # fmt: skip
_CACHES = ("cache", "past_key_values", "cache_params")  # a user's own
_MOST_BLOCKED = 64  # each is a kernel
_NOT_MADE = (
    "lightseq: the result of generate has sequences and sequences_scores, but no scores of each "
    "step, beam_indices and cache: lightseq.restore(model) before generate for these."
)


@dataclass
class _State:
    """What a model keeps besides its modules.

    Attributes:
        plain: the running call is Hugging Face's.
        has_warned: of the parts of a result that are not made.
    """

    report: Coverage = field(default_factory=Coverage)
    decoder: SearchedDecoder | None = None
    plain: bool = False
    has_warned: bool = False

    def __deepcopy__(self, memo: Any) -> _State:
        return _State()


class Generating(Swapped):
    """Mixin of the models' classes, see `_class_of`."""

    _lightseq: _State


def is_generating(module: nn.Module) -> bool:
    """Whether a module, if it is of transformers, has a ``generate`` that our search can run."""
    return type(module).__name__ in _CLASSES


def search_in(model: Any) -> None:
    """Let our search run the model's ``generate``; its decoder is accelerated."""
    if not isinstance(model, Generating):
        original: Any = type(model)
        model._lightseq, model.__class__ = _State(), _class_of(original)


@functools.cache
def _class_of(original: Any) -> Any:
    """The subclass of a class of Hugging Face whose ``generate`` our search runs."""
    theirs = original.generate

    @functools.wraps(theirs)
    def generate(self: Any, *args: Any, **given: Any) -> Any:
        state = self._lightseq
        reason = None
        if given.get("custom_generate") is not None:
            reason = "generate has a custom_generate"
        elif any(given.get(name) is not None for name in _CACHES):
            reason = "generate has a cache"
        if reason is None or state.plain:
            return theirs(self, *args, **given)
        state.report.falls_back(NotCovered(reason), "generate")
        state.plain = True
        try:
            return theirs(self, *args, **given)
        finally:
            state.plain = False

    loops = {
        name: _loop(getattr(original, name), result)
        for name, result in (
            ("_sample", "GenerateEncoderDecoderOutput"),
            ("_beam_search", "GenerateBeamEncoderDecoderOutput"),
            ("_assisted_decoding", ""),
        )
        if hasattr(original, name)
    }
    return subclass(original, Generating, generate=generate, **loops)


def _loop(theirs: Callable[..., Any], result: str) -> Callable[..., Any]:
    """A loop of ``generate``: our search, or else ``theirs``.

    result: the class of transformers for what a search has found; "": our search never runs.
    """

    @functools.wraps(theirs)
    def loop(self: Any, *args: Any, **given: Any) -> Any:
        state = self._lightseq
        if state.plain:
            return theirs(self, *args, **given)
        try:
            if not result:
                raise NotCovered("generate has an assistant or looks up candidates")
            found = _searched(self, result, *args, **given)
        except NotCovered as reason:
            state.report.falls_back(reason, "generate")
            return theirs(self, *args, **given)
        state.report.calls += 1
        return found

    return loop


def _searched(
    model: Any, result: str, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
    generation_config: Any, synced_gpus: bool = False, streamer: Any = None, **given: Any,
) -> Any:  # fmt: skip
    """What the loop returns, by our search. Raises NotCovered if it does not cover this.

    input_ids: int64 [N, 1], the first decoder inputs.
    """
    config = generation_config
    for what, is_so in {
        "generate samples": config.do_sample,
        "generate has a streamer": streamer is not None,
        "several GPUs generate as one (synced_gpus)": synced_gpus,
        "generate begins with several decoder_input_ids": input_ids.shape[1] != 1,
        "generate helps another model": getattr(config, "is_assistant", False),
    }.items():
        if is_so:
            raise NotCovered(what)
    for name, value in given.items():
        if name not in _READ and value is not None:
            raise NotCovered(f"generate is called with {name}")
    returns_dict, beam = config.return_dict_in_generate, config.num_beams
    if returns_dict and (
        config.output_attentions or config.output_hidden_states or config.output_logits
        or (config.output_scores and beam == 1)
    ):  # fmt: skip
        raise NotCovered("generate returns numbers of each step")
    settings = _Settings.of(config, logits_processor, stopping_criteria)
    starts = input_ids[::beam, 0].tolist()
    if len(set(starts)) > 1:
        raise NotCovered("the sentences begin with different tokens")
    head = model.lm_head
    options = settings.options(len(head.weight), model.device)
    features, mask = given["encoder_outputs"][0][::beam], given.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise NotCovered("the attention mask is not of the shape [sentences, tokens]")
    bias = getattr(model, "final_logits_bias", None)
    with _precision(model):
        hypotheses = _decoder_of(model).results(
            features, None if mask is None else mask[::beam], bias, options, starts[0],
            settings.max_len, settings.forced,
        )  # fmt: skip
    count = config.num_return_sequences
    if any(len(each) < count for each in hypotheses):
        raise NotCovered("a sentence has fewer results than num_return_sequences")
    best = [hypothesis for each in hypotheses for hypothesis in each[:count]]
    rows = [torch.cat((torch.tensor(starts[:1]), h["tokens"])) for h in best]
    sequences = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=settings.filling)
    sequences = sequences.to(input_ids.device)
    if not returns_dict:
        return sequences
    import transformers.generation as classes

    if not model._lightseq.has_warned:
        model._lightseq.has_warned = True
        warnings.warn(_NOT_MADE, stacklevel=4)
    parts: dict[str, Any] = {"sequences": sequences}
    if config.output_scores:
        scores = torch.stack([hypothesis["score"] for hypothesis in best])
        parts["sequences_scores"] = scores.to(input_ids.device)
    return getattr(classes, result)(**parts)


def _decoder_of(model: Any) -> SearchedDecoder:
    """The decoder as the search reads it, with the graphs of earlier calls."""
    decoder, head, state = model.model.decoder, model.lm_head, model._lightseq
    if not hasattr(decoder, "_lightseq"):
        raise NotCovered("its decoder is not accelerated")
    rates = [decoder.dropout, decoder.layerdrop]
    for layer in decoder.layers:
        rates += [layer.dropout, layer.activation_dropout, layer.self_attn.dropout]
        rates += [layer.encoder_attn.dropout]
    if decoder.training and any(rates):
        raise NotCovered("dropout is on: call model.eval() before generate")
    if state.decoder is None or not state.decoder.is_of(decoder, head):
        state.decoder = SearchedDecoder(decoder._lightseq.family, decoder, head)
    found: SearchedDecoder = state.decoder
    return found


@contextlib.contextmanager
def _precision(model: Any) -> Iterator[None]:
    """Autocast as in the model's forward, which accelerate may have put there.

    Raises NotCovered if something else has changed the forward of the model or of what is around
    its encoder and decoder.
    """
    for module in (model, model.model, model.model.decoder):
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotCovered(f"a {type(module).__name__} has hooks")
    if "forward" in {*vars(model.model), *vars(model.model.decoder)}:
        raise NotCovered("the model has another forward")
    with contextlib.ExitStack() as stack:
        forward = vars(model).get("forward")
        forward = getattr(forward, "__func__", forward)
        while forward is not None and forward is not type(model).forward:
            cells = [cell.cell_contents for cell in getattr(forward, "__closure__", None) or ()]
            casts = [each for each in cells if isinstance(each, torch.autocast)]
            names = {type(each).__name__ for each in (forward, *cells)}
            if not casts and "ConvertOutputsToFp32" not in names:
                raise NotCovered("the model has another forward")
            for cast in casts:
                again = torch.autocast(cast.device, cast.fast_dtype, cast._enabled)
                stack.enter_context(again)
            forward = getattr(forward, "__wrapped__", None)
            forward = getattr(forward, "__func__", forward)
        yield


@dataclass
class _Settings:
    """What a configuration and the lists of ``generate`` ask for.

    Attributes:
        max_len: the step at which hypotheses must end.
        forced: the first token of each result.
        filling: of the sequences behind their end.
        others: see ``SearchOptions``.
    """

    beam: int
    eos: int
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

    @classmethod
    def of(cls, config: Any, processors: Any, criteria: Any) -> _Settings:
        """Raises NotCovered if they ask for something else."""
        eos, early = _ids(config.eos_token_id), config.early_stopping or False
        if len(eos) != 1:
            raise NotCovered(f"generate has {len(eos)} eos tokens")
        if early not in [*STOPPING]:
            raise NotCovered(f"early_stopping is {early}")
        pads = _ids(config.pad_token_id) or eos
        # As there: behind the end of a beam search there are no pads of number 0.
        filling = pads[0] if config.num_beams == 1 else pads[0] or eos[0]
        penalty = 1.0 if config.length_penalty is None else float(config.length_penalty)
        found = cls(config.num_beams, eos[0], filling, config.max_length - 2, penalty, early)
        for each in criteria:
            found._end(each)
        for each in processors:
            found._process(each)
        forced = {found.forced, eos[0] if found.forces_eos else None}
        if forced & found.blocked or found.forced == eos[0]:
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

    def options(self, words: int, device: torch.device) -> SearchOptions:
        """Options of a search among ``words`` tokens; behind them are some that are impossible."""
        most = MOST_BEAM if device.type == "cuda" else words
        if 2 * self.beam >= words or self.beam > most:
            raise NotCovered(f"num_beams is {self.beam}")
        if len(self.blocked) > _MOST_BLOCKED:
            raise NotCovered(f"{len(self.blocked)} tokens are blocked")
        # The search itself has one token that no result has.
        is_one = len(self.blocked) == 1 and not self.renormalizes
        none = next(iter(self.blocked)) if is_one else words
        blocked = tuple(sorted(self.blocked)) if none == words else ()
        return SearchOptions(
            beam=self.beam, pad=none, eos=self.eos, unk=words, min_len=self.min_len,
            length_penalty=self.length_penalty, no_repeat_ngram=self.no_repeat_ngram,
            early_stopping=self.early_stopping, blocked=blocked, renormalizes=self.renormalizes,
            forces_eos=self.forces_eos,
        )  # fmt: skip


def _ids(tokens: Any) -> list[int]:
    """The numbers of some tokens, of one, or of none."""
    if tokens is None:
        return []
    found = torch.as_tensor(tokens).flatten().tolist()
    return [int(token) for token in found]
