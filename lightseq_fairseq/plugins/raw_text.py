"""``--bpe tokenizer_folder``: raw text by the tokenizer that a data folder contains."""

from dataclasses import dataclass, field
from pathlib import Path

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from omegaconf import MISSING

from lightseq_fairseq.base import tokenizer


@dataclass
class TokenizerFolderConfig(FairseqDataclass):
    """The flags of ``--bpe tokenizer_folder``."""

    tokenizer_folder: str = field(
        default=MISSING,
        metadata={"help": "folder with a tokenizer of Hugging Face or of sentencepiece"},
    )


@register_bpe("tokenizer_folder", dataclass=TokenizerFolderConfig)
class TokenizerFolder:
    """Splits sources by the source's tokenizer, and joins words by the target's.

    Raises:
        UserError: the folder has no tokenizer.
    """

    def __init__(self, cfg: TokenizerFolderConfig) -> None:
        folder = Path(cfg.tokenizer_folder)
        self._source, self._target = (tokenizer.of_folder(folder, side) for side in tokenizer.SIDES)

    def encode(self, x: str) -> str:
        """The words of a text, joined by spaces."""
        return self._source.encode(x)

    def source(self, x: str) -> str:
        """The words of a text as lightseq-preprocess writes them for a source of a pair."""
        return self._source.source(x)

    def decode(self, x: str) -> str:
        """The text of words that are joined by spaces."""
        return self._target.decode(x)

    def is_beginning_of_word(self, x: str) -> bool:
        """Whether a word begins a word of the text, for --mask-whole-words."""
        return x in ("<s>", "<pad>", "</s>", "<unk>") or x.startswith(("\u2581", "\u0120"))
