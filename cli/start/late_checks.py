"""Where fairseq fails without the facts, or not at all, and they are known only there.

Making batches: how long a sentence is. Loading a model: what it is. Reading a split: whether its
files are whole and its tokens in the dictionary. `fairseq_compat.patching` puts them in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightseq_fairseq.cli.refusals import messages
from lightseq_fairseq.cli.start import binarised
from lightseq_fairseq.errors import UserError


def batch_by_size(
    original: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Says how long the sentences are that cannot be batched."""
    try:
        return original(indices, num_tokens_fn, num_tokens_vec, max_tokens, *args, **kwargs)
    except AssertionError as error:
        if "should not exceed max_tokens" not in str(error):
            raise
        lengths = map(num_tokens_fn, indices) if num_tokens_vec is None else num_tokens_vec
        raise UserError(messages.over_max_tokens(int(max(lengths)), max_tokens)) from error


def some_to_batch(
    original: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Refuses no sentence at all, with which fairseq trains on nothing or divides by zero.

    Only ``interactive`` goes on, since it reads a few lines at a time.
    """
    if len(indices) == 0:
        dataset = getattr(num_tokens_fn, "__self__", ())
        shortest = min(map(num_tokens_fn, range(len(dataset))), default=0)
        raise UserError(messages.nothing_to_batch(len(dataset), int(shortest)))
    return original(indices, num_tokens_fn, *args, **kwargs)


def load_model_ensemble(
    original: Callable[..., Any],
    filenames: Any,
    arg_overrides: Any = None,
    task: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Refuses a language model, say, which would translate as well, into nonsense."""
    from fairseq.models import FairseqEncoderDecoderModel
    from fairseq.models.nat import FairseqNATModel
    from fairseq.tasks.translation import TranslationTask

    models, cfg = original(filenames, arg_overrides, task, *args, **kwargs)
    for model, name in zip(models, filenames):
        if type(task) is TranslationTask and (
            not isinstance(model, FairseqEncoderDecoderModel) or isinstance(model, FairseqNATModel)
        ):
            raise UserError(
                f"{name} holds a {type(model).__name__}, which --task translation does not "
                "translate with: name the checkpoint of a translation model, or the --task it "
                "was trained with."
            )
    return models, cfg


def make_dataset(
    original: Callable[..., Any],
    path: str,
    impl: str,
    fix_lua_indexing: bool = False,
    dictionary: Any = None,
) -> Any:
    """Refuses a token that the dictionary does not know, an assertion on the GPU otherwise."""
    sentences = binarised.find(path, impl)
    dataset = original(path, impl, fix_lua_indexing, dictionary)
    if sentences is not None and dictionary is not None:
        # fairseq has just read the whole file, so that it is in memory.
        binarised.check_words(sentences, len(dictionary), everywhere=True)
    return dataset
