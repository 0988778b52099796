"""Lines of text files in UTF-8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lightseq_fairseq.base.errors import UserError

STANDARD_INPUT = "standard input"  # its name in messages


def lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a binary file, with their line ends; only a line feed ends a line.

    Args:
        name: the name of the file in messages.

    Raises:
        UserError: a line is not UTF-8.
    """
    # A file in text mode decodes blocks of many lines, so its errors cannot name the line.
    for number, line in enumerate(file, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{line[error.start]:02x}"
            raise UserError(failure(f"Line {number} of {name}", byte)) from error


def failure(text: str, reason: str) -> str:
    """The message for a text that is not UTF-8."""
    return f"{text} is not UTF-8 ({reason}): convert the text to UTF-8, for example with iconv."
