"""Translation of lines of text: what ``lightseq-interactive`` prints, and what
`lightseq_fairseq.Translator` returns.

fairseq and torch are imported when a model is loaded.
"""

from __future__ import annotations

import ast
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks.failures.data import over_max_tokens
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.generation.texts import Hypothesis, Translation

if TYPE_CHECKING:
    from torch import Tensor

    from lightseq_fairseq.generation.engine import Request


class Loaded(NamedTuple):
    """Models that are ready to translate, and their text functions.

    Attributes:
        task: fairseq's task, with the dictionaries.
        models: one model, or those of an ensemble.
        encode, decode: tokenizer and BPE, from and to plain text.
        source: `encode` for a source, which may begin with <s>, see ``base.tokenizer``.
        on_gpu: whether the models are on a GPU.
    """

    task: Any
    models: list[Any]
    encode: Callable[[str], str]
    decode: Callable[[str], str]
    source: Callable[[str], str]
    on_gpu: bool

    @property
    def languages(self) -> list[str]:
        """Those of a multilingual model whose languages share a dictionary; else none."""
        task, found = self.task, getattr(self.task, "langs", [])
        sides = [*getattr(task, "dicts", {0: task.source_dictionary}).values()]
        return [*found] if all(each == task.target_dictionary for each in sides) else []

    def between(self, source: str, target: str) -> Loaded:
        """The same models for other ones of `languages`."""
        task = copy.copy(self.task)
        for name in ("args", "cfg"):
            if (settings := copy.copy(getattr(task, name, None))) is not None:
                settings.source_lang, settings.target_lang = source, target
                setattr(task, name, settings)
        if hasattr(task, "dicts"):  # of --task translation_multi_simple_epoch
            same = dict.fromkeys((source, target), task.target_dictionary)
            dictionaries = {**task.dicts, **same}
            task.source_langs, task.target_langs, task.dicts = [source], [target], dictionaries
            task.data_manager = copy.copy(task.data_manager)
            task.data_manager.dicts = dictionaries
        return self._replace(task=task)


def uses_gpu(cfg: Any) -> bool:
    """Whether the models belong on a GPU: there is one, and no --cpu."""
    import torch

    return torch.cuda.is_available() and not cfg.common.cpu


def seed(cfg: Any) -> None:
    """Seeds numpy and torch if the user gave --seed, as fairseq's commands do."""
    import numpy as np
    from fairseq import utils

    if cfg.common.seed is not None and not cfg.generation.no_seed_provided:
        np.random.seed(cfg.common.seed)
        utils.set_torch_seed(cfg.common.seed)


def load(cfg: Any) -> Loaded:
    """Loads the models of a configuration and prepares them for translation.

    cfg: fairseq's, as its parser for ``fairseq-interactive`` gives it.

    Raises:
        UserError: a model is no translation model.
        Exception: fairseq's, which ``messages.explain`` turns into a sentence.
    """
    from fairseq import checkpoint_utils, tasks, utils

    from lightseq_fairseq.cli.checks import (
        inside_fairseq,  # imports numpy, which --help does not need
    )

    task = tasks.setup_task(cfg.task)
    shards = cfg.checkpoint.checkpoint_shard_count
    models, _ = inside_fairseq.load_model_ensemble(
        checkpoint_utils.load_model_ensemble,
        utils.split_paths(cfg.common_eval.path),
        ast.literal_eval(cfg.common_eval.model_overrides),
        task,
        suffix=cfg.checkpoint.checkpoint_suffix,
        strict=shards == 1,
        num_shards=shards,
    )
    on_gpu = uses_gpu(cfg)
    for model in models:
        if cfg.common.fp16:
            model.half()
        if on_gpu:
            model.cuda()
        model.prepare_for_inference_(cfg)
    splitter, bpe = task.build_tokenizer(cfg.tokenizer), task.build_bpe(cfg.bpe)
    coders = [coder for coder in (splitter, bpe) if coder is not None]
    is_pair = hasattr(models[0], "encoder")  # a language model has none

    def encode(text: str) -> str:
        for coder in coders:
            text = coder.encode(text)
        return text

    def decode(text: str) -> str:
        for coder in reversed(coders):
            text = coder.decode(text)
        return text

    def source(text: str) -> str:
        if not is_pair:
            return encode(text)
        text = text.strip()  # as fairseq-interactive does
        if not hasattr(bpe, "source"):
            return encode(text)
        return str(bpe.source(text if splitter is None else splitter.encode(text)))

    return Loaded(task, models, encode, decode, source, on_gpu)


