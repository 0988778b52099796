"""Unknown words and tokenizers of sacrebleu's scores: repairs of fairseq, and their functions for
``cli.score``. Neither fairseq nor sacrebleu is imported before a score is computed.

A tokenizer splits ``<unk>``, and the ``<<unk>>`` of fairseq's references, into tokens that match
each other. So both are first replaced by a character, which differs between the two sides: an
unknown word counts as one word, and is never right.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.fairseq_compat import patching

logger = logging.getLogger(__name__)

# Unicode has assigned neither, so no text has them. In sacrebleu's "zh" they are Chinese: a token
# each. In its other tokenizers they are parts of words, as an unknown subword is.
IN_TRANSLATION, IN_REFERENCE = "\u2fde", "\u2fdf"
# The last two are those of fairseq's --eval-bleu.
_UNKNOWN = re.compile("<<unk>>|<unk>|UNKNOWNTOKENINREF|UNKNOWNTOKENINHYP")

# sacrebleu knows zh, ja and ko; other names of these languages, up to the first "_" or "-".
_LANGUAGES = {"zho": "zh", "cmn": "zh", "jpn": "ja", "kor": "ko"}


def marked(text: str, mark: str) -> str:
    """``text`` with its unknown words replaced by `IN_TRANSLATION` or `IN_REFERENCE`."""
    return _UNKNOWN.sub(mark, text)


def add_string(original: Callable[..., None], self: Any, ref: str, pred: str) -> None:
    original(self, marked(ref, IN_REFERENCE), marked(pred, IN_TRANSLATION))


def tokenizer_of(language: str | None) -> str:
    """The name of the tokenizer that sacrebleu uses for a target language such as zh or zh_CN."""
    from sacrebleu.metrics import BLEU

    code = re.split("[-_]", (language or "").lower())[0]
    return str(BLEU._TOKENIZER_MAP.get(_LANGUAGES.get(code, code), BLEU.TOKENIZER_DEFAULT))


def metric(tokenizer: str, lowercase: bool = False, characters: bool = False) -> Any:
    """A ``sacrebleu.metrics.BLEU``.

    Args:
        characters: split the tokens into characters, as fairseq's --sacrebleu-char-level does.

    Raises:
        UserError: the tokenizer needs a package that is missing, or a file that sacrebleu cannot
            download.
    """
    from sacrebleu.metrics import BLEU

    try:
        found = BLEU(lowercase=lowercase, tokenize=tokenizer)
    except (RuntimeError, ImportError, OSError) as error:
        extra = tokenizer.removesuffix("-mecab")
        reason = " ".join(str(error).split())
        if extra != tokenizer:
            reason = f'pip install "sacrebleu[{extra}]"'
        raise UserError(
            f"sacrebleu's tokenizer {tokenizer} is not installed ({reason}): install it, or choose "
            "another one, such as char."
        ) from error
    if characters:
        from fairseq.scoring.tokenizer import EvaluationTokenizer

        splits = EvaluationTokenizer(tokenizer, lowercase, character_tokenization=True)
        found.tokenizer = splits.tokenize
        found.tokenizer_signature += "-char"
    elif hasattr(found.tokenizer, "sp"):
        # SentencePiece makes the beginning of an unknown word a token of its own, which matches.
        pieces, beginning = found.tokenizer, f"\u2581 (?=[{IN_TRANSLATION}{IN_REFERENCE}])"
        found.tokenizer = lambda text: re.sub(beginning, "", pieces(text))
    return found


@functools.lru_cache
def usable_tokenizer(language: str | None) -> str:
    """`tokenizer_of` a language; if it is not installed, "char", and the log says so once."""
    tokenizer = tokenizer_of(language)
    try:
        metric(tokenizer)
    except UserError:
        logger.warning(
            'BLEU counts characters (tok:char), because sacrebleu has no tokenizer for "%s": for '
            'words, run pip install "sacrebleu[%s]"', language, tokenizer.partition("-")[0],
        )  # fmt: skip
        return "char"
    return tokenizer


def _inference_with_bleu(
    original: Callable[..., Any], self: Any, generator: Any, *args: Any
) -> Any:
    # fairseq does not tell sacrebleu the language: 13a takes a Chinese sentence for one word.
    tokenizer = usable_tokenizer(self.cfg.target_lang)
    # It leaves out </s>, but in mBART's task a sentence ends with the token of its language, whose
    # three parts always match.
    eos = generator.eos
    end = "" if eos == self.tgt_dict.eos() else self.tgt_dict[eos]

    def corpus_bleu(
        score: Callable[..., Any], translations: Any, references: Any, tokenize: str = tokenizer
    ) -> Any:
        translations = [marked(text.removesuffix(end), IN_TRANSLATION) for text in translations]
        references = [
            [marked(text.removesuffix(end), IN_REFERENCE) for text in side] for side in references
        ]
        return score(translations, references, tokenize=tokenize)

    with patching.within("sacrebleu:corpus_bleu", corpus_bleu):
        return original(self, generator, *args)
