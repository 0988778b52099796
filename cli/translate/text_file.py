"""Translation of text files of millions of lines: ``lightseq-generate --input``.

Each rank translates every n-th block of lines, and adds it to a file of its own. So memory does not
grow, and the same command resumes after a kill: blocks that are complete stay. The rank that ends
last joins the blocks in the order of the input.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lightseq_fairseq.base import files, utf8
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.fairseq_compat.lines import buffered_read

BLOCK = 1 << 13  # lines, one or two seconds of a GPU
_MAX_TOKENS = 12_000  # of a batch, as in fairseq-generate


class _Rank(NamedTuple):
    """A process of those that torchrun started."""

    number: int
    ranks: int
    device: int

    @classmethod
    def of_environment(cls) -> _Rank:
        number, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        return cls(int(number), int(ranks), int(os.environ.get("LOCAL_RANK", "0")))


class _Unfinished:
    """The folder beside the result that has the blocks which are translated.

    Args:
        target: the file of the result.
        about: what the command was given; blocks of another command are refused.
        ranks: their number. block: lines of a block. lines: those of the input.
    """

    def __init__(self, target: Path, about: Any, ranks: int, block: int, lines: int) -> None:
        self._target, self._folder = target, Path(f"{target}.unfinished")
        self._ranks, self._block, self._lines = ranks, block, lines
        self._about = json.dumps(about, indent=1) + "\n"
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{self._folder} cannot be made: {error.strerror}.") from error

    def lines_of(self, rank: int) -> int:
        """Lines of the input that a rank translates."""
        blocks = range(rank * self._block, self._lines, self._ranks * self._block)
        return sum(min(self._block, self._lines - first) for first in blocks)

    def _part(self, rank: int) -> Path:
        return self._folder / f"{rank}-of-{self._ranks}"

    def _claim(self) -> None:
        """Note the command in the folder; raises UserError if the blocks in it are of another."""
        command = self._folder / "command.json"
        has_blocks = any(part.stat().st_size for part in self._folder.glob("*-of-*"))
        if not has_blocks or not command.exists():
            with files.atomic_writer(command) as file:
                file.write(self._about.encode())
        elif command.read_text(encoding="utf-8") != self._about:
            raise UserError(
                f"{self._folder} has the unfinished translation of another command (see "
                f"{command}): resume it with that command, or remove the folder."
            )

    @contextlib.contextmanager
    def part(self, rank: int) -> Iterator[tuple[BinaryIO, int]]:
        """The rank's file, at the end of its last complete block, and the lines before that."""
        with open(self._part(rank), "a+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UserError(
                    f"Another process is writing {self._part(rank)}: wait until it ends."
                ) from error
            self._claim()
            lines, size, wanted = 0, 0, self.lines_of(rank)
            file.seek(0)
            for block in iter(lambda: list(itertools.islice(file, self._block)), []):
                if not block[-1].endswith(b"\n"):
                    break
                if len(block) < self._block and lines + len(block) != wanted:
                    break
                lines, size = lines + len(block), size + sum(map(len, block))
            file.truncate(size)
            yield file, lines

    def join(self) -> bool:
        """If the parts of all ranks are complete, write the result and remove the folder."""
        with contextlib.ExitStack() as opened:
            try:
                lock = opened.enter_context(open(self._folder / "join", "wb"))
                fcntl.lockf(lock, fcntl.LOCK_EX)
                parts = [
                    opened.enter_context(open(self._part(rank), "rb"))
                    for rank in range(self._ranks)
                ]
            except FileNotFoundError:  # of a rank that has not begun, or another rank has joined
                return False
            for rank, part in enumerate(parts):
                if sum(1 for _ in part) != self.lines_of(rank):
                    return False
                part.seek(0)
            with files.atomic_writer(self._target) as result:
                for part in itertools.cycle(parts):
                    block = list(itertools.islice(part, self._block))
                    if not block:
                        break
                    result.writelines(block)
            shutil.rmtree(self._folder)
        return True


def translate(cfg: Any, target: Path, words: list[str]) -> UnknownWords:
    """Translate the lines of ``cfg.interactive.input`` into ``target``, in their order.

    cfg: fairseq's, of ``fairseq-interactive``. words: of the command.

    Returns: the counts of the source tokens that this process has read.

    Raises:
        UserError: the file cannot be read or written, a line of it is not UTF-8, or an unfinished
            translation is there.
    """
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    from lightseq_fairseq.cli.translate.sentences import Search, load, seed, uses_gpu

    source, rank = Path(cfg.interactive.input), _Rank.of_environment()
    try:
        with open(source, "rb") as file:
            lines = sum(1 for _ in utf8.lines(file, str(source)))  # a bad line is refused now
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}.") from error
    block = cfg.interactive.buffer_size if cfg.interactive.buffer_size > 0 else BLOCK
    # An error may advise to add this flag, and the blocks that are translated stay the same.
    command = [word for word in words if word != "--skip-invalid-size-inputs-valid-test"]
    about = {"command": command, "lines": lines, "bytes": source.stat().st_size,
             "processes": rank.ranks, "block": block}  # fmt: skip
    unfinished = _Unfinished(target, about, rank.ranks, block, lines)
    batches = cfg.dataset
    if batches.max_tokens is None and batches.batch_size is None:
        batches.max_tokens = _MAX_TOKENS
    if uses_gpu(cfg):
        torch.cuda.set_device(rank.device)
    seed(cfg)
    unknown = UnknownWords()
    mine = unfinished.lines_of(rank.number)
    with unfinished.part(rank.number) as (file, done):
        bar = tqdm(
            desc=None if rank.ranks == 1 else f"process 1 of {rank.ranks}", total=mine,
            initial=done, unit=" sentences", disable=rank.number > 0 or lines == 0,
        )  # fmt: skip
        first = rank.number + -(-done // block) * rank.ranks
        ours = itertools.islice(buffered_read(str(source), block), first, None, rank.ranks)
        search = functools.cache(lambda: Search(load(cfg), cfg))  # not if nothing is left
        with bar as progress:
            for texts in ours:
                found = search().translate(texts, unknown)
                best = (each.hypotheses[0].text if each.hypotheses else "" for each in found)
                file.write("".join(text.replace("\n", " ") + "\n" for text in best).encode())
                file.flush()
                os.fsync(file.fileno())
                progress.update(len(texts))
    unfinished.join()
    return unknown
