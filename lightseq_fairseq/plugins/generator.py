"""The generator of fairseq's tasks for our models: the search of ``generation``.

``task.build_generator`` returns a subclass of fairseq's generator. It runs our search for a single
model of a family that ``generates``, with beam search, diverse beam search or, on a GPU, sampling.
For all other options it falls back to fairseq's search, which calls our decoder token by token. The
functions at the end replace functions of fairseq, see `fairseq_compat.patching`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from fairseq import search as fairseq_search
from fairseq import utils
from fairseq.data import data_utils
from fairseq.models import FairseqLanguageModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import named
from lightseq_fairseq.generation.decoder import most_source
from lightseq_fairseq.generation.engine import Request
from lightseq_fairseq.generation.options import STOPPING, SearchOptions
from lightseq_fairseq.generation.search import MOST_BEAM, search
from lightseq_fairseq.generation.source import SearchBatch

TOGETHER = ("cuda",)  # on a CPU, a search of several batches is not faster
_REMEMBERED = 1 << 16  # detokenized sentences that --eval-bleu caches, about 200 bytes each


class _Asked(NamedTuple):
    """A batch that is to be searched; ``results`` are empty until the search has ended."""

    request: Request
    rng: Tensor | None
    results: list[Any]


class LSSequenceGenerator(SequenceGenerator):
    """``fairseq.sequence_generator.SequenceGenerator`` whose search loop runs on the device.

    The results are the same, with three exceptions: ``attention`` of a hypothesis is empty, the
    tensors of a hypothesis are on the CPU, and sampling draws other random numbers. Input batches
    may be on any device; batches on the CPU save a host sync.

    The model of an import searches as its folder says, see ``checkpoints.generation_settings``.

    Attributes:
        early_stopping: as in ``SearchOptions``; set by `stop_early`. None: that of the folder, if
            it is defined for the other options, or else fairseq's rule.
    """

    early_stopping: bool | str | None = None
    _asked: list[_Asked] | None = None  # batches that wait for the others, see `together`
    _for_engine = False  # whether they are those of an engine, see `request`

    def stop_early(self, early_stopping: bool | str) -> None:
        """Use transformers' rules of beam search, see ``SearchOptions.early_stopping``.

        Raises:
            UserError: the value is none of transformers', or other options exclude these rules.
        """
        if early_stopping not in [*STOPPING]:
            raise UserError(
                f'early_stopping is {early_stopping}: use True, False or "never", as in '
                "transformers; without it, fairseq's rule holds."
            )
        self.early_stopping = early_stopping
        options = self._options()
        is_language_model = not hasattr(self.model.single_model, "encoder")
        if options is None or options.sampled or options.groups > 1 or is_language_model:
            raise only_beam_search()

    def _generate(
        self, sample: dict[str, Any], prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None, bos_token: int | None = None,
    ) -> Any:  # fmt: skip
        model = self.model.single_model
        inputs = sample["net_input"]
        first = getattr(model, "generation", {}).get("target_first")
        if first is not None and prefix_tokens is None:
            prefix_tokens = inputs["src_tokens"].new_full((len(inputs["src_tokens"]), 1), first)
        encoder = getattr(model, "encoder", None)  # a language model has none
        options = None
        if constraints is None and "src_tokens" in inputs:
            options = self._options()
        forced = prefix_tokens if encoder is not None else None
        # Only fairseq's search supports diverse groups with prefixes, and prefixes with </s>.
        in_groups = prefix_tokens is not None and options is not None and options.groups > 1
        if in_groups or (forced is not None and bool((forced == self.eos).any())):
            options = None
        if options is None and self.early_stopping is not None:
            raise only_beam_search()
        if options is None and self._for_engine:
            raise only_our_search()
        if options is None:
            # fairseq's search needs all tensors on the model's device.
            sample, prefix_tokens, constraints = utils.apply_to_sample(
                lambda tensor: tensor.to(self._device), (sample, prefix_tokens, constraints)
            )
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        tokens = inputs["src_tokens"]
        if len(tokens) == 0:
            return []
        longest = tokens.shape[1]
        max_len = min(int(self.max_len_a * longest + self.max_len_b), self.max_len - 1)
        assert self.min_len <= max_len, (
            "min_len cannot be larger than max_len, please adjust these!"
        )
        if encoder is None:
            tokens = tokens[:, :0] if prefix_tokens is None else prefix_tokens
        rng = None
        if options.sampled:  # from the GPU's generator, as in fairseq's search
            rng = torch.zeros(2, dtype=torch.int64, device=self._device)
            rng[:1].random_()
        first = self.eos if bos_token is None else bos_token
        begins = tokens if encoder is None else forced
        begun = 0 if begins is None else begins.shape[1]
        request = Request(SearchBatch(tokens, max_len, forced), options, first, begun)
        asked = _Asked(request, rng, [])
        if self._asked is not None and (self._for_engine or not options.sampled):
            self._asked.append(asked)
        else:
            self._search([asked])
        return asked.results

    def _search(self, asked: Sequence[_Asked]) -> None:
        """Search batches with the same options together."""
        model, one = self.model.single_model, asked[0].request
        encoder, decoder = getattr(model, "encoder", None), model.decoder
        batches, rng = [each.request.batch for each in asked], asked[0].rng
        found = search(decoder.steps, encoder, decoder, batches, one.options, one.first, rng)
        for each, results in zip(asked, found, strict=True):
            each.results.extend(results)

    def request(self, call: Callable[[], Any]) -> Request:
        """What a call, which lets the generator search one batch, asks of the search.

        Raises:
            UserError: it needs a search of fairseq's, or its task changes what the search finds.
        """
        waiting: list[_Asked] = []
        self._asked, self._for_engine = waiting, True
        try:
            results = call()
        finally:
            self._asked, self._for_engine = None, False
        if len(waiting) != 1 or results is not waiting[0].results:
            raise only_our_search()
        return waiting[0].request

    def together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """See `together`."""
        if len(calls) < 2 or self._device.type not in TOGETHER:
            return [call() for call in calls]
        asked: list[_Asked] = []
        found: list[Any] = []
        for call in calls:
            waiting: list[_Asked] = []
            self._asked = waiting
            try:
                results = call()
            finally:
                self._asked = None
            if waiting and results is not waiting[-1].results:  # the task returns something else
                results = call()
            else:
                asked += waiting
            found.append(results)

        def kind(each: _Asked) -> str:
            return each.request.kind

        asked.sort(key=lambda each: -each.request.batch.tokens.shape[1])
        most = most_source(self.model.single_model.decoder)
        for _, group in itertools.groupby(sorted(asked, key=kind), kind):
            window: list[_Asked] = []
            room = most
            for each in group:
                tokens = each.request.batch.tokens.numel()
                if window and tokens > room:
                    self._search(window)
                    window, room = [], most
                window.append(each)
                room -= tokens
            self._search(window)
        return found

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _options(self) -> SearchOptions | None:
        """The options of our search, or None if fairseq's search must be used."""
        strategy = self.search
        blocker = self.repeat_ngram_blocker
        no_repeat_ngram = 0 if blocker is None else blocker.no_repeat_ngram_size
        if (
            self.model.models_size > 1
            or self.lm_model is not None
            or self.token_indices_to_suppress is not None
            or self.match_source_len
            or self.model.single_model.decoder.adaptive_softmax is not None  # has no logits
            or no_repeat_ngram == 1  # with n = 1 fairseq blocks nothing
            or 2 * self.beam_size >= self.vocab_size
            or (self.beam_size > MOST_BEAM and (self._for_engine or self._device.type == "cuda"))
        ):
            return None
        if type(strategy) is fairseq_search.BeamSearch:
            special: dict[str, Any] = {}
        elif type(strategy) is fairseq_search.DiverseBeamSearch:
            # fairseq stores the strength negated. It raises an error if the number of groups does
            # not divide the beam.
            special = {"groups": strategy.num_groups, "diversity": -strategy.diversity_strength}
            if self.beam_size % strategy.num_groups or special["diversity"] < 0:
                return None
        elif type(strategy) is fairseq_search.Sampling and (
            self._for_engine or self._device.type == "cuda"
        ):
            # On a CPU use fairseq's search, so that a seed gives the same samples as in fairseq.
            if no_repeat_ngram and strategy.sampling_topp > 0:
                return None  # topp is a share of all probability, blocked tokens included
            topp = max(strategy.sampling_topp, 0.0)
            topk = 0 if topp else max(strategy.sampling_topk, 0)  # as there
            special = {"sampled": True, "topk": topk, "topp": topp}
        else:
            return None
        early_stopping = self.early_stopping
        if early_stopping is None and not special:
            early_stopping = self.model.single_model.generation.get("early_stopping")
        return SearchOptions(
            beam=self.beam_size, pad=self.pad, eos=self.eos, unk=self.unk, min_len=self.min_len,
            unk_penalty=self.unk_penalty, temperature=self.temperature,
            length_penalty=self.len_penalty if self.normalize_scores else 0.0,
            no_repeat_ngram=no_repeat_ngram, early_stopping=early_stopping, **special,
        )  # fmt: skip


