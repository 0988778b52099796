"""Lines of text files: they end at a line feed only, as for ``wc -l`` and sacrebleu.

fairseq opens files with Python's universal newlines, so a carriage return ends a line, too. One
that is left within a line, which is common in text from the web, then shifts all pairs of sentences
behind it. Here it is a space: fairseq's tokenizer splits at all white space.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lightseq_fairseq.base import utf8


def find_offsets(filename: str, num_chunks: int) -> list[int]:
    """The offsets that divide a file into ``num_chunks`` parts of whole lines."""
    size = os.path.getsize(filename)
    offsets = [0]
    with open(filename, "rb") as file:
        for part in range(1, num_chunks):
            file.seek(size // num_chunks * part)
            file.readline()
            offsets.append(file.tell())
    return [*offsets, size]


def enter(original: Callable[..., Any], self: Any) -> Any:
    lines = original(self)
    self.fd.reconfigure(newline="\n")
    return lines


def read_data(self: Any, path: str, dictionary: Any) -> None:
    import numpy as np  # here, because --help of commands that import this module is fast

    with open(path, "rb") as file:
        found = utf8.lines(file, path)
        self.lines = [line.removesuffix("\n").removesuffix("\r") for line in found]
    self.tokens_list = [
        dictionary.encode_line(
            line, add_if_not_exist=False, append_eos=self.append_eos,
            reverse_order=self.reverse_order,
        ).long()
        for line in self.lines
    ]  # fmt: skip
    self.sizes = np.array([len(tokens) for tokens in self.tokens_list])


def buffered_read(path: str, buffer_size: int) -> Iterator[list[str]]:
    """``buffer_size`` lines at a time of a file, or of standard input if ``path`` is "-"."""
    with contextlib.ExitStack() as opened:
        file, name = sys.stdin.buffer, utf8.STANDARD_INPUT
        if path != "-":
            file, name = opened.enter_context(open(path, "rb")), path
        buffer: list[str] = []
        for line in utf8.lines(file, name):
            buffer.append(line.strip())
            if len(buffer) >= buffer_size:
                yield buffer
                buffer = []
        if buffer:
            yield buffer
