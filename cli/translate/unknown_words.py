"""Counts the tokens of sources that are not in the dictionary.

The lines of a generation do not say how many tokens a source has: with --remove-bpe or a tokenizer
their words are joined from several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightseq_fairseq.fairseq_compat import patching

if TYPE_CHECKING:
    from torch import Tensor


# For commands whose input is text.
SUBWORDS = " For subwords of subword-nmt, add --bpe subword_nmt --bpe-codes FILE --remove-bpe."


class UnknownWords:
    """The numbers of all tokens that were counted, and of those that were unknown."""

    def __init__(self) -> None:
        self.tokens = self.unknown = 0

    def count(self, tokens: Tensor, dictionary: Any) -> None:
        """Counts the tokens of sentences, without pad, ``<s>`` and ``</s>``.

        tokens: int64, of any shape.
        dictionary: fairseq's, of the sources; None: they are no text.
        """
        if dictionary is None:
            return
        marks = tokens.new_tensor([dictionary.pad(), dictionary.bos(), dictionary.eos()])
        words = tokens[(tokens[..., None] != marks).all(-1)]
        self.tokens += words.numel()
        self.unknown += int((words == dictionary.unk()).sum())

    def add(self, other: UnknownWords) -> None:
        self.tokens += other.tokens
        self.unknown += other.unknown

    def sentence(self) -> str | None:
        """A note for the user, or None if there were no unknown words to report."""
        if not self.unknown:
            return None
        are, were = ("is", "was") if self.unknown == 1 else ("are", "were")
        usual = "a few rare ones are usual. If there are many, prepare"
        return (
            f"{self.unknown} of the {self.tokens} source tokens {are} not in the dictionary and "
            f"{were} read as <unk>: {'prepare' if 2 * self.unknown > self.tokens else usual} "
            f"the text as the training data were prepared."
        )


@contextmanager
def counted(unknown: UnknownWords) -> Iterator[None]:
    """Within the block, ``unknown`` counts the sources that fairseq's commands translate."""

    def build_generator(original: Callable[..., Any], task: Any, *args: Any, **options: Any) -> Any:
        generator = original(task, *args, **options)
        generate = generator.generate

        def counting(models: Any, sample: Any, **more: Any) -> Any:
            unknown.count(sample["net_input"]["src_tokens"], task.source_dictionary)
            return generate(models, sample, **more)

        generator.generate = counting
        return generator

    with patching.within(
        "fairseq.tasks:FairseqTask.build_generator", build_generator, by="cli.translate.unknown"
    ):
        yield
