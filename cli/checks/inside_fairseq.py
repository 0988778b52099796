"""Checks inside fairseq, at the first place where sentence lengths or the loaded model are known.

fairseq itself fails there with an unclear message, or does not fail at all. When it makes batches,
we check the sentence lengths; when it loads a model, its type; when it reads a split, that the
files are complete and the tokens are in the dictionary. `fairseq_compat.patching` installs these
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import binarised


def batch_by_size(
    original: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """If a sentence exceeds --max-tokens, raises ValueError with its length.

    `failures.data` has the sentence for the user.
    """
    try:
        return original(indices, num_tokens_fn, num_tokens_vec, max_tokens, *args, **kwargs)
    except AssertionError as error:
        if "should not exceed max_tokens" not in str(error):
            raise
        lengths = map(num_tokens_fn, indices) if num_tokens_vec is None else num_tokens_vec
        longest = max(lengths)
        raise ValueError(f"Too long for a batch: {longest} tokens, not {max_tokens}") from error


def some_to_batch(
    original: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Raises ValueError if there is no sentence: fairseq would train on nothing or divide by zero.

    `failures.data` has the sentence for the user.

    Not used in ``lightseq-interactive``, which reads a few lines at a time.
    """
    if len(indices) == 0:
        dataset = getattr(num_tokens_fn, "__self__", ())
        shortest = min(map(num_tokens_fn, range(len(dataset))), default=0)
        raise ValueError(f"No batch: {len(dataset)} sentences, the shortest of {shortest} tokens")
    return original(indices, num_tokens_fn, *args, **kwargs)


def load_model_ensemble(
    original: Callable[..., Any],
    filenames: Any,
    arg_overrides: Any = None,
    task: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Raises UserError for a model that is no translation model, such as a language model.

    fairseq would run it, and print nonsense.
    """
    from fairseq.models import FairseqEncoderDecoderModel
    from fairseq.models.nat import FairseqNATModel
    from fairseq.tasks.translation import TranslationTask

    models, cfg = original(filenames, arg_overrides, task, *args, **kwargs)
    for model, name in zip(models, filenames):
        if type(task) is TranslationTask and (
            not isinstance(model, FairseqEncoderDecoderModel) or isinstance(model, FairseqNATModel)
        ):
            raise UserError(
                f"--task translation cannot use {name}, which contains no translation model but "
                f"{type(model).__name__}: choose another checkpoint, or set --task to the task "
                "that this model was trained with."
            )
    return models, cfg


def load_checkpoint(original: Callable[..., Any], cfg: Any, trainer: Any, **kwargs: Any) -> Any:
    """fairseq's ``load_checkpoint``, which begins a run; then makes the batches of validation.

    Otherwise a sentence that is too long would end the run at the first validation, before its
    first checkpoint. fairseq keeps the batches, so validation does not make them again.

    Raises:
        UserError: a sentence exceeds --max-tokens-valid, or a split has no sentence.
        Exception: fairseq's, if a sentence exceeds the model's positions.
    """
    import torch

    loaded = original(cfg, trainer, **kwargs)
    data, dummy = trainer.cfg.dataset, trainer._dummy_batch
    if not data.disable_validation:
        with torch.random.fork_rng(devices=[]):  # the first batch of some data sets draws from it
            for subset in data.valid_subset.split(","):
                trainer.get_valid_iterator(subset)
        trainer.reset_dummy_batch(dummy)  # a batch of training, as without this function
    return loaded


def eval_lm_dataloader(
    original: Callable[..., Any], self: Any, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Raises UserError if blocks have more tokens than the model has positions: fairseq would leave
    them out, and measure what remains, such as the end of the text."""
    block, positions = self.args.tokens_per_sample, kwargs.get("max_positions")
    if positions is not None and self.args.sample_break_mode != "eos" and block > positions:
        raise UserError(
            f"A block has {block} tokens (--tokens-per-sample minus --context-window), but the "
            f"model has only {positions} positions: set --tokens-per-sample {positions}."
        )
    return original(self, dataset, *args, **kwargs)


def make_dataset(
    original: Callable[..., Any],
    path: str,
    impl: str,
    fix_lua_indexing: bool = False,
    dictionary: Any = None,
) -> Any:
    """Raises UserError on a token that is not in the dictionary.

    Without this check it would fail in a device-side assertion on the GPU.
    """
    sentences = binarised.find(path, impl)
    dataset = original(path, impl, fix_lua_indexing, dictionary)
    if sentences is not None and dictionary is not None:
        # fairseq has just read the whole file, so it is in the page cache: check all tokens.
        binarised.check_words(sentences, len(dictionary), everywhere=True)
    return dataset
