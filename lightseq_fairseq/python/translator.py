"""Translation from Python: `Translator` loads a checkpoint and translates sentences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.sentences import seed
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.generation.texts import Hypothesis, Translation
from lightseq_fairseq.python.pretrained import Kind, Pretrained


class Translator(Pretrained):
    """A trained translation model that translates text; `from_pretrained` makes one.

    It may be used for any number of calls, by one thread at a time.

    Attributes:
        configuration: fairseq's; lightseq-interactive has the same with the same options.
    """

    kind = Kind(
        tasks=(
            *("translation", "translation_multi_simple_epoch"),
            "translation_from_pretrained_bart",
        ),
        call="translate",
        inputs="sentences",
        advice="use the checkpoint of a translation model, or load a language model by "
        "LanguageModel. If this model translates, pass task and its options",
        settings=("source_lang", "target_lang"),
        batch={"max_tokens": 12000},  # the default of fairseq-generate
    )

    @overload
    def translate(self, sentences: str, **options: Any) -> Translation: ...

    @overload
    def translate(self, sentences: Iterable[str], **options: Any) -> list[Translation]: ...

    def translate(
        self, sentences: str | Iterable[str], **options: Any
    ) -> Translation | list[Translation]:
        """Translate one sentence, or many in batches.

        Prepare the sentences like the training data. If these were tokenized and split into
        subwords, do the same, or let ``tokenizer`` and ``bpe`` of `from_pretrained` do it.

        Args:
            sentences: one text, or several. Texts of similar length share a batch.
            options: replace those of `from_pretrained` in this call. All flags of fairseq's search
                are options: ``beam`` (default 5), ``nbest`` (1), ``lenpen`` (1.0), ``min_len``,
                ``max_len_a``, ``max_len_b``, ``no_repeat_ngram_size``, ``sampling`` and others (see
                docs/flags.md). So are ``remove_bpe``, the limits of a batch, ``max_tokens`` (12000)
                and ``batch_size``, and ``seed``: calls with the same seed draw the same samples.
                ``early_stopping`` is True, False or "never" for the beam search of transformers
                with this value, see docs/translate-and-evaluate.md.

        Returns:
            A `Translation` for one text; for several, a list of them in the same order; of an empty
            list, an empty one.

        Raises:
            UserError: a sentence is empty or too long for the model, or an option
                cannot be used. The message is one sentence.
        """
        from lightseq_fairseq.fairseq_compat import deprecations

        lines = _lines([sentences] if isinstance(sentences, str) else sentences)
        configuration, search = self._search(options)
        if not lines:
            return []
        unknown = UnknownWords()
        with self._explained(), deprecations.silenced():
            if "seed" in options:
                seed(configuration)
            found = search.translate(lines, unknown)
        self._warn(unknown)
        return found[0] if isinstance(sentences, str) else found


def _lines(sentences: Any) -> list[str]:
    """The sentences as a list; raises UserError if one is empty or not text."""
    lines = list(sentences) if isinstance(sentences, Iterable) else [sentences]
    for number, line in enumerate(lines):
        if not isinstance(line, str):
            raise UserError(
                f"Sentence {number} (counted from 0) is of type {type(line).__name__}: pass text."
            )
        if not line.strip():
            raise UserError(f"Sentence {number} (counted from 0) is empty: remove it.")
    return lines


__all__ = ["Hypothesis", "Translation", "Translator"]
