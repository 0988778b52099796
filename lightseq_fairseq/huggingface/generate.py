"""``model.generate``, whose loop is our search.

All that comes before the loop is Hugging Face's: its arguments, the configuration, the encoder, and
the list of what is done to scores. The search reads this list. What it does not cover, Hugging
Face's loop does.

Shapes: B = sentences, N = B * num_beams, L = longest prompt, V = vocabulary.
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

from lightseq_fairseq.huggingface.asked import Asked
from lightseq_fairseq.huggingface.covered import NotCovered
from lightseq_fairseq.huggingface.searched import Searched
from lightseq_fairseq.huggingface.searched_pairs import SearchedPairs
from lightseq_fairseq.huggingface.searched_text import SearchedText
from lightseq_fairseq.huggingface.swapped import Coverage, Swapped, subclass

_CLASSES: dict[str, type[Searched]] = {
    "BartForConditionalGeneration": SearchedPairs,
    "MBartForConditionalGeneration": SearchedPairs,
    "M2M100ForConditionalGeneration": SearchedPairs,
    "PegasusForConditionalGeneration": SearchedPairs,
    "MarianMTModel": SearchedPairs,
    "GPT2LMHeadModel": SearchedText,
}
# Arguments of the loop that change nothing.
_IGNORED = ("use_cache", "cache", "past_key_values", "cache_position", "output_attentions",
            "output_hidden_states")  # fmt: skip
_CACHES = ("cache", "past_key_values", "cache_params")  # a user's own
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
    decoder: Searched | None = None
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
        name: _loop(getattr(original, name), searches)
        for name, searches in (("_sample", True), ("_beam_search", True),
                               ("_assisted_decoding", False))
        if hasattr(original, name)
    }  # fmt: skip
    return subclass(original, Generating, generate=generate, **loops)


def _loop(theirs: Callable[..., Any], searches: bool) -> Callable[..., Any]:
    """A loop of ``generate``: our search, if it ``searches``, or else ``theirs``."""

    @functools.wraps(theirs)
    def loop(self: Any, *args: Any, **given: Any) -> Any:
        state = self._lightseq
        if state.plain:
            return theirs(self, *args, **given)
        try:
            if not searches:
                raise NotCovered("generate has an assistant or looks up candidates")
            found = _searched(self, *args, **given)
        except NotCovered as reason:
            state.report.falls_back(reason, "generate")
            return theirs(self, *args, **given)
        state.report.calls += 1
        return found

    return loop


def _searched(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
    generation_config: Any, synced_gpus: bool = False, streamer: Any = None, **given: Any,
) -> Any:  # fmt: skip
    """What the loop returns, by our search. Raises NotCovered if it does not cover this.

    input_ids: int64 [N, L], the first decoder inputs or the prompts.
    """
    config = generation_config
    for what, is_so in {
        "generate has a streamer": streamer is not None,
        "several GPUs generate as one (synced_gpus)": synced_gpus,
        "generate helps another model": getattr(config, "is_assistant", False),
    }.items():
        if is_so:
            raise NotCovered(what)
    returns_dict, beam = config.return_dict_in_generate, config.num_beams
    if returns_dict and (
        config.output_attentions or config.output_hidden_states or config.output_logits
        or (config.output_scores and beam == 1)
    ):  # fmt: skip
        raise NotCovered("generate returns numbers of each step")
    decoder = _decoder_of(model)
    for name, value in given.items():
        if name not in (*decoder.reads, *_IGNORED) and value is not None:
            raise NotCovered(f"generate is called with {name}")
    asked = Asked.of(config, logits_processor, stopping_criteria)
    options = asked.options(len(model.lm_head.weight), model.device)
    bias = getattr(model, "final_logits_bias", None)
    with _precision(decoder.modules_of(model)):
        hypotheses = decoder.results(input_ids, given, asked, options, bias)
    count = config.num_return_sequences if beam > 1 else 1  # samples are sentences of their own
    if any(len(each) < count for each in hypotheses):
        raise NotCovered("a sentence has fewer results than num_return_sequences")
    best = [hypothesis for each in hypotheses for hypothesis in each[:count]]
    prompts = input_ids[::beam].cpu().repeat_interleave(count, 0)
    rows = [torch.cat((prompt, h["tokens"])) for prompt, h in zip(prompts, best, strict=True)]
    sequences = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=asked.filling)
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
    result = f"Generate{'Beam' if beam > 1 else ''}{decoder.kind}Output"
    return getattr(classes, result)(**parts)


def _decoder_of(model: Any) -> Searched:
    """The decoder as the search reads it, with the graphs of earlier calls."""
    kind, state = _CLASSES[type(model).__name__], model._lightseq
    decoder, head = kind.modules_of(model)[-1], model.lm_head
    if not hasattr(decoder, "_lightseq"):
        raise NotCovered("its decoder is not accelerated")
    if state.decoder is None or not state.decoder.is_of(decoder, head):
        state.decoder = kind(decoder, head)
    found: Searched = state.decoder
    return found


@contextlib.contextmanager
def _precision(modules: tuple[Any, ...]) -> Iterator[None]:
    """Autocast as in the forward of the first of these modules, the model, which accelerate may
    have put there.

    Raises NotCovered if something else has changed the forward of a module, or if it has hooks.
    """
    model, *inner = modules
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotCovered(f"a {type(module).__name__} has hooks")
    if any("forward" in vars(module) for module in inner):
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
