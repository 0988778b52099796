"""fairseq's interface of a RoBERTa, which says in a sentence what it cannot use.

It is imported when a checkpoint is loaded.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from fairseq import utils
from fairseq.models.roberta.hub_interface import RobertaHubInterface

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords

_MASK = "<mask>"
_WITHOUT = (
    "This model was loaded without subwords, so it takes only numbers of tokens: in "
    "from_pretrained(), use data of lightseq-preprocess --sentencepiece or --hf-tokenizer without "
    'bpe, or pass bpe="tokenizer_folder" with tokenizer_folder, bpe="sentencepiece" with '
    'sentencepiece_model, bpe="subword_nmt" with bpe_codes, or bpe="gpt2".'
)


class RobertaInterface(RobertaHubInterface):
    """A trained RoBERTa: fills in masks, classifies, extracts features.

    Token ids are a tensor, an array or a list of whole numbers.

    Attributes:
        has_marks: whether the tokens that begin a word contain the space before it.
    """

    has_marks = True

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
        self._warn(ids)
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
        self._warn(ids)
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

    def _warn(self, ids: torch.Tensor) -> None:
        """Warn the caller's caller of words that the dictionary lacks, as `Translator` does."""
        unknown = UnknownWords()
        unknown.count(ids, self.task.source_dictionary)
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