def together(generator: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls that each let the generator search one batch.

    On a GPU our generator searches their sentences together, the longest first, so that no slot is
    idle while one of them waits. The words are the same.
    """
    if isinstance(generator, LSSequenceGenerator):
        return generator.together(calls)
    return [call() for call in calls]


def only_beam_search() -> UserError:
    """The error of a search for which ``early_stopping`` is not defined."""
    return UserError(
        "early_stopping needs the fast beam search of one translation model: remove it, or the "
        "other options of the search (sampling, diverse beams, constraints, an ensemble and those "
        "that docs/flags.md lists as fairseq's)."
    )


def only_our_search() -> UserError:
    """The error of options that an engine does not have."""
    return UserError(
        "A server has the beam search, diverse beams and sampling of one model: remove the options "
        "that docs/flags.md lists as fairseq's."
    )


def is_searched(model: Any) -> bool:
    """Whether our search runs a model; a subclass may compute something else."""
    return any(f.generates and type(model) is named(f.ours) for f in families.FAMILIES)


def build_generator(
    original: Callable[..., Any],
    self: Any, models: Any, args: Any, seq_gen_cls: Any = None, *others: Any, **options: Any,
) -> Any:  # fmt: skip
    """fairseq's ``FairseqTask.build_generator``, with our generator for our models."""
    language_model = (options.get("extra_gen_cls_kwargs") or {}).get("lm_model")
    if not isinstance(language_model, (FairseqLanguageModel, type(None))):
        raise UserError(
            f"The model of --lm-path is a {type(language_model).__name__}, not a language model: "
            "use one that was trained with --task language_modeling."
        )
    # Alignments (also needed for --replace-unk) come from another generator class of fairseq.
    alignments = any(
        getattr(args, name, None) is not None and getattr(args, name) is not False
        for name in ("print_alignment", "replace_unk")
    )
    if seq_gen_cls is None and not alignments and is_searched(models[0]):
        seq_gen_cls = LSSequenceGenerator
    return original(self, models, args, seq_gen_cls, *others, **options)


def string(
    original: Callable[..., str],
    self: Any, tensor: Any, bpe_symbol: Any = None, escape_unk: bool = False,
    extra_symbols_to_ignore: Any = None, unk_string: str | None = None,
    include_eos: bool = False, separator: str = " ",
) -> str:  # fmt: skip
    """Faster version of fairseq's ``Dictionary.string`` with the same result.

    fairseq's version reads the elements of a tensor one by one, each of them several times.
    """
    if not torch.is_tensor(tensor) or tensor.dim() != 1:
        return original(
            self, tensor, bpe_symbol, escape_unk, extra_symbols_to_ignore, unk_string,
            include_eos, separator,
        )  # fmt: skip
    left_out = {*(extra_symbols_to_ignore or ()), *([] if include_eos else [self.eos()])}
    if hasattr(self, "bos_index"):
        left_out.add(self.bos())
    unk = self.unk()
    unknown = self.unk_string(escape_unk) if unk_string is None else unk_string
    words = (unknown if i == unk else self[i] for i in tensor.tolist() if i not in left_out)
    return data_utils.post_process(separator.join(words), bpe_symbol)


def _inference_with_bleu(
    original: Callable[..., Any], self: Any, generator: Any, sample: dict[str, Any], model: Any
) -> Any:
    # --eval-bleu strips the pads of each reference separately, with a host sync each: move the
    # targets to the CPU first. It also detokenizes the same references at each validation: cache
    # the results.
    if self.tokenizer is not None and "decode" not in vars(self.tokenizer):
        self.tokenizer.decode = functools.lru_cache(_REMEMBERED)(self.tokenizer.decode)
    return original(self, generator, {**sample, "target": sample["target"].cpu()}, model)
