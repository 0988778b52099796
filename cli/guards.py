"""Where fairseq fails without the facts, or not at all, and they are known only there.

Making batches: how long a sentence is. Loading a model: what it is. Reading a split: whether its
files are whole and its tokens in the dictionary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.cli import binarised, messages
from lightseq_fairseq.errors import UserError


def install(refuse_nothing: bool) -> None:
    """Puts the guards in place; a second call changes nothing."""
    _guard_batches(refuse_nothing)
    _guard_models()
    _guard_datasets()


def _guard_batches(refuse_nothing: bool) -> None:
    """Makes fairseq's ``batch_by_size`` say how long the sentences are that it cannot batch.

    Args:
        refuse_nothing: no sentence at all is refused, too. fairseq then trains on nothing or
            divides by zero; only ``interactive`` goes on, since it reads a few lines at a time.
    """
    from fairseq.data import data_utils

    original = data_utils.batch_by_size
    if getattr(original, "says_the_length", False):
        return

    @functools.wraps(original)
    def batch_by_size(
        indices: Any,
        num_tokens_fn: Callable[[int], int],
        num_tokens_vec: Any = None,
        max_tokens: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if refuse_nothing and len(indices) == 0:
            dataset = getattr(num_tokens_fn, "__self__", ())
            shortest = min(map(num_tokens_fn, range(len(dataset))), default=0)
            raise UserError(messages.nothing_to_batch(len(dataset), int(shortest)))
        try:
            return original(indices, num_tokens_fn, num_tokens_vec, max_tokens, *args, **kwargs)
        except AssertionError as error:
            if "should not exceed max_tokens" not in str(error):
                raise
            lengths = map(num_tokens_fn, indices) if num_tokens_vec is None else num_tokens_vec
            raise UserError(messages.over_max_tokens(int(max(lengths)), max_tokens)) from error

    batch_by_size.says_the_length = True  # type: ignore[attr-defined]
    data_utils.batch_by_size = batch_by_size


def _guard_models() -> None:
    """A language model, say, would translate as well, into nonsense."""
    from fairseq import checkpoint_utils
    from fairseq.models import FairseqEncoderDecoderModel
    from fairseq.models.nat import FairseqNATModel
    from fairseq.tasks.translation import TranslationTask

    original = checkpoint_utils.load_model_ensemble
    if getattr(original, "looks_at_the_model", False):
        return

    @functools.wraps(original)
    def load_model_ensemble(
        filenames: Any, arg_overrides: Any = None, task: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        models, cfg = original(filenames, arg_overrides, task, *args, **kwargs)
        for model, name in zip(models, filenames):
            if type(task) is TranslationTask and (
                not isinstance(model, FairseqEncoderDecoderModel)
                or isinstance(model, FairseqNATModel)
            ):
                raise UserError(
                    f"{name} holds a {type(model).__name__}, which --task translation does not "
                    "translate with: name the checkpoint of a translation model, or the --task it "
                    "was trained with."
                )
        return models, cfg

    load_model_ensemble.looks_at_the_model = True  # type: ignore[attr-defined]
    checkpoint_utils.load_model_ensemble = load_model_ensemble


def _guard_datasets() -> None:
    """A token that the dictionary does not know ends in an assertion on the GPU."""
    from fairseq.data import indexed_dataset

    original = indexed_dataset.make_dataset
    if getattr(original, "looks_at_the_tokens", False):
        return

    @functools.wraps(original)
    def make_dataset(
        path: str, impl: str, fix_lua_indexing: bool = False, dictionary: Any = None
    ) -> Any:
        sentences = binarised.find(path, impl)
        dataset = original(path, impl, fix_lua_indexing, dictionary)
        if sentences is not None and dictionary is not None:
            # fairseq has just read the whole file, so that it is in memory.
            binarised.check_words(sentences, len(dictionary), everywhere=True)
        return dataset

    make_dataset.looks_at_the_tokens = True  # type: ignore[attr-defined]
    indexed_dataset.make_dataset = make_dataset
