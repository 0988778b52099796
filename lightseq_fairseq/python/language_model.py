"""Text by language models from Python: `LanguageModel` loads a checkpoint and continues prompts."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.sentences import seed
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.generation.texts import Hypothesis
from lightseq_fairseq.python.pretrained import Kind, Pretrained

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | Sequence[int]


class LanguageModel(Pretrained):
    """A trained language model that continues prompts; `from_pretrained` makes one.

    It may be used for any number of calls, by one thread at a time.

    Attributes:
        configuration: fairseq's; lightseq-interactive has the same with the same options.
    """

    kind = Kind(
        tasks=("language_modeling",),
        call="generate",
        inputs="prompts",
        advice="use the checkpoint of a language model, or load a translation model by Translator",
        settings=("add_bos_token", "output_dictionary_size"),
        batch={"batch_size": 32},
    )

    def encode(self, text: str) -> list[int]:
        """The numbers (ids) of a text's tokens in the dictionary, by ``tokenizer`` and ``bpe``."""
        words = self._loaded.encode(text)
        tokens = self._loaded.task.source_dictionary.encode_line(
            words, add_if_not_exist=False, append_eos=False
        )
        return [int(token) for token in tokens]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids: what `encode` began with, with its subwords joined."""
        import torch

        words = self._loaded.task.source_dictionary.string(
            torch.tensor(self._checked(0, ids)), self.configuration.common_eval.post_process
        )
        return str(self._loaded.decode(words))

    @overload
    def generate(self, prompts: Prompt, **options: Any) -> list[Hypothesis]: ...

    @overload
    def generate(self, prompts: Iterable[Prompt], **options: Any) -> list[list[Hypothesis]]: ...

    def generate(
        self, prompts: Prompt | Iterable[Prompt], **options: Any
    ) -> list[Hypothesis] | list[list[Hypothesis]]:
        """Continue one prompt, or many in batches.

        As in fairseq, a result begins with its prompt, and so do its scores; lengths count the
        prompt, too. The prompts of a batch are adjacent in the given order.

        Args:
            prompts: a text, or the numbers of its tokens in the dictionary; or several of these.
                The first token of every text (eos, or bos with ``add_bos_token``) is added by this
                method. A prompt may be empty.
            options: replace those of `from_pretrained` in this call. All flags of fairseq's search
                are options: ``beam`` (default 5), ``nbest`` (1), ``max_len_a`` and ``max_len_b`` (0
                and 200: the length is at most max_len_a * length of the batch's longest prompt +
                max_len_b), ``min_len``, ``lenpen``, ``sampling``, ``sampling_topk``,
                ``sampling_topp``, ``temperature``, ``no_repeat_ngram_size`` and others (see
                docs/flags.md). So are the limits of a batch, ``max_tokens`` and ``batch_size``
                (32), and ``seed``: calls with the same seed draw the same samples.

        Returns:
            For one prompt its ``nbest`` hypotheses, the best first; for several a list of these, in
            the same order; for an empty list an empty one.

        Raises:
            UserError: a prompt is too long for the model or contains something other than numbers
                of tokens, or an option cannot be used.
        """
        import torch

        from lightseq_fairseq.fairseq_compat import deprecations

        is_one = isinstance(prompts, str) or _are_numbers(prompts)
        given: list[Any] = list(prompts) if isinstance(prompts, Iterable) else [prompts]
        if is_one:
            given = [prompts]
        numbers = [
            self.encode(prompt) if isinstance(prompt, str) else self._checked(number, prompt)
            for number, prompt in enumerate(given)
        ]
        configuration, search = self._search(options)
        if not numbers:
            return []
        with self._explained(), deprecations.silenced():
            if "seed" in options:
                seed(configuration)
            found = [list(each.hypotheses) for each in search.of_numbers(numbers)]
        unknown = UnknownWords()
        for tokens, prompt in zip(numbers, given):
            if isinstance(prompt, str):
                unknown.count(torch.tensor(tokens), self._loaded.task.source_dictionary)
        self._warn(unknown)
        return found[0] if is_one else found

    def _tokens(self, text: str) -> Tensor:
        import torch

        eos = self._loaded.task.source_dictionary.eos()
        return torch.tensor([*self.encode(text), eos])

    def _checked(self, number: int, prompt: Any) -> list[int]:
        """The numbers of a prompt's tokens; raises UserError if it contains anything else."""
        is_empty = hasattr(prompt, "__len__") and len(prompt) == 0
        if not is_empty and not _are_numbers(prompt):
            raise UserError(
                f"Prompt {number} (counted from 0) is not a text, and contains other things "
                "than whole numbers: pass the numbers of its tokens in the dictionary."
            )
        dictionary = self._loaded.task.source_dictionary
        tokens = [int(token) for token in prompt]
        for token in tokens:
            if not 0 <= token < len(dictionary) or token == dictionary.pad():
                raise UserError(
                    f"Prompt {number} (counted from 0) contains the number {token}, which is not a "
                    f"word of the dictionary: use 0 to {len(dictionary) - 1}, without "
                    f"{dictionary.pad()}, the pad."
                )
        return tokens


def _are_numbers(prompt: Any) -> bool:
    """Whether ``prompt`` is a list, a tensor or an array of at least one whole number."""
    try:
        return len(prompt) > 0 and all(_is_number(token) for token in prompt)
    except TypeError:
        return False


def _is_number(token: Any) -> bool:
    operator.index(token)
    return getattr(token, "ndim", 0) == 0  # a list of short tensors is several prompts


__all__ = ["Hypothesis", "LanguageModel"]
