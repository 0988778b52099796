"""fairseq's interface of a RoBERTa, which says in a sentence what it cannot use.

It is imported when a checkpoint is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, overload

import torch
from fairseq import utils
from fairseq.data import encoders
from fairseq.models.roberta.hub_interface import RobertaHubInterface

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.classes import Classifier
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.generation.texts import Predicted
from lightseq_fairseq.python.pretrained import in_python

_MASK = "<mask>"
_WITHOUT = (
    "This model was loaded without subwords, so it takes only numbers of tokens: in "
    "from_pretrained(), use data of lightseq-preprocess --sentencepiece or --hf-tokenizer without "
    'bpe, or pass bpe="tokenizer_folder" with tokenizer_folder, bpe="sentencepiece" with '
    'sentencepiece_model, bpe="subword_nmt" with bpe_codes, or bpe="gpt2".'
)


class _Tokenized:
    """Subwords of the words that a tokenizer makes; bpe None: these words are the dictionary's."""

    def __init__(self, tokenizer: Any, bpe: Any) -> None:
        self._tokenizer, self._bpe = tokenizer, bpe

    def encode(self, text: str) -> str:
        words: str = self._tokenizer.encode(text)
        return words if self._bpe is None else self._bpe.encode(words)

    def decode(self, text: str) -> str:
        words = text if self._bpe is None else self._bpe.decode(text)
        decoded: str = self._tokenizer.decode(words)
        return decoded


