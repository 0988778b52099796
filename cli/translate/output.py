"""Output of a generation: writes its lines to the terminal or a file, and computes the score.

fairseq prints each sentence as lines with a kind and a number (``H-12<tab>...``), its log between
them, and a score at the end. The sentences are passed on unchanged. The score is replaced by
sacrebleu's, whose signature says how it was computed; fairseq's own score has no such information
and counts tokens of the dictionary.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any, TextIO

from lightseq_fairseq.cli import score
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords

_SENTENCE = re.compile(r"([A-Z])-\d+(?:_\d+)?\t")


class Lines(io.TextIOBase):
    """A text stream that calls `line` with each line, without the line end."""

    _rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self.line(line)
        return len(text)

    def line(self, line: str) -> None:
        raise NotImplementedError


class GenerationOutput(Lines):
    """Replaces standard output while fairseq generates.

    Args:
        file: receives the sentences and the score; None: the terminal.
        quiet: do not write the sentences, only score them.
        asked_for_score: also pass on fairseq's own score.
    """

    def __init__(self, file: TextIO | None, quiet: bool, asked_for_score: bool) -> None:
        self.terminal = sys.stdout
        self.file, self.quiet = file, quiet
        self.asked_for_score = asked_for_score
        self.output = score.Output("the generation")
        self.unknown = UnknownWords()

    @staticmethod
    def is_sentence(line: str) -> bool:
        """Whether the line belongs to a sentence, not to the log."""
        return _SENTENCE.match(line) is not None

    def line(self, line: str) -> None:
        kind = _SENTENCE.match(line)
        if kind is None:
            if not line.startswith("Generate "):
                self.log(line)
            elif self.asked_for_score:
                self._say(line)
            return
        if kind[1] in self.output.sentences:
            self.output.add(line)
        if self.quiet:
            return
        if self.file:
            print(line, file=self.file)
        else:
            self.log(line)

    def log(self, line: str) -> None:
        """Writes a line to the terminal, even if the sentences are written to a file."""
        print(line, file=self.terminal)

    def flush(self) -> None:
        self.terminal.flush()

    def result(
        self, title: str, reference: str | None, lines: list[str] | None, metric: Any
    ) -> None:
        """Prints ``title`` with sacrebleu's score and signature, and what it was computed against.

        Args:
            reference: the name of the file of references.
            lines: its lines. Both are None to use the targets that fairseq has printed, which it
                decodes from the token ids of the binarised data.
            metric: a ``sacrebleu.metrics.BLEU``.

        Raises:
            UserError: the numbers of translations and references differ, or sentences are missing.
        """
        if lines is not None:
            translations, references = self.output.translations(tokens=False), lines
            said = f"references: {reference}"
        else:
            translations, references = self.output.rebuilt()
            said = "references: the binarised targets"
            if not references:
                return  # a test set without a target side
        result, signature = score.bleu(self.output.name, translations, [references], metric)
        self._say(f"{title}: {result.format(width=2, signature=signature)} ({said})")

    def _say(self, line: str) -> None:
        """Writes a score both to the sentences and to the log."""
        self.log(line)
        if self.file:
            print(line, file=self.file)
