"""Where fairseq fails without the facts, and they are known only there: making batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.cli import messages
from lightseq_fairseq.errors import UserError


def install(refuse_nothing: bool) -> None:
    """Makes fairseq's ``batch_by_size`` say how long the sentences are that it cannot batch.

    Behaves as before otherwise; a second call changes nothing.

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