class RobertaInterface(RobertaHubInterface):
    """A trained RoBERTa: fills in masks, classifies, extracts features.

    Token ids are a tensor, an array or a list of whole numbers.

    Attributes:
        has_marks: whether the tokens that begin a word contain the space before it.
    """

    has_marks = True
    bpe: Any

    def __init__(self, cfg: Any, task: Any, model: Any) -> None:
        super().__init__(cfg, task, model)
        if (tokenizer := encoders.build_tokenizer(cfg.tokenizer)) is not None:
            self.bpe = _Tokenized(tokenizer, self.bpe)

    def __repr__(self) -> str:
        heads = list(self.model.classification_heads)
        return f"RobertaModel({type(self.model).__name__}, heads={heads}, device={self.device})"

    def encode(self, sentence: str, *addl_sentences: str, no_separator: bool = False) -> Any:
        """The token ids of a text, or of two texts as one pair.

        Words that are not in the dictionary are a warning.
        """
        for text in (sentence, *addl_sentences):
            if not isinstance(text, str):
                raise UserError(
                    f"encode() takes a text, or the two texts of a pair, not a "
                    f"{type(text).__name__}: call it once for each text."
                )
        self._need_subwords()
        ids = super().encode(sentence, *addl_sentences, no_separator=no_separator)
        self._warn(self._unknown(ids))
        return ids

    def decode(self, tokens: Any) -> Any:
        """The text, or the texts, of token ids."""
        self._need_subwords()
        return super().decode(self._ids(tokens).cpu())

    def extract_features(self, tokens: Any, return_all_hiddens: bool = False) -> Any:
        """The features [B, L, C] of token ids [B, L] or [L]."""
        return super().extract_features(self._ids(tokens), return_all_hiddens)

    def predict(self, head: str, tokens: Any, return_logits: bool = False) -> Any:
        """The log-probabilities of the classes [B, classes] by a classification head."""
        heads = self.model.classification_heads
        if head not in heads:
            names = f"use {', '.join(heads)}" if heads else "fine-tune it, or register one"
            raise UserError(f"This model has no classification head named {head}: {names}.")
        return super().predict(head, self._ids(tokens), return_logits)

    @overload
    def classify(self, sentences: str | tuple[str, str], batch_size: int = 32) -> Predicted: ...

    @overload
    def classify(
        self, sentences: list[str] | list[tuple[str, str]], batch_size: int = 32
    ) -> list[Predicted]: ...

    def classify(self, sentences: Any, batch_size: int = 32) -> Predicted | list[Predicted]:
        """The label of a text, or of several in batches, by a model of sentence_prediction.

        A text is read as a line of the training data: by the model's subwords or, without them, as
        words of the dictionary with spaces between them. Words that are not in the dictionary are
        a warning. The model computes without dropout, and keeps its mode.

        Args:
            sentences: a text, or a list of texts. If the model was trained on pairs, a tuple of
                two texts, or a list of such tuples.
            batch_size: texts that are computed together.

        Returns:
            A `Prediction` (label, probability) for one text, for a list a list in the same order;
            for an empty list an empty one. With --regression-target, a float takes the place of
            each, or a tuple of --num-classes floats.

        Raises:
            UserError: the model is no classifier, or a text is empty or too long.
        """
        if not families.classifies(self.task.cfg._name):
            raise UserError(
                "This model has no labels: classify() needs one of the task sentence_prediction."
            )
        is_one = isinstance(sentences, (str, tuple))
        classifier = self.classifier()
        texts = _texts([sentences] if is_one else sentences, classifier.inputs)
        if not texts:
            return []
        unknown = UnknownWords()
        try:
            found = classifier.classify(dict(enumerate(texts)), unknown, batch_size=batch_size)
        except UserError as error:
            raise UserError(in_python(str(error), "RobertaModel")) from None
        self._warn(unknown)
        return found[0] if is_one else found

    def classifier(self) -> Classifier:
        """Of a model of sentence_prediction."""
        return Classifier(
            self.task,
            [self.model],
            lambda text: text if self.bpe is None else self.bpe.encode(text),
        )

    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """The ``topk`` best (text, probability, word) for the one ``<mask>`` in a text."""
        self._need_subwords()
        if not isinstance(masked_input, str) or masked_input.count(_MASK) != 1:
            raise UserError(f"fill_mask() takes a text with one {_MASK}: A man is {_MASK}.")
        if not hasattr(self.task, "mask_idx"):
            raise UserError("This is a classifier: fill_mask() needs a model of masked_lm.")
        dictionary = self.task.source_dictionary
        parts = [self.bpe.encode(part.rstrip()) for part in masked_input.split(_MASK)]
        words = f"<s> {f' {_MASK} '.join(parts).strip()} </s>"
        ids = dictionary.encode_line(words, append_eos=False, add_if_not_exist=False).long()
        self._warn(self._unknown(ids))
        with utils.model_eval(self.model), torch.no_grad():
            logits = self.model(ids[None].to(self.device))[0]
        found = logits[0, (ids == self.task.mask_idx).to(logits.device)][0].softmax(0)
        # fairseq also drops these marks from its results, but not their probabilities.
        found[[dictionary.bos(), dictionary.eos()]] = -1
        results = []
        for probability, number in zip(*found.topk(min(topk, len(found) - 2))):
            symbol = dictionary[number]
            word = self.bpe.decode(symbol)
            word = f" {word}" if symbol.startswith("\u2581") else word
            place = f" {_MASK}" if self.has_marks and f" {_MASK}" in masked_input else _MASK
            results.append((masked_input.replace(place, word), probability.item(), word))
        return results

    def _unknown(self, ids: torch.Tensor) -> UnknownWords:
        unknown = UnknownWords()
        unknown.count(ids, self.task.source_dictionary)
        return unknown

    @staticmethod
    def _warn(unknown: UnknownWords) -> None:
        """Warn the caller's caller of words that the dictionary lacks, as `Translator` does."""
        if (sentence := unknown.sentence()) is not None:
            warnings.warn(sentence, stacklevel=3)

    def _need_subwords(self) -> None:
        if self.bpe is None:
            raise UserError(_WITHOUT)

    def _ids(self, tokens: Any) -> torch.Tensor:
        """Token ids as a tensor; raises UserError for anything else."""
        try:
            ids = torch.as_tensor(tokens)
        except (TypeError, ValueError, RuntimeError):
            ids = None
        if ids is None or ids.is_floating_point() or ids.numel() == 0 or ids.dim() > 2:
            raise UserError(
                "These are not numbers of tokens: pass those of encode(), or a tensor [B, L] with "
                "pads."
            )
        words = len(self.task.source_dictionary)
        if ids.device.type == "cpu" and not 0 <= ids.min() <= ids.max() < words:
            raise UserError(f"The numbers of tokens must be from 0 to {words - 1}.")
        return ids.long()


def _texts(sentences: Any, inputs: int | None) -> list[tuple[str, ...]]:
    """Each sentence as the tuple of its texts.

    Raises:
        UserError: one is no text, or has not as many texts as the model reads.
    """
    found = []
    for number, each in enumerate(sentences if isinstance(sentences, Iterable) else [sentences]):
        texts = each if isinstance(each, (tuple, list)) else (each,)
        place = f"Sentence {number} (counted from 0)"
        if others := [text for text in texts if not isinstance(text, str)]:
            raise UserError(f"{place} is of type {type(others[0]).__name__}: pass text.")
        if len(texts) != inputs if inputs else len(texts) not in (1, 2):
            wanted = {1: "one: pass texts, not tuples", 2: "pairs: pass tuples of two texts"}
            raise UserError(
                f"{place} has {len(texts)} text{'s' * (len(texts) != 1)}, but the model reads "
                f"{wanted.get(inputs or 0, 'one or two')}."
            )
        found.append((*texts,))
    return found