class Search:
    """The search of loaded models with one set of options.

    Args:
        loaded: the models.
        cfg: as in `load`; its sections generation, dataset and common_eval are read.
        early_stopping: transformers' rule that ends a sentence; None: fairseq's.

    Raises:
        UserError: options that exclude each other.
    """

    def __init__(self, loaded: Loaded, cfg: Any, early_stopping: bool | str | None = None) -> None:
        from fairseq import utils

        from lightseq_fairseq.plugins.generator import LSSequenceGenerator, only_beam_search

        options, batches = cfg.generation, cfg.dataset
        if options.sampling and options.nbest != options.beam:
            raise UserError("--sampling requires --nbest to be equal to --beam.")
        self._loaded, self._nbest = loaded, options.nbest
        self._generator = loaded.task.build_generator(loaded.models, options)
        # Our search takes the source from the CPU, and its results are on the CPU.
        is_ours = isinstance(self._generator, LSSequenceGenerator)
        self._moves = loaded.on_gpu and not is_ours
        if early_stopping is not None:
            if not is_ours:
                raise only_beam_search()
            self._generator.stop_early(early_stopping)
        self._aligned = utils.load_align_dict(options.replace_unk)
        self._joiner = cfg.common_eval.post_process
        self._has_constraints = bool(options.constraints)
        self._has_alignment = bool(options.print_alignment)
        self._skips = batches.skip_invalid_size_inputs_valid_test
        self._max_tokens, self._batch_size = batches.max_tokens, batches.batch_size
        self._positions = utils.resolve_max_positions(
            loaded.task.max_positions(), *[model.max_positions() for model in loaded.models]
        )
        self._strip = getattr(
            self._generator, "symbols_to_strip_from_output", {loaded.task.target_dictionary.eos()}
        )

    def translate(self, lines: Sequence[str], unknown: UnknownWords) -> list[Translation]:
        """The translations of ``lines``, in their order; ``unknown`` counts their tokens.

        Raises:
            UserError: a line is longer than --max-tokens.
            Exception: fairseq's about a line that is longer than the model's positions.
        """
        texts, constraints = self._parted(lines)
        encoded: list[str] = []

        def encode(text: str) -> str:
            encoded.append(self._loaded.source(text))
            return encoded[-1]

        tokens, _ = self._loaded.task.get_interactive_tokens_and_lengths(texts, encode)
        found = self._found(tokens, constraints, encoded)
        for each in tokens:
            unknown.count(each, self._loaded.task.source_dictionary)
        return found

    def of_numbers(self, prompts: Sequence[Sequence[int]]) -> list[Translation]:
        """Like `translate`, for prompts that are lists of token ids without eos."""
        import torch

        eos = self._loaded.task.source_dictionary.eos()
        return self._found([torch.tensor([*prompt, eos]) for prompt in prompts], None)

    def request(self, tokens: Tensor) -> Request:
        """What an engine is to search for one sentence: int64 that ends with eos.

        Raises:
            UserError: the sentence is too long for the model, or an engine lacks these options.
        """
        from lightseq_fairseq.plugins.generator import LSSequenceGenerator, only_our_search

        if not isinstance(self._generator, LSSequenceGenerator):
            raise only_our_search()
        positions = self._positions
        most = positions[0] if isinstance(positions, tuple) else positions
        if most is not None and len(tokens) > most:
            raise UserError(
                f"The text has {len(tokens)} tokens, the model reads at most {most}: shorten it."
            )
        dataset = self._loaded.task.build_dataset_for_inference([tokens], [len(tokens)])
        batch = dataset.collater([dataset[0]])
        return self._generator.request(functools.partial(self._call, batch))

    def texts(self, found: Sequence[Any]) -> tuple[Hypothesis, ...]:
        """The hypotheses that an engine has found for a sentence, the best first."""
        return tuple(self._hypothesis(each, "") for each in found[: self._nbest])

    def _found(
        self, tokens: list[Tensor], constraints: Tensor | None, encoded: Sequence[str] = ()
    ) -> list[Translation]:
        """The translations of sentences; each is an int64 tensor that ends with eos.

        encoded: their texts, from which --replace-unk copies; empty if there are none.
        """
        task, lengths = self._loaded.task, [len(each) for each in tokens]
        try:
            batches = task.get_batch_iterator(
                dataset=task.build_dataset_for_inference(tokens, lengths, constraints=constraints),
                max_tokens=self._max_tokens,
                max_sentences=self._batch_size,
                max_positions=self._positions,
                ignore_invalid_inputs=self._skips,
                disable_iterator_cache=True,
            ).next_epoch_itr(shuffle=False)
        except AssertionError as error:
            if "should not exceed max_tokens" not in str(error):
                raise
            raise UserError(over_max_tokens(max(lengths), self._max_tokens)) from error
        found = dict(self._batches(list(batches), encoded))
        return [
            found[number] if number in found else Translation(self._source(tokens[number]), ())
            for number in range(len(tokens))
        ]

    def _parted(self, lines: Sequence[str]) -> tuple[list[str], Tensor | None]:
        """Sentences, and the constraints that stand behind tabs in fairseq's format."""
        if not self._has_constraints:
            return list(lines), None
        from fairseq.token_generation_constraints import pack_constraints

        parts = [line.split("\t") for line in lines]
        dictionary = self._loaded.task.target_dictionary

        def encoded(text: str) -> Tensor:
            return dictionary.encode_line(
                self._loaded.encode(text), append_eos=False, add_if_not_exist=False
            )

        packed = pack_constraints([list(map(encoded, asked)) for _, *asked in parts])
        return [sentence for sentence, *_ in parts], packed

    def _batches(
        self, batches: list[dict[str, Any]], encoded: Sequence[str]
    ) -> Iterator[tuple[int, Translation]]:
        """(number, translation) of each sentence of the batches."""
        from lightseq_fairseq.plugins.generator import together

        began = time.perf_counter()
        calls = [functools.partial(self._call, batch) for batch in batches]
        found = together(self._generator, calls)
        sentences = sum(len(batch["id"]) for batch in batches)
        seconds = (time.perf_counter() - began) / max(sentences, 1)
        for batch, results in zip(batches, found, strict=True):
            yield from self._translations(batch, results, encoded, seconds)

    def _call(self, batch: dict[str, Any]) -> Any:
        """The hypotheses of each sentence of a batch."""
        from fairseq import utils

        given = ({"net_input": batch["net_input"]}, batch.get("constraints"))
        sample, constraints = utils.move_to_cuda(given) if self._moves else given
        return self._loaded.task.inference_step(
            self._generator, self._loaded.models, sample, constraints=constraints
        )

    def _translations(
        self, batch: dict[str, Any], results: Any, encoded: Sequence[str], seconds: float
    ) -> Iterator[tuple[int, Translation]]:
        """(number, translation) of each sentence of a batch."""
        from fairseq.token_generation_constraints import unpack_constraints

        task, constraints = self._loaded.task, batch.get("constraints")
        for place, (number, hypotheses) in enumerate(zip(batch["id"].tolist(), results)):
            read = batch["net_input"]["src_tokens"][place]
            copied = self._copied(read, encoded[number]) if self._aligned is not None else ""
            asked = () if constraints is None else unpack_constraints(constraints[place])
            best = tuple(self._hypothesis(each, copied) for each in hypotheses[: self._nbest])
            words = tuple(task.target_dictionary.string(each, self._joiner) for each in asked)
            yield number, Translation(self._source(read), best, words, seconds)

    def _source(self, tokens: Tensor) -> str:
        """The text of a sentence's tokens, which may be padded."""
        from fairseq import utils

        task = self._loaded.task
        if task.source_dictionary is None:
            return ""
        tokens = utils.strip_pad(tokens, task.target_dictionary.pad())
        return str(task.source_dictionary.string(tokens, self._joiner))

    def _copied(self, tokens: Tensor, encoded: str) -> str:
        """The words of a source, one for each token, from which --replace-unk copies.

        An unknown token is the word of the text. The others are the model's, because a task may
        add some, such as that of a language.
        """
        from fairseq.tokenizer import tokenize_line

        dictionary = self._loaded.task.source_dictionary
        unk = dictionary.unk()
        unknown = iter([w for w in tokenize_line(encoded) if dictionary.index(w) == unk])
        left_out = (dictionary.pad(), dictionary.eos())  # as in fairseq's alignments
        return " ".join(
            next(unknown, dictionary[token]) if token == unk else dictionary[token]
            for token in tokens.tolist()
            if token not in left_out
        )

    def _hypothesis(self, found: Any, copied: str) -> Hypothesis:
        """``found``: a hypothesis of a generator. ``copied``: the words that replace <unk>."""
        from fairseq import utils
        from fairseq.data import data_utils

        # Not by utils.post_process_prediction: that adds the joined words to the dictionary, and
        # the next search would take them for symbols of the model.
        dictionary, alignment = self._loaded.task.target_dictionary, found["alignment"]
        tokens = found["tokens"].cpu()
        words = dictionary.string(tokens, extra_symbols_to_ignore=self._strip)
        if self._aligned is not None:
            unknown = dictionary.unk_string()
            words = utils.replace_unk(words, copied, alignment, self._aligned, unknown)
        words = data_utils.post_process(words, self._joiner)
        return Hypothesis(
            self._loaded.decode(words),
            float(found["score"] / math.log(2)),
            words,
            tuple(dictionary[token] for token in tokens.tolist()),
            tuple(tokens.tolist()),
            tuple((found["positional_scores"] / math.log(2)).tolist()),
            tuple((int(a), int(b)) for a, b in alignment) if self._has_alignment else None,
        )
